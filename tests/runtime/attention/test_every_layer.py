"""Properties of every mechanism: caches, masks, padding, weights, dropout, gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.attention import build
from headwise.runtime.kernels import Backend
from tests.backends import EXACT
from tests.closeness import assert_close
from tests.runtime.attention.layers import LAYERS, NEW_LAYERS, gradients_are_right, hidden, output_bias, randomized
from tests.strategies import AnySpec, specs

MASKS: dict[str, Tensor] = {
    "padding": torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]),
    "one padding": torch.tensor([[False, True, True, True, True, True]]),
    "by key": torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1, 1]], dtype=torch.uint8)[:, None, None],
    "by pair": torch.randint(0, 2, (6, 6), generator=torch.Generator().manual_seed(0)).bool()[None, None],
    "by query": torch.tensor([[1], [0], [1], [1], [1], [0]])[None, None],
    "all": torch.ones(1, 1, 1, 1, dtype=torch.bool),
}


def make(name: str, seed: int = 0, **more: Any) -> Any:
    return randomized(LAYERS[name](**more), seed)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("name", NEW_LAYERS)
@settings(max_examples=10, deadline=None)
@given(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 2**32))
@torch.no_grad()
def test_chunks_through_a_cache_are_one_pass(name: str, backend: Backend, chunks: list[int], seed: int) -> None:
    layer, total = make(name, seed, backend=backend), sum(chunks)
    x, cache = hidden(2, total, seed=seed + 1), layer.new_cache(2, total + 3)
    for buffer in cache.buffers:
        buffer.fill_(torch.nan)  # what is beyond the length must not be read
    parts = [layer(chunk, is_causal=True, cache=cache) for chunk in x.split(chunks, dim=1)]
    assert cache.length == total
    assert_close(torch.cat(parts, dim=1), layer(x, is_causal=True), 1e-12)


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_token_by_token_is_one_pass(name: str) -> None:
    layer, x = make(name, 1), hidden(2, 7)
    cache = layer.new_cache(2, 7)
    steps = [layer(token, is_causal=True, cache=cache) for token in x.split(1, dim=1)]
    assert_close(torch.cat(steps, dim=1), layer(x, is_causal=True), 1e-12)


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_a_cache_is_cropped_reordered_and_reset(name: str) -> None:
    layer, x, beams = make(name, 2), hidden(3, 6), torch.tensor([2, 0, 0])
    cache = layer.new_cache(3, 6)
    layer(x[:, :5], is_causal=True, cache=cache)
    cache.crop(4)
    cache.reorder(beams)
    out = layer(x[:, 4:], is_causal=True, cache=cache)
    whole = layer(torch.cat((x[beams, :4], x[:, 4:]), dim=1), is_causal=True)
    assert_close(out, whole[:, 4:], 1e-12)
    cache.reset()
    assert_close(layer(x, is_causal=True, cache=cache), layer(x, is_causal=True), 1e-12)


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_the_cache_is_what_the_layer_says_it_caches(name: str) -> None:
    layer = make(name).to(torch.bfloat16)
    cache = layer.new_cache(2, 5)
    assert [tuple(buffer.shape) for buffer in cache.buffers] == [
        (2, heads, 5, width) for heads, width in layer.cache_shapes()
    ]
    assert {buffer.dtype for buffer in cache.buffers} == {torch.bfloat16}


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_cross_attention_fills_its_cache_once(name: str) -> None:
    layer, x, source = make(name, 3), hidden(2, 3), hidden(2, 5, seed=4)
    without, cache = layer(x, key_value_states=source), layer.new_cache(2, 8)
    assert torch.equal(layer(x, key_value_states=source, cache=cache), without)
    # The second call reads the cache: another source of the same length is not looked at.
    again = layer(x, key_value_states=torch.full_like(source, torch.nan), cache=cache)
    assert torch.equal(again, without)
    assert cache.length == 5
    for other in (4, 6):
        with pytest.raises(ArgumentError, match=f"key_value_states tokens = {other}: must be the 5 tokens"):
            layer(x, key_value_states=hidden(2, other), cache=cache)


@pytest.mark.parametrize("name", NEW_LAYERS)
@pytest.mark.parametrize("cross", [False, True])
@torch.no_grad()
def test_a_masked_token_might_as_well_not_be_there(name: str, cross: bool) -> None:
    """By key: of attention to itself only the rows that are left are compared."""
    layer, x, source = make(name, 4), hidden(1, 3), hidden(1, 6, seed=5)
    kept = torch.tensor([True, True, True, False, False, False])  # a gap would move the keys of a rotation
    for mask in (kept[None], kept[None, None, None], kept.expand(1, 4 if "experts" in name else 1, 1, 6)):
        if cross:
            out, expected = (
                layer(x, key_value_states=source, attention_mask=mask),
                layer(x, key_value_states=source[:, kept]),
            )
        else:
            # Positions are counted back from the last, so those left must be the first as they were.
            out, expected = layer(source, attention_mask=mask)[:, kept], layer(source[:, kept])
        assert_close(out, expected, 1e-12)


@pytest.mark.parametrize("name", NEW_LAYERS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_masks_of_every_shape_weigh_only_what_they_leave(name: str, mask: str, is_causal: bool) -> None:
    layer, x, given = make(name, 5), hidden(2, 6), MASKS[mask]
    out, weights = layer(x, attention_mask=given, is_causal=is_causal, return_weights=True)
    allowed = (given[:, None, None] if given.dim() == 2 else given).bool().expand(2, 1, 6, 6)
    if is_causal:
        allowed = allowed & torch.ones(6, 6).tril().bool()
    assert (weights != 0).eq(allowed).all()
    sums = allowed.any(-1).double().expand(weights.shape[:3])
    assert_close(weights.sum(-1), sums, 1e-12)
    assert torch.allclose(layer(x, attention_mask=given, is_causal=is_causal), out, rtol=0, atol=1e-12)
    empty = ~allowed.any(-1)[:, 0]
    assert torch.allclose(out[empty], output_bias(layer).expand_as(out[empty]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NEW_LAYERS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_is_removing_the_padded_tokens(name: str, side: str) -> None:
    layer, x, lengths = make(name, 6), hidden(3, 7), torch.tensor([7, 4, 1])[:, None]
    at = torch.arange(7)
    starts = 7 - lengths if side == "left" else torch.zeros_like(lengths)
    mask = (at >= starts) & (at < starts + lengths)
    x[~mask] *= 1e3
    out = layer(x, attention_mask=mask, is_causal=True, position_ids=at - starts)
    assert out.isfinite().all()
    for b in range(3):
        assert_close(out[b : b + 1, mask[b]], layer(x[b : b + 1, mask[b]], is_causal=True), 1e-12)


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_left_padded_decoding(name: str) -> None:
    layer, x = make(name, 7), hidden(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, :3] = False
    at = torch.stack((torch.arange(6), torch.arange(6) - 3))
    cache = layer.new_cache(2, 6)
    steps = [
        layer(x[:, a:b], attention_mask=mask[:, :b], is_causal=True, position_ids=at[:, a:b], cache=cache)
        for a, b in ((0, 4), (4, 5), (5, 6))
    ]
    out = torch.cat(steps, dim=1)
    assert_close(out[:1], layer(x[:1], is_causal=True), 1e-12)
    assert_close(out[1:, 3:], layer(x[1:, 3:], is_causal=True), 1e-12)


@pytest.mark.parametrize("name", NEW_LAYERS)
@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("tokens", [6, 40])
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output(name: str, backend: Backend, tokens: int) -> None:
    layer, x = make(name, 8, backend=backend), hidden(2, tokens)
    changed, at = x.clone(), tokens // 2
    changed[:, at] = 3 * hidden(2, seed=9)
    before, after = layer(x, is_causal=True), layer(changed, is_causal=True)
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at:] != after[:, at:]).any(dim=-1).all()
    assert (layer(x)[:, :at] != layer(changed)[:, :at]).any(dim=-1).all()


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_weights_of_a_decode_step_are_the_last_row(name: str) -> None:
    layer, x = make(name, 10), hidden(2, 6)
    cache = layer.new_cache(2, 6)
    layer(x[:, :5], is_causal=True, cache=cache)
    step, weights = layer(x[:, 5:], is_causal=True, cache=cache, return_weights=True)
    out, whole = layer(x, is_causal=True, return_weights=True)
    assert weights.shape == (2, layer.spec.num_heads, 1, 6)
    assert_close(weights, whole[:, :, 5:], 1e-12)
    assert_close(step, out[:, 5:], 1e-12)


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_dropout_only_while_training(name: str) -> None:
    layer, x = make(name, 11, dropout=0.5), hidden(2, 30)
    whole = make(name, 11)(x)
    assert torch.equal(layer(x), whole)
    layer.train()
    torch.manual_seed(12)
    out, weights = layer(x, return_weights=True)
    assert 0.44 < (weights == 0).double().mean().item() < 0.56
    torch.manual_seed(12)
    assert_close(layer.eval()(x, return_weights=True)[1][weights != 0] * 2, weights[weights != 0], 1e-12)
    assert not torch.equal(out, whole)
    layer.train()
    assert not torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("name", NEW_LAYERS)
@pytest.mark.parametrize("call", [{}, {"is_causal": True, "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}])
def test_gradients(name: str, call: dict[str, Any]) -> None:
    assert gradients_are_right(make(name, 13), hidden(2, 3), **call)


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_a_state_dict_makes_the_same_layer(name: str) -> None:
    layer, twin, x = make(name, 14), make(name, 15), hidden(2, 5)
    assert not torch.equal(layer(x), twin(x))
    state = copy.deepcopy(layer.state_dict())
    assert set(state) == {key for key, _ in layer.named_parameters()}
    twin.load_state_dict(state, strict=True)
    assert torch.equal(layer(x), twin(x))


@pytest.mark.parametrize("name", NEW_LAYERS)
@torch.no_grad()
def test_narrow_dtypes_stay(name: str) -> None:
    layer, x = make(name, 16), hidden(2, 20)
    exact = layer(x, is_causal=True)
    for dtype, relative in ((torch.float32, 1e-5), (torch.bfloat16, 6e-2)):
        out = layer.to(dtype)(x.to(dtype), is_causal=True)
        assert out.dtype == dtype
        assert_close(out, exact, relative)


@settings(max_examples=60, deadline=None)
@given(spec=specs(tiny=True))
def test_build_makes_the_layer_a_spec_describes(spec: AnySpec) -> None:
    with torch.device("meta"):
        layer = build(spec, dropout=0.125)
    assert layer.spec == spec
    assert layer.dropout == 0.125


@pytest.mark.parametrize("name", NEW_LAYERS)
@pytest.mark.parametrize("size", [(5, 16), (2, 5, 15), (2, 1, 5, 16)])
def test_hidden_states_of_a_wrong_shape_are_refused(name: str, size: tuple[int, ...]) -> None:
    layer, good = make(name), hidden(2, 5)
    with pytest.raises(ArgumentError, match=r"hidden_states shape = .*: must be \[batch, tokens, hidden_size = 16\]"):
        layer(torch.zeros(size))
    with pytest.raises(ArgumentError, match=r"key_value_states shape = .*: must be \[batch, tokens, hidden_size"):
        layer(good, key_value_states=torch.zeros(size))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was(name: str) -> None:
    layer, x = make(name), hidden(2, 3)
    cache = layer.new_cache(2, 9)
    layer(x, is_causal=True, cache=cache)
    too_many_heads = torch.ones(1, 7, 3, 6).bool()
    for mask in (torch.ones(2, 5), torch.ones(2, 5).bool(), torch.ones(6, 6).bool(), too_many_heads):
        with pytest.raises(ArgumentError, match=r"^attention_mask"):
            layer(x, is_causal=True, cache=cache, attention_mask=mask)
    layer.backend = "sdpa"
    with pytest.raises(ArgumentError, match=r"^backend = 'sdpa': never holds the weights"):
        layer(x, is_causal=True, cache=cache, return_weights=True)
    assert cache.length == 3


@pytest.mark.parametrize("name", LAYERS)
def test_a_call_without_tokens_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"^hidden_states shape = \(2, 0, 16\): must be .* at least one token$"):
        make(name)(hidden(2, 0))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_source_of_another_batch_is_refused_cached_or_not(name: str) -> None:
    layer = make(name)
    for rows in (1, 3):
        with pytest.raises(
            ArgumentError, match=rf"^key_value_states batch = {rows}: must be 2, as of hidden_states$"
        ):
            layer(hidden(2, 4), key_value_states=hidden(rows, 5))
    cache = layer.new_cache(2, 5)
    layer(hidden(2, 4), key_value_states=hidden(2, 5), cache=cache)
    with pytest.raises(ArgumentError, match=r"^key_value_states batch = 2: must be 7"):
        layer(hidden(7, 4), key_value_states=hidden(2, 5), cache=cache)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("cached", [0, 3])
@torch.no_grad()
def test_a_cache_for_another_batch_is_refused(name: str, cached: int) -> None:
    layer = make(name)
    cache = layer.new_cache(2, 9)
    if cached:
        layer(hidden(2, cached), is_causal=True, cache=cache)
    for rows in (1, 3):
        message = rf"^batch = {rows}: must be 2, the batch size the cache was made for$"
        with pytest.raises(ArgumentError, match=message):
            layer(hidden(rows, 2), is_causal=True, cache=cache)
    assert cache.length == cached


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_cross_attention_cache_for_another_batch_is_refused(name: str) -> None:
    layer = make(name)
    cache = layer.new_cache(2, 5)
    layer(hidden(2, 4), key_value_states=hidden(2, 5), cache=cache)
    for rows in (1, 3):
        message = rf"^batch = {rows}: must be 2, the batch size the cross-attention cache was filled with$"
        with pytest.raises(ArgumentError, match=message):
            layer(hidden(rows, 4), key_value_states=hidden(rows, 5), cache=cache)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_cache_goes_with_autocast(name: str) -> None:
    layer, x = make(name).float(), hidden(2, 4).float()
    plain = layer(x, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = layer.new_cache(2, 4, dtype=torch.bfloat16)
        out = torch.cat([layer(token, is_causal=True, cache=cache) for token in x.split(1, dim=1)], dim=1)
    assert_close(out.float(), plain, 5e-2)
