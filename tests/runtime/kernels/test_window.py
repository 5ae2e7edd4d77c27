"""``attend(window=…)``: every backend, against the rows by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels import Backend, attend, causal_mask, combine_masks
from tests.backends import EXACT
from tests.by_hand import attend_by_rows, may_attend
from tests.closeness import assert_close

CPU = torch.device("cpu")


def tensors(S: int, T: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, tokens: int, width: int) -> Tensor:
        return torch.randn(2, heads, tokens, width, generator=generator, dtype=torch.float64)

    return draw(4, S, 6), draw(2, T, 6), draw(2, T, 5)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 9])
@pytest.mark.parametrize(("S", "T"), [(1, 1), (1, 7), (4, 4), (3, 8), (5, 2), (7, 7)])
def test_the_mask_is_a_band_below_the_bottom_right_diagonal(S: int, T: int, window: int) -> None:
    assert torch.equal(causal_mask(S, T, window=window), may_attend(None, True, (1, 1, S, T), window)[0, 0])


def test_a_window_is_no_mask_only_for_one_token_that_sees_all() -> None:
    assert combine_masks(None, True, (2, 3, 1, 5), CPU, 5) is None
    assert combine_masks(None, True, (2, 3, 1, 5), CPU, 9) is None
    step = combine_masks(None, True, (2, 3, 1, 5), CPU, 4)
    assert step is not None
    assert step.flatten().tolist() == [False, True, True, True, True]
    assert combine_masks(None, False, (2, 3, 1, 5), CPU, 4) is None


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("window", [1, 2, 4, 9, 20])
@pytest.mark.parametrize(("S", "T"), [(1, 12), (5, 12), (12, 12), (30, 30), (4, 2)])
def test_every_backend_is_the_rows_by_hand(backend: Backend, window: int, S: int, T: int) -> None:
    query, key, value = tensors(S, T)
    padding = torch.ones(2, T, dtype=torch.bool)
    padding[1, : T // 2] = False
    for mask in (None, padding):
        out = attend(query, key, value, mask, is_causal=True, window=window, backend=backend)
        allowed = may_attend(mask, True, (2, 4, S, T), window)
        assert_close(out, attend_by_rows(query, key, value, allowed), 1e-12)


@pytest.mark.parametrize("backend", ["auto", "reference", "packed"])
@pytest.mark.parametrize(("S", "T"), [(1, 12), (5, 12), (12, 12)])
def test_weights_are_of_the_band(backend: Backend, S: int, T: int) -> None:
    query, key, value = tensors(S, T)
    out, weights = attend(query, key, value, is_causal=True, window=3, backend=backend, return_weights=True)
    assert (weights != 0).eq(may_attend(None, True, (1, 1, S, T), 3)).all()
    assert_close(weights @ value.repeat_interleave(2, dim=1), out, 1e-12)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("call", [{"window": 0}, {"window": -1}, {"window": 3, "is_causal": False}])
def test_a_window_below_one_or_without_causality_is_refused(backend: Any, call: dict[str, Any]) -> None:
    message = re.escape(f"window = {call['window']}: must be at least 1, and is_causal true with it")
    with pytest.raises(ArgumentError, match=message):
        attend(*tensors(4, 4), **{"is_causal": True, "backend": backend, **call})
