from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import LatentSpec, RopeSpec
from headwise.runtime.attention import MultiHeadLatentAttention, RotaryEmbedding, build
from headwise.runtime.kernels import Backend
from tests.backends import EXACT
from tests.by_hand import attend_by_rows, may_attend, project, rms_by_hand, rotate_by_hand
from tests.closeness import assert_close

IMPLS = ["expanded", "absorbed"]
SMALL: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed query": {"q_lora_rank": 7},
    "no norm": {"q_lora_rank": 7, "latent_norm": False},
    "biased": {"q_lora_rank": 7, "bias": True},
    "transformers' biases": {"q_lora_rank": 7, "bias": "hf", "norm_eps": 1e-3},
    "all dims rotate": {"qk_nope_head_dim": 0, "bias": True, "latent_norm": False},
    "behind norms of heads": {"qk_norm": "head", "num_kv_heads": 1, "head_dim": 7, "latent_norm": False},
    "behind whole norms": {
        "qk_norm": "full",
        "num_kv_heads": 3,
        "head_dim": 4,
        "bias": ("o_proj",),
        "norm_eps": 1e-2,
    },
    "half-split": {"rope": RopeSpec(dim=4, theta=100.0), "softmax_scale": 0.7},
}


def make(*, seed: int = 0, **kwargs: Any) -> MultiHeadLatentAttention:
    """A layer 16 wide with 3 heads, in float64 and eval mode; every parameter is random, norms and biases too."""
    layer = MultiHeadLatentAttention(16, 3, **{**SMALL, **kwargs}).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            spread = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(spread if parameter.dim() == 2 else 1 + spread)
    return layer


def both(*, seed: int = 0, **kwargs: Any) -> list[MultiHeadLatentAttention]:
    """One layer, expanded and absorbed."""
    return [make(seed=seed, impl=impl, **kwargs) for impl in IMPLS]


