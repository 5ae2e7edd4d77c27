from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import GroupedSpec, RopeSpec
from headwise.runtime.attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    RotaryEmbedding,
    build,
)
from headwise.runtime.kernels import Backend
from tests.backends import EXACT
from tests.by_hand import attend_by_rows, may_attend, project, rms_by_hand, rotate_by_hand
from tests.closeness import assert_close

ROPE = RopeSpec(dim=4, theta=100.0)
SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide heads": {"head_dim": 6, "v_head_dim": 3},
    "biased": {"bias": True},
    "qwen2": {"bias": "qkv", "rope": ROPE},
    "qwen3": {"qk_norm": "head", "rope": RopeSpec(dim=4, interleaved=True)},
    "olmo2": {"qk_norm": "full", "rope": ROPE, "norm_eps": 1e-3},
    "everything": {
        "head_dim": 6,
        "v_head_dim": 3,
        "bias": True,
        "qk_norm": "head",
        "rope": ROPE,
        "softmax_scale": 0.7,
    },
}


def make(num_kv_heads: int = 2, *, seed: int = 0, **kwargs: Any) -> GroupedQueryAttention:
    """A layer 16 wide with 4 heads, in float64 and eval mode; every parameter is random, norms and biases too."""
    return randomize(GroupedQueryAttention(16, 4, num_kv_heads, **kwargs), seed)


def randomize(layer: GroupedQueryAttention, seed: int) -> GroupedQueryAttention:
    layer.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            # Weights about 1/sqrt(16), so that scores are about 1; norms around 1.
            spread = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(spread if parameter.dim() == 2 else 1 + spread)
    return layer


def hidden(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(
    layer: GroupedQueryAttention, x: Tensor, source: Tensor, kept: Tensor, x_at: Tensor, source_at: Tensor
) -> Tensor:
    """The layer's equations, head by head; ``x_at`` and ``source_at`` are the positions of the rows."""
    spec = layer.spec

    def heads(projected: Tensor, count: int, norm: Any, at: Tensor | None) -> Tensor:
        if norm is not None and spec.qk_norm == "full":
            projected = rms_by_hand(projected, norm.weight, norm.eps)
        width = projected.shape[-1] // count
        parts = [projected[..., i * width : (i + 1) * width] for i in range(count)]
        if norm is not None and spec.qk_norm == "head":
            parts = [rms_by_hand(part, norm.weight, norm.eps) for part in parts]
        if at is not None and layer.rope is not None:
            turn, interleaved = layer.rope.frequencies, layer.rope.spec.interleaved
            parts = [
                torch.stack([rotate_by_hand(row, at, turn, interleaved=interleaved) for row in part])
                for part in parts
            ]
        return torch.stack(parts, dim=1)

    query = heads(project(layer.q_proj, x), spec.num_heads, layer.q_norm, x_at)
    key = heads(project(layer.k_proj, source), spec.num_kv_heads, layer.k_norm, source_at)
    value = heads(project(layer.v_proj, source), spec.num_kv_heads, None, None)
    mixed = attend_by_rows(query, key, value, kept, spec.softmax_scale)
    return project(layer.o_proj, torch.cat(list(mixed.unbind(1)), dim=-1))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_it_is_its_equations(num_kv_heads: int, backend: Backend, sizes: str) -> None:
    layer, x = make(num_kv_heads, seed=2, backend=backend, **SIZES[sizes]), hidden(2, 6)
    mask = torch.tensor([[True] * 6, [False, False, True, True, True, False]])
    for is_causal, padding in itertools.product([False, True], [None, mask]):
        allowed, at = may_attend(padding, is_causal, (2, 4, 6, 6)), torch.arange(6)
        out = layer(x, attention_mask=padding, is_causal=is_causal)
        assert_close(out, by_hand(layer, x, x, allowed, at, at), 1e-12)


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_cross_attention_is_its_equations(sizes: str) -> None:
    layer, x, source = make(seed=3, **SIZES[sizes]), hidden(2, 3), hidden(2, 5, seed=4)
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    out = layer(x, key_value_states=source, attention_mask=mask)
    allowed = may_attend(mask, False, (2, 4, 3, 5))
    assert_close(out, by_hand(layer, x, source, allowed, torch.arange(3), torch.arange(5)), 1e-12)


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_cross_attention_fills_its_cache_once(sizes: str) -> None:
    layer, x, source = make(seed=5, **SIZES[sizes]), hidden(2, 3), hidden(2, 5, seed=6)
    without, cache = layer(x, key_value_states=source), layer.new_cache(2, 8)
    assert torch.equal(layer(x, key_value_states=source, cache=cache), without)
    assert cache.length == 5
    # The second call reads the cache: another source of the same length is not looked at.
    again = layer(x, key_value_states=torch.full_like(source, torch.nan), cache=cache)
    assert torch.equal(again, without)
    assert cache.length == 5


def test_cross_attention_refuses_another_sources_length() -> None:
    layer = make()
    cache = layer.new_cache(2, 8)
    layer(hidden(2, 3), key_value_states=hidden(2, 5), cache=cache)
    message = "key_value_states tokens = 4: must be the 5 tokens the cross-attention cache was filled from"
    with pytest.raises(ArgumentError, match=message):
        layer(hidden(2, 3), key_value_states=hidden(2, 4), cache=cache)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("sizes", SIZES)
@settings(max_examples=15, deadline=None)
@given(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 2**32))
@torch.no_grad()
def test_chunks_through_a_cache_are_one_pass(backend: Backend, sizes: str, chunks: list[int], seed: int) -> None:
    layer, total = make(seed=seed, backend=backend, **SIZES[sizes]), sum(chunks)
    x, cache = hidden(2, total, seed=seed + 1), layer.new_cache(2, total + 3)
    for buffer in cache.buffers:
        buffer.fill_(torch.nan)  # what is beyond the length must not be read
    parts = [layer(chunk, is_causal=True, cache=cache) for chunk in x.split(chunks, dim=1)]
    assert cache.length == total
    assert_close(torch.cat(parts, dim=1), layer(x, is_causal=True), 1e-12)


