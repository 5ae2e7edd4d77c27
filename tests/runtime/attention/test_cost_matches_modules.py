"""The formulas of headwise.cost equal what real layers allocate, compute and keep while they run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headwise import cost
from headwise.costs.formulas.stages import Kernel
from headwise.errors import SpecError
from headwise.models.specs import ExpertLatentSpec, GroupedSpec, LatentSpec, RopeSpec
from headwise.runtime.attention import (
    AttentionLayer,
    GroupedQueryAttention,
    LatentSpaceAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    build,
)
from headwise.runtime.kernels import Backend
from headwise.study.counting.module import count
from tests.strategies import (
    MECHANISMS,
    AnySpec,
    Case,
    cases,
    causal,
    expert_latent_specs,
    impls,
    latent_specs,
    specs_of,
)

BACKENDS: dict[str, Backend] = {"padded": "sdpa", "unfused": "reference"}


def layer_of(spec: AnySpec, impl: str, *, kernel: str = "unfused", dtype: str = "float32") -> AttentionLayer:
    """The layer of a spec on the meta device."""
    with torch.device("meta"):
        layer = build(spec) if impl == "direct" else build(spec, impl=impl)
    layer.backend = BACKENDS[kernel]
    return layer.to(getattr(torch, dtype))


def states(layer: AttentionLayer, batch: int, tokens: int, *, device: str = "meta", gradient: bool = False) -> Tensor:
    dtype = next(layer.parameters()).dtype
    x = torch.randn(batch, tokens, layer.spec.hidden_size, device=device, dtype=dtype)
    return x.requires_grad_(gradient)


def call_of(case: Case, layer: AttentionLayer, device: str) -> tuple[Tensor, dict[str, Any]]:
    x = states(layer, case.batch, case.tokens, device=device, gradient=case.input_gradient)
    kwargs: dict[str, Any] = {"is_causal": case.is_causal}
    if case.source is not None:
        kwargs["key_value_states"] = states(
            layer, case.batch, case.source, device=device, gradient=case.input_gradient
        )
    return x, kwargs


@pytest.mark.parametrize("mechanism", MECHANISMS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_training_step(mechanism: str, data: st.DataObject) -> None:
    """Parameters; FLOPs forward and backward, of CPU kernels and on meta; bytes kept between the two."""
    case = data.draw(cases(mechanism))
    assert case.spec.mechanism == mechanism
    assert_a_training_step_costs(case)


def assert_a_training_step_costs(case: Case) -> None:
    spec, B, S, T = case.spec, case.batch, case.tokens, case.source
    layer = layer_of(spec, case.impl, kernel=case.kernel, dtype=case.dtype)
    assert layer.spec == spec
    assert cost.parameters(spec) == sum(parameter.numel() for parameter in layer.parameters())
    options: dict[str, Any] = {"batch": B, "impl": case.impl}
    for device, kernel in (("meta", "unfused"), ("cpu", case.kernel)):
        if device == "cpu":
            layer = layer.to_empty(device="cpu")
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter)
        x, kwargs = call_of(case, layer, device)
        counted = count(layer, x, backward=True, **kwargs)
        options |= {"kernel": kernel}
        assert counted.forward_flops == cost.forward_flops(spec, S, T, causal=False, cross=T is not None, **options)
        assert counted.backward_flops == cost.backward_flops(
            spec, S, T, causal=False, input_gradient=case.input_gradient, **options
        )
    kept = cost.activation_bytes(spec, S, T, causal=case.is_causal, dtype=case.dtype, **options)
    # A latent one wide, or a single token, lies in memory every way at once, and torch saves itself some copies.
    single = S == 1 and not (isinstance(spec, GroupedSpec) and case.kernel == "unfused")
    assert kept == counted.saved_bytes or single or getattr(spec, "kv_dim", 2) == 1


@pytest.mark.parametrize("qk_norm", ["head", "full"])
@pytest.mark.parametrize("impl", ["expanded", "absorbed"])
def test_mla_behind_norms(qk_norm: str, impl: str) -> None:
    """Parameters and FLOPs; it has no list of its activations."""
    spec = LatentSpec(**MLA, qk_norm=qk_norm, num_kv_heads=2, head_dim=6, bias=("o_proj",))
    layer = layer_of(spec, impl)
    assert cost.parameters(spec) == sum(parameter.numel() for parameter in layer.parameters())
    for source in (None, 5):
        case = Case(spec, impl, 2, 9, source, False, "float32", "unfused", True)
        x, kwargs = call_of(case, layer, "meta")
        counted = count(layer, x, backward=True, **kwargs)
        options: dict[str, Any] = {"batch": 2, "impl": impl, "kernel": "unfused", "causal": False}
        assert counted.forward_flops == cost.forward_flops(spec, 9, source, cross=source is not None, **options)
        assert counted.backward_flops == cost.backward_flops(spec, 9, source, input_gradient=True, **options)
    with pytest.raises(SpecError, match=f"qk_norm = '{qk_norm}': an MLA layer with it has no list"):
        cost.activation_bytes(spec, 9, dtype="float32")


MLA: dict[str, Any] = {"hidden_size": 12, "num_heads": 3, "kv_lora_rank": 7, "qk_nope_head_dim": 4}
MLA |= {"qk_rope_head_dim": 4, "v_head_dim": 5, "rope": RopeSpec(dim=4, interleaved=True)}
EXPERT: dict[str, Any] = {"hidden_size": 12, "num_heads": 4, "head_dim": 6, "latent_kv_heads": 2, "kv_dim": 5}
EXPERT |= {"num_experts": 3, "is_causal": False}
EDGES = {
    "no content, narrow rotary key": LatentSpec(**MLA | {"qk_nope_head_dim": 0}),
    "no content, wide rotary key": LatentSpec(**MLA | {"qk_nope_head_dim": 0, "kv_lora_rank": 3}),
    "value bias": LatentSpec(**MLA, bias=("kv_b_proj",)),
    "no content, value bias": LatentSpec(**MLA | {"qk_nope_head_dim": 0, "bias": ("kv_b_proj",)}),
    "one head": LatentSpec(**MLA | {"num_heads": 1}),
    "experts": ExpertLatentSpec(**EXPERT),
    "one expert": ExpertLatentSpec(**EXPERT | {"num_experts": 1, "top_k": 1}),
    "one expert head": ExpertLatentSpec(**EXPERT | {"num_heads": 1, "latent_kv_heads": 1}),
    "one dim beside the rotation": ExpertLatentSpec(**EXPERT | {"head_dim": 3, "rope": RopeSpec(dim=2)}),
    "all rotated": ExpertLatentSpec(**EXPERT, rope=RopeSpec(dim=6)),
    "one dim a head": ExpertLatentSpec(**EXPERT | {"head_dim": 1}),
    "partly rotated sequence": ExpertLatentSpec(**EXPERT, rope=RopeSpec(dim=4), conditioning="sequence"),
    "all rotated sequence": ExpertLatentSpec(**EXPERT, rope=RopeSpec(dim=6), conditioning="sequence"),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("kernel", BACKENDS)
def test_a_training_step_at_the_edges(edge: str, kernel: Kernel) -> None:
    spec: Any = EDGES[edge]
    is_causal = getattr(spec, "conditioning", "token") == "token"
    for impl, batch, source in itertools.product(impls(spec), (1, 2), (None, 5)):
        case = Case(spec, impl, batch, 9, source, is_causal and source is None, "float32", kernel, True)
        assert_a_training_step_costs(case)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_torchs_own_counter_agrees(mechanism: str, data: st.DataObject) -> None:
    """Unfused products on meta need none of our formulas: FlopCounterMode as torch ships it."""
    case = data.draw(cases(mechanism))
    spec, S, T = case.spec, case.tokens, case.source
    layer = layer_of(spec, case.impl, dtype=case.dtype)
    x, kwargs = call_of(case, layer, "meta")
    with FlopCounterMode(display=False) as counter:
        out = layer(x, **kwargs)
        forward = counter.get_total_flops()
        out.backward(torch.empty_like(out))
    options: dict[str, Any] = {"batch": case.batch, "causal": False, "impl": case.impl}
    assert forward == cost.forward_flops(spec, S, T, cross=T is not None, **options)
    backward = cost.backward_flops(spec, S, T, kernel="unfused", input_gradient=case.input_gradient, **options)
    assert counter.get_total_flops() == forward + backward


@pytest.mark.parametrize("mechanism", MECHANISMS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), batch=st.integers(1, 3), chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@torch.no_grad()
def test_chunks_through_a_cache(mechanism: str, data: st.DataObject, batch: int, chunks: list[int]) -> None:
    """A prompt in chunks, or a prompt and tokens one by one: FLOPs of every call, bytes of the cache."""
    spec = causal(data.draw(specs_of(mechanism, tiny=True)))
    impl = data.draw(st.sampled_from(impls(spec)))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
    layer, total = layer_of(spec, impl, dtype=dtype), 0
    cache = layer.new_cache(batch, sum(chunks))
    allocated = sum(buffer.untyped_storage().nbytes() for buffer in cache.buffers)
    assert cost.cache_bytes(spec, sum(chunks), batch=batch, dtype=dtype) == cache.nbytes == allocated
    for chunk in chunks:
        total += chunk
        counted = count(layer, states(layer, batch, chunk), is_causal=True, cache=cache)
        assert counted.cache_bytes == allocated
        assert counted.forward_flops == cost.forward_flops(spec, chunk, total, batch=batch, causal=False, impl=impl)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@settings(max_examples=10, deadline=None)
@given(data=st.data(), tokens=st.integers(1, 9), source=st.integers(1, 9))
@torch.no_grad()
def test_cross_attention_from_a_filled_cache(mechanism: str, data: st.DataObject, tokens: int, source: int) -> None:
    spec = causal(data.draw(specs_of(mechanism, tiny=True)), sliding_window=None)
    impl = data.draw(st.sampled_from(impls(spec)))
    layer = layer_of(spec, impl)
    cache, kv = layer.new_cache(2, source), states(layer, 2, source)
    for cached in (False, True):
        counted = count(layer, states(layer, 2, tokens), key_value_states=kv, cache=cache)
        expected = cost.forward_flops(spec, tokens, source, batch=2, impl=impl, cross=True, cached=cached)
        assert counted.forward_flops == expected


@pytest.mark.parametrize("mechanism", MECHANISMS)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), tokens=st.integers(2, 16))
@torch.no_grad()
def test_a_kernel_told_it_is_causal_computes_the_pairs_it_is_charged_for(
    mechanism: str, data: st.DataObject, tokens: int
) -> None:
    spec = causal(data.draw(specs_of(mechanism, tiny=True)), sliding_window=None)
    impl = data.draw(st.sampled_from(impls(spec)))
    if isinstance(spec, ExpertLatentSpec):  # the one way of theirs whose scores are no sum, and so are fused
        spec, impl = replace(spec, rope=None), "absorbed"
    layer = layer_of(spec, impl, kernel="padded").to_empty(device="cpu")
    counted = count(layer, states(layer, 2, tokens, device="cpu"), is_causal=True)
    for is_causal, flops in ((True, counted.causal_flops), (False, counted.forward_flops)):
        assert flops == cost.forward_flops(spec, tokens, batch=2, causal=is_causal, impl=impl, kernel="padded")


@settings(max_examples=20, deadline=None)
@given(
    spec=latent_specs(tiny=True) | expert_latent_specs(tiny=True),
    batch=st.integers(1, 3),
    new=st.integers(1, 6),
    past=st.integers(0, 9),
    is_causal=st.booleans(),
)
@torch.no_grad()
def test_auto_is_what_auto_costs(
    spec: LatentSpec | ExpertLatentSpec, batch: int, new: int, past: int, is_causal: bool
) -> None:
    spec = causal(spec, sliding_window=None)
    flops = {}
    for impl in ("expanded", "absorbed", "auto"):
        layer = layer_of(spec, impl)
        cache = layer.new_cache(batch, past + new)
        if past:
            layer(states(layer, batch, past), is_causal=True, cache=cache)
        flops[impl] = count(layer, states(layer, batch, new), is_causal=is_causal, cache=cache).forward_flops
    options = {
        impl: cost.forward_flops(spec, new, past + new, batch=batch, causal=is_causal, impl=impl) for impl in flops
    }
    assert options["auto"] == min(options.values())
    chosen = "expanded" if options["expanded"] < options["absorbed"] else "absorbed"
    if options["expanded"] != options["absorbed"]:
        assert flops["auto"] == flops[chosen]
    assert flops["auto"] in (flops["expanded"], flops["absorbed"])


@pytest.mark.parametrize("changes", [{"qk_nope_head_dim": 0}, {"bias": ["kv_b_proj"]}])
def test_absorption_at_its_edges(changes: dict[str, Any]) -> None:
    """Without content dims the queries meet only the rotary key; a value bias is one more column of values."""
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, **changes}
    layer = MultiHeadLatentAttention(16, 3, **sizes, impl="absorbed", backend="reference").to("meta")
    cache = layer.new_cache(2, 9)
    layer(states(layer, 2, 7), cache=cache)
    counted = count(layer, states(layer, 2, 2), cache=cache)
    flops = cost.forward_flops(layer.spec, 2, 9, batch=2, causal=False, impl="absorbed")
    assert flops == counted.forward_flops


def guide_layers() -> dict[str, AttentionLayer]:
    """The four layers of the guides' exact figures: E = 256, h = 8, biases on every projection."""
    return {
        "mha": MultiHeadAttention(256, 8, bias=True),
        "mqa": MultiQueryAttention(256, 8, bias=True),
        "gqa": GroupedQueryAttention(256, 8, group_size=2, bias=True),
        "mla": MultiHeadLatentAttention(
            256,
            8,
            kv_lora_rank=64,
            q_lora_rank=64,
            qk_nope_head_dim=16,
            qk_rope_head_dim=26,
            v_head_dim=16,
            latent_norm=False,
            bias=True,
        ),
    }


