from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwise import cost
from headwise.errors import ArgumentError
from headwise.models.specs import (
    ExpertLatentSpec,
    GroupedSpec,
    LatentSpaceSpec,
    LatentSpec,
    ModelSpec,
    RopeSpec,
    read_spec,
)
from tests.strategies import AnySpec, expert_latent_specs, grouped_specs, latent_space_specs, latent_specs, specs

tokens, batches = st.integers(1, 300), st.integers(1, 4)

GUIDE: dict[str, Any] = {"hidden_size": 256, "num_heads": 8, "head_dim": 32, "bias": "hf"}
MLA_GUIDE = LatentSpec(
    hidden_size=256,
    num_heads=8,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=26,
    v_head_dim=16,
    latent_norm=False,
    bias=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)


# --- The figures of the guides


@pytest.mark.parametrize(
    ("spec", "parameters", "thop"),
    [
        (GroupedSpec(**GUIDE, num_kv_heads=8), 263168, 2621440),
        (GroupedSpec(**GUIDE, num_kv_heads=1), 148032, 1474560),
        (GroupedSpec(**GUIDE, num_kv_heads=4), 197376, 1966080),
        (MLA_GUIDE, 111082, 1100800),
    ],
    ids=["mha", "mqa", "gqa", "mla"],
)
def test_the_guides_parameters_and_thop_counts(spec: AnySpec, parameters: int, thop: int) -> None:
    assert cost.parameters(spec) == parameters
    assert cost.thop_count(spec, 10) == thop
    assert cost.thop_count(spec, 10, batch=2) == 2 * thop


@pytest.mark.parametrize(("kv_heads", "parameters"), [(8, 1048576), (1, 589824), (4, 786432)])
def test_the_guides_weights_alone(kv_heads: int, parameters: int) -> None:
    assert (
        cost.parameters(GroupedSpec(hidden_size=512, num_heads=8, num_kv_heads=kv_heads, head_dim=64)) == parameters
    )


def test_the_guides_latent_space_weights() -> None:
    assert cost.parameters(LatentSpaceSpec(hidden_size=512, num_heads=8, latent_dim=256, head_dim=64)) == 917504


# --- The closed forms, written out again


def grouped_parameters(spec: GroupedSpec) -> int:
    E, h, k, d, v = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    weights = E * d * (h + k) + E * v * (k + (h if spec.output_projection else 0))
    biases = {"q_proj": h * d, "k_proj": k * d, "v_proj": k * v, "o_proj": E}
    norms = {None: 0, "head": 2 * d, "full": (h + k) * d}
    return weights + sum(biases[name] for name in spec.bias) + norms[spec.qk_norm] + (h if spec.sinks else 0)


def latent_parameters(spec: LatentSpec) -> int:
    E, h, R, q = spec.hidden_size, spec.num_heads, spec.kv_lora_rank, spec.q_lora_rank
    n, p, v = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    query = E * h * (n + p) if q is None else E * q + q * h * (n + p)
    norms = (R + (q or 0)) if spec.latent_norm else 0
    outputs = {
        "q_proj": h * (n + p),
        "q_a_proj": q or 0,
        "q_b_proj": h * (n + p),
        "kv_a_proj_with_mqa": R + p,
        "kv_b_proj": h * (n + v),
        "o_proj": E,
    }
    biases = sum(outputs[name] for name in spec.bias)
    return query + E * (R + p) + R * h * (n + v) + h * v * E + norms + biases


@given(grouped_specs())
def test_grouped_parameters(spec: GroupedSpec) -> None:
    assert cost.parameters(spec) == grouped_parameters(spec)


@given(latent_specs())
def test_latent_parameters(spec: LatentSpec) -> None:
    for impl in ("expanded", "absorbed", "cached_kv"):
        assert sum(stage.parameters for stage in cost.stages(spec, impl)) == latent_parameters(spec)
    assert cost.parameters(spec) == latent_parameters(spec)