@torch.no_grad()
def test_a_cropped_cache_goes_on_from_there() -> None:
    layer, x = make(seed=7, rope=ROPE), hidden(2, 8)
    cache = layer.new_cache(2, 8)
    layer(x[:, :3], is_causal=True, cache=cache)
    layer(hidden(2, 4, seed=8), is_causal=True, cache=cache)
    cache.crop(3)
    assert_close(layer(x[:, 3:], is_causal=True, cache=cache), layer(x, is_causal=True)[:, 3:], 1e-12)


@torch.no_grad()
def test_a_reordered_cache_follows_its_beams() -> None:
    layer, x = make(seed=9, rope=ROPE), hidden(3, 6)
    beams = torch.tensor([2, 0, 0])
    cache = layer.new_cache(3, 6)
    layer(x[:, :4], is_causal=True, cache=cache)
    cache.reorder(beams)
    out = layer(x[:, 4:], is_causal=True, cache=cache)
    assert_close(out, layer(torch.cat((x[beams, :4], x[:, 4:]), dim=1), is_causal=True)[:, 4:], 1e-12)


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_every_head_its_own_is_multi_head_attention(sizes: str) -> None:
    x = hidden(2, 5)
    multi = randomize(MultiHeadAttention(16, 4, **SIZES[sizes]), 10)
    grouped = make(4, seed=11, **SIZES[sizes])
    grouped.load_state_dict(multi.state_dict(), strict=True)
    assert multi.spec == grouped.spec
    assert multi.spec.mechanism == "mha"
    assert torch.equal(multi(x, is_causal=True), grouped(x, is_causal=True))


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_one_shared_head_is_multi_query_attention(sizes: str) -> None:
    x = hidden(2, 5)
    multi = randomize(MultiQueryAttention(16, 4, **SIZES[sizes]), 12)
    grouped = make(1, seed=13, **SIZES[sizes])
    grouped.load_state_dict(multi.state_dict(), strict=True)
    assert multi.spec == grouped.spec
    assert multi.spec.mechanism == "mqa"
    assert torch.equal(multi(x, is_causal=True), grouped(x, is_causal=True))


@torch.no_grad()
def test_groups_are_neighbouring_heads_sharing_a_kv_head() -> None:
    x, grouped = hidden(2, 5), make(2, seed=14)
    multi = MultiHeadAttention(16, 4).double()
    state = dict(grouped.state_dict())
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = state[name].view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    multi.load_state_dict(state)
    assert_close(grouped(x), multi(x), 1e-12)