@pytest.mark.parametrize(
    ("mechanism", "parameters", "thop"),
    [("mha", 263168, 2621440), ("mqa", 148032, 1474560), ("gqa", 197376, 1966080), ("mla", 111082, 1100800)],
)
def test_the_guides_exact_figures(mechanism: str, parameters: int, thop: int) -> None:
    layer = guide_layers()[mechanism]
    assert layer.spec.mechanism == mechanism
    assert sum(parameter.numel() for parameter in layer.parameters()) == parameters
    assert cost.parameters(layer.spec) == parameters
    assert cost.thop_count(layer.spec, 10) == thop
    # Counted from the modules too: one for each multiply-add of a linear layer.
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    assert 10 * sum(linear.weight.numel() for linear in linears) == thop
    assert layer(torch.zeros(2, 10, 256)).shape == (2, 10, 256)


@pytest.mark.parametrize(
    ("layer", "parameters"),
    [
        (MultiHeadAttention(512, 8), 1_048_576),
        (MultiQueryAttention(512, 8), 589_824),
        (GroupedQueryAttention(512, 8, 4), 786_432),
        (LatentSpaceAttention(512, 8, 256), 917_504),
        (LatentSpaceAttention(512, 8), 917_504),
    ],
)
def test_the_guides_weights_only_figures(layer: AttentionLayer, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in layer.parameters()) == parameters
    assert cost.parameters(layer.spec) == parameters