@given(latent_space_specs())
def test_latent_space_parameters(spec: LatentSpaceSpec) -> None:
    E, R, W = spec.hidden_size, spec.latent_dim, spec.num_heads * spec.head_dim
    outputs = {"q_proj": W, "k_proj": R, "v_proj": R, "v_out_proj": W, "o_proj": E}
    biases = sum(outputs[name] for name in spec.bias)
    assert cost.parameters(spec) == 2 * E * W + 2 * E * R + R * W + biases


@given(expert_latent_specs())
def test_expert_latent_parameters(spec: ExpertLatentSpec) -> None:
    E, h, d, k, C, X = sizes_of(spec)
    outputs = {"q_proj": h * d, "kv_a_proj": 2 * k * C, "gate_proj": X, "o_proj": E}
    biases = sum(outputs[name] for name in spec.bias)
    for impl in ("expanded", "absorbed"):
        expected = 2 * E * h * d + 2 * E * k * C + h * d * X + 2 * X * h * C * d + biases
        assert sum(stage.parameters for stage in cost.stages(spec, impl, new_tokens=3)) == expected


def sizes_of(spec: ExpertLatentSpec) -> tuple[int, ...]:
    return spec.hidden_size, spec.num_heads, spec.head_dim, spec.latent_kv_heads, spec.kv_dim, spec.num_experts


def pairs(S: int, T: int, window: int | None) -> int:
    return sum(min(position, window or position) for position in range(T - S + 1, T + 1))


def held(S: int, T: int, window: int | None) -> int:
    """The keys of a call: a window's cache has forgotten those that no new token sees."""
    return T if window is None else min(T, S + window - 1)


def ways(spec: AnySpec, S: int, T: int) -> list[tuple[bool, int, int]]:
    """(causal, pairs, keys) of a call that computes all pairs, and of one that computes those the mask leaves."""
    total = held(S, T, spec.sliding_window)
    return [(False, S * total, total), (True, pairs(S, T, spec.sliding_window), total)]


@given(grouped_specs(), batches, tokens, tokens)
def test_grouped_flops(spec: GroupedSpec, B: int, S: int, past: int) -> None:
    E, h, k, d, v, T = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, S + past
    projections = 2 * B * S * E * (d * (h + k) + v * (k + (h if spec.output_projection else 0)))
    for causal, seen, _ in ways(spec, S, T):
        expected = projections + 2 * B * h * seen * (d + v)
        assert cost.forward_flops(spec, S, T, batch=B, causal=causal) == expected
        if causal == spec.is_causal:
            assert cost.forward_flops(spec, S, T, batch=B) == expected
        if v == d and spec.output_projection:
            assert expected == 2 * B * S * E * d * (2 * h + 2 * k) + 4 * B * h * seen * d
        softmax = cost.forward_flops(spec, S, T, batch=B, causal=causal, softmax=True)
        assert softmax - expected == 5 * B * h * seen


@given(latent_specs(), batches, tokens, tokens)
def test_latent_flops(spec: LatentSpec, B: int, S: int, past: int) -> None:
    E, h, R, q, T = spec.hidden_size, spec.num_heads, spec.kv_lora_rank, spec.q_lora_rank, S + past
    n, p, v = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    query = E * h * (n + p) if q is None else E * q + q * h * (n + p)
    common = 2 * B * S * (query + E * (R + p) + h * v * E)
    compared = p + (R if n else 0)
    for causal, seen, total in ways(spec, S, T):
        expected = {
            "expanded": common + 2 * B * total * h * R * (n + v) + 2 * B * h * seen * (n + p + v),
            "cached_kv": common + 2 * B * S * h * R * (n + v) + 2 * B * h * seen * (n + p + v),
            "absorbed": common
            + 2 * B * S * h * R * (n + v)
            + 2 * B * h * seen * (compared + R + ("kv_b_proj" in spec.bias)),
        }
        for impl, flops in expected.items():
            assert cost.forward_flops(spec, S, T, batch=B, causal=causal, impl=impl) == flops


