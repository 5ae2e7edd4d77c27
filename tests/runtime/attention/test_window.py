"""A sliding window is a band of full attention, and a cache that forgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise import cost
from headwise.errors import ArgumentError, SpecError
from headwise.runtime.kernels import Backend
from tests.backends import EXACT
from tests.by_hand import may_attend
from tests.closeness import assert_close
from tests.runtime.attention.layers import LAYERS, experts, gradients_are_right, hidden, randomized


def make(name: str, seed: int = 0, **more: Any) -> Any:
    return randomized(LAYERS[name](**more), seed)


def band(tokens: int, window: int) -> Tensor:
    return may_attend(None, True, (1, 1, tokens, tokens), window)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_window_is_a_band_of_full_attention(name: str, backend: Backend) -> None:
    x, padding = hidden(2, 11), torch.tensor([[1] * 11, [0] * 4 + [1] * 7]).bool()
    for window in (1, 2, 5, 11, 40):
        layer = make(name, 1, sliding_window=window, backend=backend)
        full = make(name, 1, backend=backend)
        expected = full(x, attention_mask=band(11, window))
        assert_close(layer(x, is_causal=True), expected, 1e-12)
        padded = full(x, attention_mask=band(11, window) & padding[:, None, None])
        assert_close(layer(x, attention_mask=padding, is_causal=True), padded, 1e-12)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=25, deadline=None)
@given(
    window=st.integers(1, 7),
    chunks=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    padded=st.booleans(),
    spare=st.integers(0, 3),
)
@torch.no_grad()
def test_chunks_through_a_forgetting_cache_are_one_pass(
    name: str, window: int, chunks: list[int], seed: int, padded: bool, spare: int
) -> None:
    layer, total = make(name, seed, sliding_window=window), sum(chunks)
    x, cache = hidden(2, total, seed=seed + 1), layer.new_cache(2, total + spare)
    assert cache.nbytes == cost.cache_bytes(layer.spec, total + spare, batch=2, dtype="float64")
    mask = torch.ones(2, total, dtype=torch.bool)
    if padded:
        mask[1, : total // 2] = False
    for buffer in cache.buffers:
        buffer.fill_(torch.nan)
    parts, end = [], 0
    for chunk in x.split(chunks, dim=1):
        end += chunk.shape[1]
        parts.append(layer(chunk, attention_mask=mask[:, :end] if padded else None, is_causal=True, cache=cache))
    assert (cache.length, cache.held) == (total, min(total, window, total + spare))
    expected = layer(x, attention_mask=mask if padded else None, is_causal=True)
    assert_close(torch.cat(parts, dim=1), expected, 1e-11, largest_of=torch.cat((expected, torch.ones_like(x)), -1))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_left_padded_decoding_past_the_window(name: str) -> None:
    layer, x = make(name, 2, sliding_window=3), hidden(2, 9)
    at = torch.stack((torch.arange(9), torch.arange(9) - 4))
    mask, cache = at >= 0, layer.new_cache(2, 9)
    steps = [
        layer(x[:, a:b], attention_mask=mask[:, :b], is_causal=True, position_ids=at[:, a:b], cache=cache)
        for a, b in ((0, 5), (5, 6), (6, 7), (7, 9))
    ]
    out = torch.cat(steps, dim=1)
    assert_close(out[:1], layer(x[:1], is_causal=True), 1e-11)
    assert_close(out[1:, 4:], layer(x[1:, 4:], is_causal=True), 1e-11)


@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (1, 4, 2, 9), (1, 1, 2, 1), (2, 9)])
@torch.no_grad()
def test_masks_over_all_tokens_lose_the_forgotten_ones(shape: tuple[int, ...]) -> None:
    mask = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(3)).bool()
    layer, full, x = make("grouped", 4, sliding_window=4), make("grouped", 4), hidden(2, 9)
    caches = layer.new_cache(2, 9), full.new_cache(2, 9)
    layer(x[:, :7], is_causal=True, cache=caches[0])
    full(x[:, :7], is_causal=True, cache=caches[1])
    allowed = (mask[:, None, None] if mask.dim() == 2 else mask) & band(9, 4)[:, :, 7:]
    expected = full(x[:, 7:], attention_mask=allowed, cache=caches[1])
    assert_close(layer(x[:, 7:], attention_mask=mask, is_causal=True, cache=caches[0]), expected, 1e-12)


@pytest.mark.parametrize("keys", [3, 8, 10])
def test_a_mask_of_other_tokens_is_refused(keys: int) -> None:
    layer, x = make("grouped", sliding_window=4), hidden(2, 9)
    cache = layer.new_cache(2, 9)
    layer(x[:, :7], is_causal=True, cache=cache)
    with pytest.raises(ArgumentError, match=rf"attention_mask shape = \(2, {keys}\): a 2-D mask is padding"):
        layer(x[:, 7:], attention_mask=torch.ones(2, keys).bool(), is_causal=True, cache=cache)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_weights_outside_the_window_are_zero(name: str) -> None:
    layer, x = make(name, 5, sliding_window=3), hidden(2, 7)
    _, weights = layer(x, is_causal=True, return_weights=True)
    assert (weights != 0).eq(band(7, 3)).all()
    assert_close(weights.sum(-1), torch.ones(weights.shape[:3], dtype=torch.float64), 1e-12)
    cache = layer.new_cache(2, 7)
    layer(x[:, :6], is_causal=True, cache=cache)
    _, step = layer(x[:, 6:], is_causal=True, cache=cache, return_weights=True)
    assert_close(step, weights[:, :, 6:, 4:], 1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_window_without_causality_or_over_another_sequence_is_refused(name: str) -> None:
    layer, x = make(name, sliding_window=3), hidden(2, 4)
    rule = r"sliding_window = 3: a layer with a sliding window attends to its own past: is_causal=True, no key_value"
    with pytest.raises(ArgumentError, match=rule):
        layer(x)
    with pytest.raises(ArgumentError, match=rule):
        layer(x, key_value_states=x, is_causal=True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("window", [0, -1, True, 2.0])
def test_a_window_is_some_tokens(name: str, window: Any) -> None:
    with pytest.raises(SpecError, match=rf"sliding_window = {window!r}: must be a whole number of at least 1"):
        LAYERS[name](sliding_window=window)


@torch.no_grad()
def test_a_forgetting_cache_is_reordered_and_reset() -> None:
    layer, x, beams = make("mla absorbed", 6, sliding_window=3), hidden(3, 8), torch.tensor([2, 0, 0])
    cache = layer.new_cache(3, 8)
    layer(x[:, :6], is_causal=True, cache=cache)
    cache.reorder(beams)
    out = layer(x[:, 6:], is_causal=True, cache=cache)
    whole = layer(torch.cat((x[beams, :6], x[:, 6:]), dim=1), is_causal=True)
    assert_close(out, whole[:, 6:], 1e-12)
    cache.reset()
    assert_close(layer(x, is_causal=True, cache=cache), layer(x, is_causal=True), 1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_through_a_window(name: str) -> None:
    assert gradients_are_right(make(name, 7, sliding_window=2), hidden(2, 4), is_causal=True)


@torch.no_grad()
def test_a_later_token_changes_only_the_window_after_it() -> None:
    for name in LAYERS:
        layer, x = make(name, 8, sliding_window=3), hidden(1, 9)
        changed = x.clone()
        changed[:, 4] += 1
        differs = (layer(x, is_causal=True) != layer(changed, is_causal=True)).any(-1)[0]
        assert differs.tolist() == [False] * 4 + [True] * 3 + [False] * 2


def test_gates_of_a_sequence_take_no_window() -> None:
    rule = r"sliding_window = 3: must be None with conditioning = \"sequence\""
    with pytest.raises(SpecError, match=rule):
        experts(conditioning="sequence", sliding_window=3)