@pytest.mark.parametrize(("group_size", "num_kv_heads"), [(1, 4), (2, 2), (4, 1)])
def test_the_two_ways_to_name_the_groups(group_size: int, num_kv_heads: int) -> None:
    layer = GroupedQueryAttention(16, 4, group_size=group_size)
    assert layer.spec == GroupedQueryAttention(16, 4, num_kv_heads).spec
    assert layer.spec.num_kv_heads == num_kv_heads
    assert layer.spec.group_size == group_size
    assert layer.k_proj.weight.shape == (num_kv_heads * 4, 16)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_is_removing_the_padded_tokens(sizes: str, side: str) -> None:
    layer, x, lengths = make(seed=15, **SIZES[sizes]), hidden(3, 7), (7, 4, 1)
    at = torch.arange(7)
    starts = torch.tensor([7 - n if side == "left" else 0 for n in lengths])[:, None]
    ends = starts + torch.tensor(lengths)[:, None]
    mask = (at >= starts) & (at < ends)
    position_ids = (at - starts).clamp(min=0)
    out = layer(x, attention_mask=mask, is_causal=True, position_ids=position_ids)
    assert out.isfinite().all()
    for b in range(3):
        assert_close(out[b : b + 1, mask[b]], layer(x[b : b + 1, mask[b]], is_causal=True), 1e-12)


@torch.no_grad()
def test_left_padded_decoding() -> None:
    layer, x = make(seed=16, rope=ROPE), hidden(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, :3] = False
    position_ids = torch.stack((torch.arange(6), torch.arange(6) - 3)).clamp(min=0)
    cache = layer.new_cache(2, 6)
    parts = [
        layer(
            x[:, a:b],
            attention_mask=mask[:, :b],
            is_causal=True,
            position_ids=position_ids[:, a:b],
            cache=cache,
        )
        for a, b in ((0, 4), (4, 5), (5, 6))
    ]
    out = torch.cat(parts, dim=1)
    assert_close(out[:1], layer(x[:1], is_causal=True), 1e-12)
    assert_close(out[1:, 3:], layer(x[1:, 3:], is_causal=True), 1e-12)


@torch.no_grad()
def test_a_token_that_sees_nothing_gives_the_output_bias() -> None:
    layer = make(seed=17, bias=True)
    out = layer(hidden(2, 3), attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    assert layer.o_proj.bias is not None
    assert torch.equal(out[1], layer.o_proj.bias.expand(3, 16))


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("tokens", [6, 70])
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output(backend: Backend, tokens: int) -> None:
    layer, x = make(seed=18, rope=ROPE, backend=backend), hidden(2, tokens)
    changed, at = x.clone(), tokens // 2
    changed[:, at] = 100 * hidden(2, seed=19)
    before, after = layer(x, is_causal=True), layer(changed, is_causal=True)
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at:] != after[:, at:]).any(dim=-1).all()
    assert (layer(x)[:, :at] != layer(changed)[:, :at]).any(dim=-1).all()


@pytest.mark.parametrize("sizes", ["qwen2", "everything"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_gradients(sizes: str, num_kv_heads: int) -> None:
    layer, x = make(num_kv_heads, seed=20, **SIZES[sizes]), hidden(2, 3).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        by_name = dict(zip(names, parameters, strict=True))
        call = {"attention_mask": mask, "is_causal": True}
        out = torch.func.functional_call(layer, by_name, (x,), call)
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


@torch.no_grad()
def test_dropout_only_while_training() -> None:
    layer, x = make(seed=21, dropout=0.5), hidden(2, 30)
    whole = make(seed=21)(x)
    assert torch.equal(layer(x), whole)
    layer.train()
    torch.manual_seed(22)
    out, weights = layer(x, return_weights=True)
    assert 0.45 < (weights == 0).double().mean().item() < 0.55
    assert not torch.equal(out, whole)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), whole)


@torch.no_grad()
def test_weights_of_every_head_and_pair() -> None:
    layer = MultiHeadAttention(512, 8).eval()
    x = torch.randn(32, 100, 512, generator=torch.Generator().manual_seed(23))
    out, weights = layer(x, return_weights=True)
    assert out.shape == (32, 100, 512)
    assert weights.shape == (32, 8, 100, 100)
    torch.testing.assert_close(weights.sum(-1), torch.ones(32, 8, 100))
    assert_close(out, layer(x), 1e-5)