@given(latent_space_specs(), batches, tokens, tokens)
def test_latent_space_flops(spec: LatentSpaceSpec, B: int, S: int, past: int) -> None:
    E, R, W = spec.hidden_size, spec.latent_dim, spec.num_heads * spec.head_dim
    for causal, seen, _ in ways(spec, S, S + past):
        expected = 2 * B * S * (2 * E * W + 2 * E * R + R * W) + 4 * B * seen * R
        assert cost.forward_flops(spec, S, S + past, batch=B, causal=causal) == expected


@given(expert_latent_specs(), batches, st.just(1) | tokens, tokens)
def test_expert_latent_flops(spec: ExpertLatentSpec, B: int, S: int, past: int) -> None:
    E, h, d, k, C, X = sizes_of(spec)
    p = 0 if spec.rope is None else spec.rope.dim
    one_row = S == 1 or spec.conditioning == "sequence"
    gates = 1 if spec.conditioning == "sequence" else S
    common = 2 * B * S * (2 * E * h * d + 2 * E * k * C) + 2 * B * gates * h * d * X
    for causal, seen, total in ways(spec, S, S + past):
        if causal and spec.conditioning == "sequence":
            continue
        if one_row:
            expanded = 4 * B * X * h * C * d + 4 * B * total * h * C * d + 4 * B * h * seen * d
            rotary = 2 * B * X * h * C * p + 2 * B * total * h * C * p + 2 * B * h * seen * p
        else:
            expanded = 4 * B * total * X * h * C * d + 4 * B * h * seen * X * d
            rotary = 2 * B * total * X * h * C * p + 2 * B * h * seen * X * p
        content = 2 * B * S * X * h * C * (d - p) + (2 * B * h * seen * C if d > p else 0)
        absorbed = content + rotary + 2 * B * h * seen * C + 2 * B * S * X * h * C * d
        for impl, flops in {"expanded": expanded, "absorbed": absorbed}.items():
            assert cost.forward_flops(spec, S, S + past, batch=B, causal=causal, impl=impl) == common + flops


@given(specs(), batches, tokens, st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
def test_cache_bytes(spec: AnySpec, B: int, T: int, dtype: str) -> None:
    size = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}[dtype]
    if isinstance(spec, GroupedSpec):
        values = spec.num_kv_heads * spec.head_dim + spec.num_kv_heads * spec.value_dim
    elif isinstance(spec, LatentSpec):
        values = spec.kv_lora_rank + spec.qk_rope_head_dim
    elif isinstance(spec, LatentSpaceSpec):
        values = 2 * spec.latent_dim
    else:
        values = 2 * spec.latent_kv_heads * spec.kv_dim
    per_token = values * size if spec.is_causal else 0
    assert cost.cache_bytes_per_token(spec, dtype) == per_token
    assert cost.cache_bytes(spec, T, batch=B, dtype=dtype) == B * min(T, spec.sliding_window or T) * per_token


# --- Absorbed or expanded


@given(latent_specs() | expert_latent_specs(), tokens, tokens, st.booleans())
def test_the_best_way_is_the_one_with_fewer_flops(
    spec: LatentSpec | ExpertLatentSpec, S: int, past: int, causal: bool
) -> None:
    causal = causal and getattr(spec, "conditioning", "token") == "token"
    absorbed, expanded = (
        cost.forward_flops(spec, S, S + past, causal=causal, impl=impl) for impl in ("absorbed", "expanded")
    )
    assert cost.forward_flops(spec, S, S + past, causal=causal) == min(absorbed, expanded)
    _, visible, total = ways(spec, S, S + past)[causal]
    best = cost.formulas(spec).best_impl(spec, S, total, visible)
    assert absorbed == expanded or best == ("absorbed" if absorbed < expanded else "expanded")