def hidden(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(
    layer: MultiHeadLatentAttention, x: Tensor, source: Tensor, kept: Tensor, x_at: Tensor, source_at: Tensor
) -> Tensor:
    """Equations 37–47 of DeepSeek-V2, head by head."""
    spec = layer.spec
    R, N, P, V = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim

    def normed(norm: Any, latent: Tensor) -> Tensor:
        return latent if norm is None else rms_by_hand(latent, norm.weight, norm.eps)

    def turned(part: Tensor, at: Tensor) -> Tensor:
        angles, interleaved = layer.rope.frequencies, layer.rope.spec.interleaved
        return torch.stack([rotate_by_hand(row, at, angles, interleaved=interleaved) for row in part])

    def normed_heads(projection: Any, norm: Any, states: Tensor) -> Tensor:
        projected = project(projection, states)
        if spec.qk_norm == "full":
            return normed(norm, projected)
        return torch.cat([normed(norm, head) for head in projected.split(spec.head_dim, -1)], -1)

    if spec.qk_norm is not None:
        heads = normed_heads(layer.q_proj, layer.q_norm, x).split(spec.head_dim, -1)
        maps = layer.q_b_proj.weight.split(N + P)
        queries = torch.cat([head @ rows.T for head, rows in zip(heads, maps, strict=True)], -1)
        source = torch.cat((normed_heads(layer.k_proj, layer.k_norm, source), project(layer.v_proj, source)), -1)
    elif spec.q_lora_rank is None:
        queries = project(layer.q_proj, x)
    else:
        queries = project(layer.q_b_proj, normed(layer.q_a_layernorm, project(layer.q_a_proj, x)))
    down = project(layer.kv_a_proj_with_mqa, source)
    shared = turned(down[..., R:], source_at)
    up = project(layer.kv_b_proj, normed(layer.kv_a_layernorm, down[..., :R]))
    query, key, value = [], [], []
    for h in range(spec.num_heads):
        head_query, decoded = queries[..., h * (N + P) : (h + 1) * (N + P)], up[..., h * (N + V) : (h + 1) * (N + V)]
        query.append(torch.cat((head_query[..., :N], turned(head_query[..., N:], x_at)), dim=-1))
        key.append(torch.cat((decoded[..., :N], shared), dim=-1))
        value.append(decoded[..., N:])
    mixed = attend_by_rows(
        torch.stack(query, 1), torch.stack(key, 1), torch.stack(value, 1), kept, spec.softmax_scale
    )
    return project(layer.o_proj, torch.cat(list(mixed.unbind(1)), dim=-1))


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_it_is_its_equations(impl: str, backend: Backend, sizes: str) -> None:
    layer, x = make(seed=2, impl=impl, backend=backend, **SIZES[sizes]), hidden(2, 6)
    mask = torch.tensor([[True] * 6, [False, False, True, True, True, False]])
    for is_causal, padding in itertools.product([False, True], [None, mask]):
        allowed, at = may_attend(padding, is_causal, (2, 3, 6, 6)), torch.arange(6)
        out = layer(x, attention_mask=padding, is_causal=is_causal)
        assert_close(out, by_hand(layer, x, x, allowed, at, at), 1e-12)


@pytest.mark.parametrize("q_lora_rank", [None, 7])
@pytest.mark.parametrize("latent_norm", [False, True])
@pytest.mark.parametrize("qk_nope_head_dim", [0, 6])
@torch.no_grad()
def test_absorbed_is_expanded_whatever_the_biases(
    q_lora_rank: int | None, latent_norm: bool, qk_nope_head_dim: int
) -> None:
    query = ("q_proj",) if q_lora_rank is None else ("q_a_proj", "q_b_proj")
    names = (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    # Left padding: with causality the second sequence's first rows attend to nothing.
    x, mask = hidden(2, 5), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    for chosen in itertools.product([False, True], repeat=len(names)):
        expanded, absorbed = both(
            seed=3,
            q_lora_rank=q_lora_rank,
            latent_norm=latent_norm,
            qk_nope_head_dim=qk_nope_head_dim,
            bias=[name for name, biased in zip(names, chosen, strict=True) if biased],
        )
        call: dict[str, Any] = {"attention_mask": mask, "is_causal": True}
        assert_close(absorbed(x, **call), expanded(x, **call), 1e-12)
        empty = absorbed(x, **call)[1, :2]
        bias = torch.zeros(16).double() if absorbed.o_proj.bias is None else absorbed.o_proj.bias
        assert torch.equal(empty, bias.expand(2, 16))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            "kv_lora_rank": st.integers(1, 12),
            "qk_nope_head_dim": st.integers(0, 7),
            "qk_rope_head_dim": st.sampled_from([2, 4, 6]),
            "v_head_dim": st.integers(1, 7),
            "q_lora_rank": st.none() | st.integers(1, 9),
            "latent_norm": st.booleans(),
            "bias": st.sampled_from([False, True, "hf", "qkv"]),
        }
    ),
    seed=st.integers(0, 2**32),
    past=st.integers(1, 4),
    new=st.integers(1, 3),
)
@torch.no_grad()
def test_absorbed_is_expanded_from_a_cache(sizes: dict[str, Any], seed: int, past: int, new: int) -> None:
    x, outputs = hidden(2, past + new, seed=seed), []
    for layer in both(seed=seed, **sizes):
        cache = layer.new_cache(2, past + new)
        layer(x[:, :past], is_causal=True, cache=cache)
        outputs.append(layer(x[:, past:], is_causal=True, cache=cache))
    assert_close(outputs[1], outputs[0], 1e-12)


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_absorbed_and_expanded_return_the_same_weights(sizes: str) -> None:
    x = hidden(2, 5)
    (out, weights), (absorbed_out, absorbed_weights) = (
        layer(x, is_causal=True, return_weights=True) for layer in both(seed=4, **SIZES[sizes])
    )
    assert weights.shape == (2, 3, 5, 5)
    assert_close(absorbed_weights, weights, 1e-12)
    assert_close(absorbed_out, out, 1e-12)


@pytest.mark.parametrize("sizes", ["plain", "biased"])
@torch.no_grad()
def test_absorbed_and_expanded_drop_the_same_weights(sizes: str) -> None:
    x, outputs = hidden(2, 9), []
    for layer in both(seed=5, dropout=0.4, backend="reference", **SIZES[sizes]):
        layer.train()
        torch.manual_seed(6)
        outputs.append(layer(x))
    assert_close(outputs[1], outputs[0], 1e-12)
    assert (outputs[0] - make(seed=5, **SIZES[sizes])(x)).abs().max() > 0.01