def test_weights_of_a_large_grouped_layer_by_shape() -> None:
    layer = GroupedQueryAttention(512, 32, 8).to("meta")
    out, weights = layer(torch.empty(32, 1000, 512, device="meta"), return_weights=True)
    assert out.shape == (32, 1000, 512)
    assert weights.shape == (32, 32, 1000, 1000)


@torch.no_grad()
def test_weights_of_a_decode_step_are_over_the_cache() -> None:
    layer, x = make(seed=24, rope=ROPE), hidden(2, 6)
    cache = layer.new_cache(2, 6)
    layer(x[:, :5], is_causal=True, cache=cache)
    _, weights = layer(x[:, 5:], is_causal=True, cache=cache, return_weights=True)
    _, whole = layer(x, is_causal=True, return_weights=True)
    assert weights.shape == (2, 4, 1, 6)
    assert_close(weights, whole[:, :, 5:], 1e-12)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_the_cache_is_of_the_layers_shape_and_dtype(num_kv_heads: int) -> None:
    layer = GroupedQueryAttention(16, 4, num_kv_heads, head_dim=6, v_head_dim=3).to(torch.bfloat16)
    cache = layer.new_cache(2, 5)
    assert [tuple(buffer.shape) for buffer in cache.buffers] == [(2, num_kv_heads, 5, 6), (2, num_kv_heads, 5, 3)]
    assert {buffer.dtype for buffer in cache.buffers} == {torch.bfloat16}
    assert layer.new_cache(2, 5, dtype=torch.float32).buffers[0].dtype == torch.float32
    assert layer.new_cache(2, 5, device="meta").buffers[0].device.type == "meta"


@torch.no_grad()
def test_position_ids_may_be_one_row_for_all_or_flat() -> None:
    layer, x = make(seed=25, rope=ROPE), hidden(2, 4)
    at = torch.tensor([3, 1, 4, 15])
    rows = layer(x, position_ids=at.expand(2, 4))
    assert torch.equal(layer(x, position_ids=at), rows)
    assert torch.equal(layer(x, position_ids=at[None]), rows)
    assert not torch.equal(layer(x), rows)