def test_the_best_way_of_experts_whatever_is_rotated() -> None:
    for D, P, C, X in itertools.product((2, 4), (0, 2, 4), (1, 3, 6), (1, 2, 3)):
        if P > D:
            continue
        rope = RopeSpec(dim=P) if P else None
        sizes = {"head_dim": D, "kv_dim": C, "num_experts": X, "top_k": 1, "rope": rope}
        spec = ExpertLatentSpec(hidden_size=8, num_heads=4, latent_kv_heads=2, **sizes)
        for S, T in ((1, 1), (1, 9), (4, 4), (4, 9), (2, 50), (30, 30)):
            ways = [cost.forward_flops(spec, S, T, impl=impl) for impl in ("absorbed", "expanded")]
            assert cost.forward_flops(spec, S, T) == min(ways)


def test_a_draw_is_expanded() -> None:
    spec = dataclasses.replace(MLA_GUIDE, kv_lora_rank=16, bias=())
    assert [cost.forward_flops(spec, 9, causal=False, impl=impl) for impl in ("absorbed", "expanded")] == [
        cost.forward_flops(spec, 9, causal=False)
    ] * 2
    assert cost.formulas(spec).best_impl(spec, 9, 9, 81) == "expanded"


def test_deepseek_v3_absorbs_below_171_new_tokens() -> None:
    spec = read_spec("deepseek-v3").layers[0]
    best = cost.formulas(spec).best_impl
    assert [best(spec, S, 10**9, S * 10**9) for S in (1, 170, 171)] == ["absorbed", "absorbed", "expanded"]
    assert best(spec, 4096, 4096, 4096**2) == "expanded"


@given(specs(), st.sampled_from([1, 2, 7, 200, 5000]))
def test_intensity_is_the_flops_that_one_more_cached_token_costs(spec: AnySpec, S: int) -> None:
    module = cost.formulas(spec)
    spec = dataclasses.replace(spec, sliding_window=None)  # with a window nothing is added any more
    impl = module.IMPLS[0]
    if len(module.IMPLS) > 1:
        # A spec at its own crossover is decided by the last token of a long cache; both answers are right there.
        impl = module.best_impl(spec, S, 1_000_000 * S, 1_000_000 * S * S)
        assume(impl == module.best_impl(spec, S, 10**15, S * 10**15))
    step = cost.forward_flops(spec, S, 10**9 + 1, causal=False, impl=impl)
    step -= cost.forward_flops(spec, S, 10**9, causal=False, impl=impl)
    bytes_per_token = 2 * int(module.cache_values(spec))
    assert cost.decode_intensity(spec, new_tokens=S) == step / bytes_per_token


@given(grouped_specs(), st.integers(1, 9))
def test_grouped_intensity_is_the_closed_form(spec: GroupedSpec, S: int) -> None:
    assert cost.decode_intensity(spec, new_tokens=S) == pytest.approx(spec.group_size * S, rel=1e-12)
    assert cost.decode_intensity(spec, dtype="float32") == pytest.approx(spec.group_size / 2, rel=1e-12)


# --- What may be asked


@pytest.mark.parametrize(("S", "T"), [(0, None), (-1, 4), (5, 4), (0, 0)])
def test_new_tokens_are_some_of_all_tokens(S: int, T: int | None) -> None:
    rule = f"must be from 1 to total_tokens = {S if T is None else T}"
    with pytest.raises(ArgumentError, match=f"^new_tokens = {S}: {rule}$"):
        cost.forward_flops(MLA_GUIDE, S, T)


