from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.attention import AttentionCache

SHAPES = ((3, 4), (2, 5))


def new_cache(**kwargs: Any) -> AttentionCache:
    return AttentionCache(2, SHAPES, 7, **{"dtype": torch.float32, **kwargs})


def tokens(count: int, seed: int, *, batch: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, count, width, generator=generator) for heads, width in SHAPES)


def assert_holds(cache: AttentionCache, *expected: tuple[Tensor, ...]) -> None:
    whole = [torch.cat(parts, dim=2) for parts in zip(*expected, strict=True)]
    assert cache.length == whole[0].shape[2]
    for held, wanted in zip(cache.views(), whole, strict=True):
        assert torch.equal(held, wanted)


def test_a_new_cache_is_empty() -> None:
    cache = new_cache()
    assert cache.length == 0
    assert cache.max_length == 7
    assert [tuple(view.shape) for view in cache.views()] == [(2, 3, 0, 4), (2, 2, 0, 5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nbytes_is_what_is_allocated(dtype: torch.dtype) -> None:
    cache = new_cache(dtype=dtype)
    assert cache.nbytes == 2 * 7 * (3 * 4 + 2 * 5) * dtype.itemsize
    assert cache.nbytes == sum(buffer.untyped_storage().nbytes() for buffer in cache.buffers)
    cache.update(*(new.to(dtype) for new in tokens(3, 1)))
    assert cache.nbytes == 2 * 7 * 22 * dtype.itemsize


def test_updates_append_and_return_all_that_is_held() -> None:
    cache, first, second, third = new_cache(), tokens(3, 1), tokens(1, 2), tokens(3, 3)
    for new in (first, second, third):
        returned = cache.update(*new)
        for part, view in zip(returned, cache.views(), strict=True):
            assert part.data_ptr() == view.data_ptr()
            assert part.shape == view.shape
    assert_holds(cache, first, second, third)
    assert cache.length == cache.max_length


def test_views_are_not_copies() -> None:
    cache = new_cache()
    cache.update(*tokens(4, 1))
    for view, buffer in zip(cache.views(), cache.buffers, strict=True):
        assert view.data_ptr() == buffer.data_ptr()


def test_overflow_is_refused_and_changes_nothing() -> None:
    cache, first = new_cache(), tokens(5, 1)
    cache.update(*first)
    with pytest.raises(ArgumentError, match="cache length = 8: is over max_length = 7"):
        cache.update(*tokens(3, 2))
    assert_holds(cache, first)
    second = tokens(2, 3)
    cache.update(*second)
    assert_holds(cache, first, second)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 1, 2, 4), torch.float32),
        ((2, 3, 2, 1), torch.float32),
        ((2, 3, 2, 4), torch.float64),
        ((2, 3, 2, 4), torch.bfloat16),
    ],
)
def test_states_that_do_not_fit_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache, first = new_cache(), tokens(2, 1)
    cache.update(*first)
    message = f"cached states = ({shape}, {dtype}): must be (2, 3, 2, 4) torch.float32"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        cache.update(torch.zeros(shape, dtype=dtype), torch.zeros(2, 2, 2, 5))
    assert_holds(cache, first)


@pytest.mark.parametrize("batch", [1, 3])
def test_states_of_another_batch_are_refused(batch: int) -> None:
    cache, first = new_cache(), tokens(2, 1)
    cache.update(*first)
    message = f"^batch = {batch}: must be 2, the batch size the cache was made for$"
    with pytest.raises(ArgumentError, match=message):
        cache.update(*tokens(2, 2, batch=batch))
    assert_holds(cache, first)


def test_the_second_tensor_is_checked_too() -> None:
    message = re.escape("cached states = ((2, 2, 2, 4), torch.float32): must be (2, 2, 2, 5) torch.float32")
    with pytest.raises(ArgumentError, match=message):
        new_cache().update(torch.zeros(2, 3, 2, 4), torch.zeros(2, 2, 2, 4))


def test_the_tensors_must_be_of_as_many_tokens() -> None:
    # One token would broadcast over three.
    message = re.escape("cached states = ((2, 2, 1, 5), torch.float32): must be (2, 2, 3, 5) torch.float32")
    with pytest.raises(ArgumentError, match=message):
        new_cache().update(torch.zeros(2, 3, 3, 4), torch.zeros(2, 2, 1, 5))


def test_crop_forgets_the_last() -> None:
    cache, first, second = new_cache(), tokens(5, 1), tokens(2, 2)
    cache.update(*first)
    cache.crop(3)
    kept = tuple(states[:, :, :3] for states in first)
    assert_holds(cache, kept)
    cache.update(*second)
    assert_holds(cache, kept, second)
    cache.crop(5)
    assert_holds(cache, kept, second)
    cache.crop(0)
    assert cache.length == 0


@pytest.mark.parametrize("length", [-1, 4])
def test_crop_beyond_what_is_held_is_refused(length: int) -> None:
    cache = new_cache()
    cache.update(*tokens(3, 1))
    with pytest.raises(ArgumentError, match=f"length = {length}: must be between 0 and the 3 tokens held"):
        cache.crop(length)
    assert cache.length == 3