@pytest.mark.parametrize("is_causal", [False, True])
def test_build_makes_the_layer_a_spec_describes(is_causal: bool) -> None:
    for sizes in SIZES.values():
        spec = make(seed=26, **sizes).spec
        spec = GroupedSpec.from_dict({**spec.to_dict(), "is_causal": is_causal})
        layer = build(spec, norm_eps=0.25, dropout=0.125)
        assert isinstance(layer, GroupedQueryAttention)
        assert layer.spec == spec
        assert layer.dropout == 0.125
        assert layer.q_norm is None or layer.q_norm.eps == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sinks": True}, "sinks = True: is not supported by the layers yet"),
        ({"softcap": 50.0}, "softcap = 50.0: is not supported by the layers yet"),
    ],
)
def test_build_refuses_what_the_layers_do_not_do(changes: dict[str, Any], message: str) -> None:
    spec = GroupedSpec(hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4, **changes)
    with pytest.raises(SpecError, match=message):
        build(spec)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((16, 4), {}, SpecError, "num_kv_heads, group_size = (None, None): exactly one of the two is given"),
        ((16, 4, 2), {"group_size": 2}, SpecError, "num_kv_heads, group_size = (2, 2): exactly one of the two is"),
        ((16, 4, 3), {}, SpecError, "num_kv_heads = 3: must divide num_heads = 4"),
        ((16, 4, 8), {}, SpecError, "num_kv_heads = 8: must divide num_heads = 4"),
        ((16, 4, 0), {}, SpecError, "num_kv_heads = 0: must be a whole number of at least 1"),
        ((16, 4), {"group_size": 3}, SpecError, "group_size = 3: must divide num_heads = 4"),
        ((16, 4), {"group_size": 0}, SpecError, "group_size = 0: must divide num_heads = 4"),
        ((16, 3, 1), {}, SpecError, "num_heads = 3: must divide hidden_size = 16, or give head_dim"),
        ((16, 0, 1), {}, SpecError, "num_heads = 0: must be a whole number of at least 1"),
        ((16, 4, 2), {"head_dim": 0}, SpecError, "head_dim = 0: must be a whole number of at least 1"),
        ((16, 4, 2), {"v_head_dim": 0}, SpecError, "v_head_dim = 0: must be a whole number of at least 1"),
        ((16, 4, 2), {"qk_norm": "layer"}, SpecError, 'qk_norm = \'layer\': must be None, "head" or "full"'),
        ((16, 4, 2), {"bias": "kv"}, SpecError, "bias = 'kv': must be True, False, one of ['hf', 'qkv'] or"),
        ((16, 4, 2), {"bias": ["w_proj"]}, SpecError, "bias = 'w_proj': must name one of ['q_proj', 'k_proj', "),
        ((16, 4, 2), {"dropout": 1.0}, ArgumentError, "dropout = 1.0: must be at least 0 and below 1"),
        ((16, 4, 2), {"dropout": -0.5}, ArgumentError, "dropout = -0.5: must be at least 0 and below 1"),
        ((16, 4, 2), {"backend": "fa2"}, ArgumentError, "backend = 'fa2': must be one of auto, reference, sdpa, pa"),
    ],
)
def test_what_cannot_be_made(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        GroupedQueryAttention(*args, **kwargs)


@pytest.mark.parametrize("size", [(5, 16), (2, 5, 15), (2, 1, 5, 16)])
def test_hidden_states_of_a_wrong_shape_are_refused(size: tuple[int, ...]) -> None:
    layer, good = GroupedQueryAttention(16, 4, 2), torch.zeros(2, 5, 16)
    rule = f"shape = {size}: must be [batch, tokens, hidden_size = 16]"
    with pytest.raises(ArgumentError, match=re.escape(f"hidden_states {rule}")):
        layer(torch.zeros(size))
    with pytest.raises(ArgumentError, match=re.escape(f"key_value_states {rule}")):
        layer(good, key_value_states=torch.zeros(size))


def test_a_source_of_another_batch_is_refused() -> None:
    with pytest.raises(ArgumentError, match=re.escape("key_value_states batch = 3: must be 2, as of hidden_states")):
        GroupedQueryAttention(16, 4, 2)(torch.zeros(2, 5, 16), key_value_states=torch.zeros(3, 5, 16))


def test_a_cache_of_another_batch_or_dtype_is_refused() -> None:
    layer = GroupedQueryAttention(16, 4, 2)
    with pytest.raises(ArgumentError, match=r"^batch = 2: must be 3, the batch size the cache was made for$"):
        layer(torch.zeros(2, 5, 16), cache=layer.new_cache(3, 5))
    message = "cached states = ((2, 2, 5, 4), torch.float32): must be (2, 2, 5, 4) torch.bfloat16"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        layer(torch.zeros(2, 5, 16), cache=layer.new_cache(2, 5, dtype=torch.bfloat16))


def test_more_tokens_than_the_cache_has_room_for_are_refused() -> None:
    layer = GroupedQueryAttention(16, 4, 2)
    cache = layer.new_cache(2, 5)
    layer(torch.zeros(2, 4, 16), cache=cache)
    with pytest.raises(ArgumentError, match="cache length = 6: is over max_length = 5"):
        layer(torch.zeros(2, 2, 16), cache=cache)


def test_a_mask_without_the_cached_tokens_is_refused() -> None:
    layer = GroupedQueryAttention(16, 4, 2)
    cache = layer.new_cache(2, 5)
    layer(torch.zeros(2, 4, 16), cache=cache)
    message = "attention_mask shape = (2, 1): a 2-D mask is padding, [batch, keys] = [2, 5]"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        layer(torch.zeros(2, 1, 16), attention_mask=torch.ones(2, 1, dtype=torch.bool), cache=cache)


def test_the_rotary_module_is_shared_not_copied() -> None:
    rope = RotaryEmbedding(ROPE)
    layers = [GroupedQueryAttention(16, 4, 2, rope=rope) for _ in range(2)]
    assert layers[0].rope is layers[1].rope is rope


def test_the_layers_backend_is_the_one_used() -> None:
    layer = GroupedQueryAttention(16, 4, 2, backend="sdpa")
    with pytest.raises(ArgumentError, match="backend = 'sdpa': never holds the weights"):
        layer(torch.zeros(2, 5, 16), return_weights=True)