@pytest.mark.parametrize(("S", "T", "named"), [(0, 4, "new_tokens"), (3, 0, "total_tokens")])
def test_cross_attention_has_tokens_on_both_sides(S: int, T: int, named: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{named} = 0: must be at least 1$"):
        cost.forward_flops(MLA_GUIDE, S, T, cross=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"new_tokens": 1.5}, r"^new_tokens = 1\.5: must be a whole number$"),
        ({"new_tokens": True}, r"^new_tokens = True: must be a whole number$"),
        ({"new_tokens": 3, "batch": 0}, r"^batch = 0: must be at least 1$"),
        ({"new_tokens": 3, "batch": 2.0}, r"^batch = 2\.0: must be a whole number$"),
        ({"new_tokens": 3, "causal": "no"}, r"^causal = 'no': must be True, False"),
        ({"new_tokens": 5, "total_tokens": 4, "causal": True, "cross": True}, r"^causal = True: must be false"),
    ],
)
def test_impossible_calls(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cost.forward_flops(MLA_GUIDE, **arguments)


@pytest.mark.parametrize(("tokens", "batch"), [(-1, 1), (2.5, 1), (True, 1), (4, 0), (4, -1)])
def test_a_cache_of_impossible_size(tokens: Any, batch: int) -> None:
    with pytest.raises(ArgumentError, match=r"^(tokens|batch) = "):
        cost.cache_bytes(MLA_GUIDE, tokens, batch=batch)


def test_a_causal_source_leaves_the_pairs_of_the_bottom_right_mask() -> None:
    whole, causal = (
        cost.forward_flops(MLA_GUIDE, 3, 4, causal=c, cross=True, impl="expanded") for c in (False, True)
    )
    head = MLA_GUIDE.qk_head_dim + MLA_GUIDE.v_head_dim
    assert whole - causal == 2 * MLA_GUIDE.num_heads * head * (3 * 4 - (2 + 3 + 4))


def test_cross_attention_alone_is_said_to_be_cached() -> None:
    with pytest.raises(ArgumentError, match=r"^cached = True: is for cross-attention"):
        cost.forward_flops(MLA_GUIDE, 3, 4, cached=True)


@pytest.mark.parametrize("function", [cost.forward_flops, cost.backward_flops, cost.activation_bytes])
def test_an_unknown_kernel(function: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^kernel = 'flash': must be one of"):
        function(MLA_GUIDE, 3, kernel="flash")


def test_a_chunk_is_some_tokens() -> None:
    with pytest.raises(ArgumentError, match=r"^chunk = 0: must be at least 1$"):
        cost.prefill_flops(MLA_GUIDE, 3, chunk=0)


@pytest.mark.parametrize("dtype", ["bf16", "int4", "", "torch.bool"])
def test_an_unknown_dtype(dtype: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^dtype = '{dtype}': must be one of"):
        cost.cache_bytes_per_token(MLA_GUIDE, dtype)


def test_dtypes_by_torchs_names() -> None:
    import torch

    for name, size in cost.DTYPE_BYTES.items():
        dtype = getattr(torch, name)
        assert cost.dtype_bytes(str(dtype)) == cost.dtype_bytes(name) == size == dtype.itemsize


def test_an_unknown_implementation() -> None:
    with pytest.raises(ArgumentError, match=r"^impl = 'fused': must be one of expanded"):
        cost.forward_flops(MLA_GUIDE, 1, impl="fused")
    with pytest.raises(ArgumentError, match=r"^impl = 'absorbed': must be one of direct"):
        cost.forward_flops(GroupedSpec(**GUIDE, num_kv_heads=1), 1, impl="absorbed")


# --- A stack of layers


@given(st.lists(specs(), min_size=1, max_size=4), tokens, tokens, batches)
def test_a_model_costs_the_sum_of_its_layers(layers: list[AnySpec], S: int, past: int, B: int) -> None:
    model = ModelSpec(model_type="toy", hidden_size=1, layers=tuple(layers))
    T = S + past
    assert cost.model.parameters(model) == sum(cost.parameters(s) for s in layers)
    assert cost.model.cache_bytes_per_token(model) == sum(cost.cache_bytes_per_token(s) for s in layers)
    assert cost.model.cache_bytes(model, T, batch=B) == sum(cost.cache_bytes(s, T, batch=B) for s in layers)
    assert cost.model.attention_flops(model, S, T, batch=B) == sum(
        cost.forward_flops(s, S, T, batch=B) for s in layers
    )