@pytest.mark.parametrize("indices", [[1, 0], [1, 1], [0, 0], [0, 1]])
def test_reorder_gives_each_row_anothers_past(indices: list[int]) -> None:
    cache, first, second = new_cache(), tokens(3, 1), tokens(1, 2)
    cache.update(*first)
    cache.reorder(torch.tensor(indices))
    moved = tuple(states[indices] for states in first)
    assert_holds(cache, moved)
    cache.update(*second)
    assert_holds(cache, moved, second)


@pytest.mark.parametrize("indices", [[0], [0, 1, 1], [[0, 1]]])
def test_reorder_wants_one_row_number_a_row(indices: list[Any]) -> None:
    chosen = torch.tensor(indices)
    message = f"indices shape = {tuple(chosen.shape)}: must be one row number for each of 2 rows"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        new_cache().reorder(chosen)


def test_reset_forgets_everything_and_keeps_the_memory() -> None:
    cache, second = new_cache(), tokens(2, 2)
    cache.update(*tokens(6, 1))
    before = [buffer.data_ptr() for buffer in cache.buffers]
    cache.reset()
    assert cache.length == 0
    cache.update(*second)
    assert_holds(cache, second)
    assert [buffer.data_ptr() for buffer in cache.buffers] == before


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ArgumentError, match="batch_size = 0: must be a whole number of at least 1"):
        AttentionCache(0, SHAPES, 7, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="max_length = 0: must be a whole number of at least 1"):
        AttentionCache(2, SHAPES, 0, dtype=torch.float32)


# --- With a window


def windowed(window: int = 3, max_length: int = 9) -> AttentionCache:
    return AttentionCache(2, SHAPES, max_length, dtype=torch.float32, window=window)


def joined(*parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(states, dim=2) for states in zip(*parts, strict=True))


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, last: int | None = None) -> None:
    for given, wanted in zip(actual, expected, strict=True):
        assert torch.equal(given, wanted if last is None else wanted[:, :, -last:])


@pytest.mark.parametrize(("window", "max_length", "room"), [(3, 9, 3), (9, 3, 3), (3, 3, 3), (1, 9, 1)])
def test_a_window_has_room_for_its_tokens_only(window: int, max_length: int, room: int) -> None:
    cache = windowed(window, max_length)
    assert (cache.max_length, cache.length, cache.held) == (max_length, 0, 0)
    assert cache.nbytes == 2 * room * (3 * 4 + 2 * 5) * 4


def test_an_update_returns_the_window_before_each_new_token() -> None:
    cache, parts = windowed(), [tokens(count, seed) for seed, count in enumerate((2, 1, 1, 4, 1))]
    length = 0
    for index, part in enumerate(parts):
        states = cache.update(*part)
        length += part[0].shape[2]
        so_far, new = joined(*parts[: index + 1]), part[0].shape[2]
        assert_same(states, so_far, last=min(length, 2 + new))
        assert_same(cache.views(), so_far, last=min(length, 3))
        assert (cache.length, cache.held) == (length, min(length, 3))
    with pytest.raises(ArgumentError, match="cache length = 10: is over max_length = 9"):
        cache.update(*tokens(1, 9))


def test_a_window_not_yet_full_gives_views() -> None:
    cache = windowed()
    for count in (2, 1):
        for seen, buffer in zip(cache.update(*tokens(count, count)), cache.buffers, strict=True):
            assert seen.data_ptr() == buffer.data_ptr()


def test_what_was_returned_stays_when_the_window_moves_on() -> None:
    cache = windowed()
    cache.update(*tokens(3, 1))
    states = cache.update(*tokens(2, 2))
    before = tuple(part.clone() for part in states)
    cache.update(*tokens(2, 3))
    assert_same(states, before)


def test_crop_is_refused_once_something_is_forgotten() -> None:
    cache, first = windowed(), tokens(3, 1)
    cache.update(*first)
    cache.crop(2)
    assert_same(cache.views(), tuple(states[:, :, :2] for states in first))
    cache.update(*tokens(2, 2))
    cache.crop(4)  # nothing is taken away
    for length in (3, 0):
        with pytest.raises(ArgumentError, match=f"length = {length}: cannot be cropped to: only the last 3 tokens"):
            cache.crop(length)
    assert cache.length == 4
    cache.reset()
    assert (cache.length, cache.held) == (0, 0)
    second = tokens(2, 3)
    assert_same(cache.update(*second), second)


def test_a_full_window_is_reordered_whole() -> None:
    cache, first, second = windowed(), tokens(5, 1), tokens(1, 2)
    cache.update(*first)
    cache.reorder(torch.tensor([1, 1]))
    assert_same(cache.views(), tuple(states[[1, 1]] for states in first), last=3)
    moved = joined(tuple(states[[1, 1]] for states in first), second)
    assert_same(cache.update(*second), moved, last=3)