@torch.no_grad()
def test_auto_takes_the_implementation_with_fewer_flops() -> None:
    expanded, absorbed = both(seed=7, kv_lora_rank=32)
    auto = make(seed=7, kv_lora_rank=32)
    x, caches = hidden(2, 40), [layer.new_cache(2, 40) for layer in (expanded, absorbed, auto)]
    assert torch.equal(auto(x[:, :39], is_causal=True, cache=caches[2]), expanded(x[:, :39], is_causal=True))
    for layer, cache in zip((expanded, absorbed), caches, strict=False):
        layer(x[:, :39], is_causal=True, cache=cache)
    step = [layer(x[:, 39:], cache=cache) for layer, cache in zip((expanded, absorbed, auto), caches, strict=True)]
    assert torch.equal(step[2], step[1])
    assert not torch.equal(step[1], step[0])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_cross_attention_is_its_equations(impl: str, sizes: str) -> None:
    layer, x, source = make(seed=8, impl=impl, **SIZES[sizes]), hidden(2, 3), hidden(2, 5, seed=9)
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    out = layer(x, key_value_states=source, attention_mask=mask)
    allowed = may_attend(mask, False, (2, 3, 3, 5))
    assert_close(out, by_hand(layer, x, source, allowed, torch.arange(3), torch.arange(5)), 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_cross_attention_fills_its_cache_once(impl: str) -> None:
    layer, x, source = make(seed=10, impl=impl), hidden(2, 3), hidden(2, 5, seed=11)
    without, cache = layer(x, key_value_states=source), layer.new_cache(2, 8)
    assert torch.equal(layer(x, key_value_states=source, cache=cache), without)
    again = layer(x, key_value_states=torch.full_like(source, torch.nan), cache=cache)
    assert torch.equal(again, without)
    assert cache.length == 5
    message = "key_value_states tokens = 4: must be the 5 tokens the cross-attention cache was filled from"
    with pytest.raises(ArgumentError, match=message):
        layer(x, key_value_states=source[:, :4], cache=cache)


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("backend", EXACT)
@settings(max_examples=30, deadline=None)
@given(
    sizes=st.sampled_from(list(SIZES)),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
@torch.no_grad()
def test_chunks_through_a_cache_are_one_pass(
    impl: str, backend: Backend, sizes: str, chunks: list[int], seed: int
) -> None:
    layer, total = make(seed=seed, impl=impl, backend=backend, **SIZES[sizes]), sum(chunks)
    x, cache = hidden(2, total, seed=seed + 1), layer.new_cache(2, total + 3)
    cache.buffers[0].fill_(torch.nan)  # what is beyond the length must not be read
    parts = [layer(chunk, is_causal=True, cache=cache) for chunk in x.split(chunks, dim=1)]
    assert cache.length == total
    assert_close(torch.cat(parts, dim=1), layer(x, is_causal=True), 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_a_cache_is_cropped_and_reordered(impl: str) -> None:
    layer, x = make(seed=12, impl=impl), hidden(3, 6)
    beams = torch.tensor([2, 0, 0])
    cache = layer.new_cache(3, 6)
    layer(x[:, :5], is_causal=True, cache=cache)
    cache.crop(4)
    cache.reorder(beams)
    out = layer(x[:, 4:], is_causal=True, cache=cache)
    assert_close(out, layer(torch.cat((x[beams, :4], x[:, 4:]), dim=1), is_causal=True)[:, 4:], 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_it_caches_the_normed_latent_and_the_turned_key(impl: str) -> None:
    layer, x = make(seed=13, impl=impl), hidden(2, 4)
    cache = layer.new_cache(2, 9)
    layer(x, is_causal=True, cache=cache)
    assert [tuple(buffer.shape) for buffer in cache.buffers] == [(2, 1, 9, 8 + 4)]
    assert cache.nbytes == 2 * 9 * 12 * 8
    norm, down = layer.kv_a_layernorm, project(layer.kv_a_proj_with_mqa, x)
    assert norm is not None
    (held,) = cache.views()
    assert_close(held[:, 0, :, :8], rms_by_hand(down[..., :8], norm.weight, norm.eps), 1e-12)
    for b in range(2):
        turned = rotate_by_hand(down[b, :, 8:], torch.arange(4), layer.rope.frequencies, interleaved=True)
        assert_close(held[b, 0, :, 8:], turned, 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_is_removing_the_padded_tokens(impl: str, sizes: str, side: str) -> None:
    layer, x, lengths = make(seed=14, impl=impl, **SIZES[sizes]), hidden(3, 7), (7, 4, 1)
    at = torch.arange(7)
    starts = torch.tensor([7 - n if side == "left" else 0 for n in lengths])[:, None]
    mask = (at >= starts) & (at < starts + torch.tensor(lengths)[:, None])
    out = layer(x, attention_mask=mask, is_causal=True, position_ids=(at - starts).clamp(min=0))
    assert out.isfinite().all()
    for b in range(3):
        assert_close(out[b : b + 1, mask[b]], layer(x[b : b + 1, mask[b]], is_causal=True), 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_left_padded_decoding(impl: str) -> None:
    layer, x = make(seed=15, impl=impl), hidden(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, :3] = False
    position_ids = torch.stack((torch.arange(6), torch.arange(6) - 3)).clamp(min=0)
    cache = layer.new_cache(2, 6)
    out = torch.cat(
        [
            layer(
                x[:, a:b],
                attention_mask=mask[:, :b],
                is_causal=True,
                position_ids=position_ids[:, a:b],
                cache=cache,
            )
            for a, b in ((0, 4), (4, 5), (5, 6))
        ],
        dim=1,
    )
    assert_close(out[:1], layer(x[:1], is_causal=True), 1e-12)
    assert_close(out[1:, 3:], layer(x[1:, 3:], is_causal=True), 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("tokens", [6, 70])
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output(impl: str, backend: Backend, tokens: int) -> None:
    layer, x = make(seed=16, impl=impl, backend=backend, bias=True), hidden(2, tokens)
    changed, at = x.clone(), tokens // 2
    changed[:, at] = 100 * hidden(2, seed=17)
    before, after = layer(x, is_causal=True), layer(changed, is_causal=True)
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at:] != after[:, at:]).any(dim=-1).all()


@torch.no_grad()
def test_cos_and_sin_can_be_passed() -> None:
    layer, x = make(seed=18), hidden(2, 5)
    tables = layer.rope(torch.arange(5)[None], torch.float64, 5)
    assert torch.equal(layer(x, position_embeddings=tables), layer(x))
    moved = layer.rope(3 * torch.arange(5)[None], torch.float64, 13)
    out = layer(x, position_embeddings=moved)
    assert_close(out, layer(x, position_ids=3 * torch.arange(5)), 1e-12)
    assert not torch.equal(out, layer(x))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", ["biased", "all dims rotate"])
def test_gradients(impl: str, sizes: str) -> None:
    layer, x = make(seed=19, impl=impl, **SIZES[sizes]), hidden(2, 3).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        by_name = dict(zip(names, parameters, strict=True))
        call = {"attention_mask": mask, "is_causal": True}
        out = torch.func.functional_call(layer, by_name, (x,), call)
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_dropout_only_while_training(impl: str) -> None:
    layer, x = make(seed=20, impl=impl, dropout=0.5), hidden(2, 30)
    whole = make(seed=20, impl=impl)(x)
    assert torch.equal(layer(x), whole)
    layer.train()
    torch.manual_seed(21)
    out, weights = layer(x, return_weights=True)
    assert 0.45 < (weights == 0).double().mean().item() < 0.55
    assert not torch.equal(out, whole)
    layer.eval()
    assert torch.equal(layer(x), whole)


@pytest.mark.parametrize("impl", IMPLS)
def test_narrow_dtypes_stay(impl: str) -> None:
    layer = make(seed=22, impl=impl, bias=True)
    x = hidden(2, 20)
    with torch.no_grad():
        exact = layer(x, is_causal=True)
        for dtype, relative in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            layer.to(dtype)
            out = layer(x.to(dtype), is_causal=True)
            assert out.dtype == dtype
            assert_close(out, exact, relative)


@pytest.mark.parametrize("is_causal", [False, True])
def test_build_makes_the_layer_a_spec_describes(is_causal: bool) -> None:
    for sizes in SIZES.values():
        spec = make(**sizes).spec
        spec = LatentSpec.from_dict({**spec.to_dict(), "is_causal": is_causal})
        layer = build(spec, norm_eps=0.25, dropout=0.125, impl="absorbed")
        assert isinstance(layer, MultiHeadLatentAttention)
        assert layer.spec == spec
        assert layer.impl == "absorbed"
        assert layer.dropout == 0.125
        for norm in (layer.q_a_layernorm, layer.kv_a_layernorm):
            assert norm is None or norm.eps == 0.25


def test_rope_defaults_to_deepseeks() -> None:
    assert make().spec.rope == RopeSpec(dim=4, interleaved=True)
    rope = RotaryEmbedding(RopeSpec(dim=4), [0.5, 0.5])
    assert make(rope=rope).rope is rope


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_lora_rank": 0}, SpecError, "kv_lora_rank = 0: must be a whole number of at least 1"),
        ({"q_lora_rank": 0}, SpecError, "q_lora_rank = 0: must be a whole number of at least 1"),
        ({"v_head_dim": 0}, SpecError, "v_head_dim = 0: must be a whole number of at least 1"),
        ({"qk_rope_head_dim": -2}, SpecError, "qk_rope_head_dim = -2: must be a whole number of at least 0"),
        ({"qk_nope_head_dim": -1}, SpecError, "qk_nope_head_dim = -1: must be a whole number of at least 0"),
        ({"bias": "all"}, SpecError, "bias = 'all': must be True, False, one of ['hf', 'qkv'] or projection names"),
        ({"bias": ["q_a_proj"]}, SpecError, "bias = 'q_a_proj': must name one of ['q_proj', 'kv_a_proj_with_mqa'"),
        ({"impl": "folded"}, ArgumentError, "impl = 'folded': must be auto, expanded or absorbed"),
        ({"dropout": 1.5}, ArgumentError, "dropout = 1.5: must be at least 0 and below 1"),
        ({"backend": "fa2"}, ArgumentError, "backend = 'fa2': must be one of auto, reference, sdpa, packed"),
    ],
)
def test_what_cannot_be_made(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        MultiHeadLatentAttention(16, 3, **{**SMALL, **changes})


@pytest.mark.parametrize("size", [(5, 16), (2, 5, 15), (2, 1, 5, 16)])
def test_hidden_states_of_a_wrong_shape_are_refused(size: tuple[int, ...]) -> None:
    layer, good = MultiHeadLatentAttention(16, 3, **SMALL), torch.zeros(2, 5, 16)
    rule = f"shape = {size}: must be [batch, tokens, hidden_size = 16]"
    with pytest.raises(ArgumentError, match=re.escape(f"hidden_states {rule}")):
        layer(torch.zeros(size))
    with pytest.raises(ArgumentError, match=re.escape(f"key_value_states {rule}")):
        layer(good, key_value_states=torch.zeros(size))


def test_a_cache_that_does_not_fit_is_refused() -> None:
    layer = MultiHeadLatentAttention(16, 3, **SMALL)
    with pytest.raises(ArgumentError, match=r"^batch = 2: must be 3, the batch size the cache was made for$"):
        layer(torch.zeros(2, 5, 16), cache=layer.new_cache(3, 5))
    with pytest.raises(ArgumentError, match="cache length = 5: is over max_length = 4"):
        layer(torch.zeros(2, 5, 16), cache=layer.new_cache(2, 4))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_layers_backend_is_the_one_used(impl: Any) -> None:
    layer = MultiHeadLatentAttention(16, 3, **SMALL, impl=impl, backend="sdpa")
    with pytest.raises(ArgumentError, match="backend = 'sdpa': never holds the weights"):
        layer(torch.zeros(2, 5, 16), return_weights=True)


@pytest.mark.parametrize("size", [(1, 4, 3), (1, 5, 2), (1, 4, 1), (4, 2)])
def test_position_embeddings_of_a_wrong_shape_are_refused(size: tuple[int, ...]) -> None:
    layer = make(qk_rope_head_dim=4)
    with pytest.raises(ArgumentError, match=r"^position_embeddings shape = .*: must be \[B or 1, 4, 2\]$"):
        layer(torch.zeros(1, 4, layer.spec.hidden_size).double(), position_embeddings=(torch.zeros(size),) * 2)


def test_a_layer_built_without_rope_does_not_rotate() -> None:
    spec = replace(make().spec, rope=None)
    layer = build(spec).double()
    assert (layer.spec, layer.rope) == (spec, None)
    x = torch.randn(1, 5, spec.hidden_size, dtype=torch.float64)
    assert_close(layer(x.flip(1)), layer(x).flip(1), 1e-12)
