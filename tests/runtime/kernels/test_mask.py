from __future__ import annotations

import re

import pytest
import torch

from headwise.errors import ArgumentError
from headwise.runtime.kernels import as_bool_mask, causal_mask, combine_masks
from tests.by_hand import may_attend

CPU = torch.device("cpu")
SHAPE = (2, 3, 4, 5)


@pytest.mark.parametrize(("S", "T"), [(1, 1), (1, 7), (4, 4), (3, 8), (5, 2), (6, 1)])
def test_causal_is_bottom_right(S: int, T: int) -> None:
    assert torch.equal(causal_mask(S, T), may_attend(None, True, (1, 1, S, T))[0, 0])
    assert causal_mask(S, T)[-1].all()


def test_nothing_to_mask_is_none() -> None:
    assert combine_masks(None, False, SHAPE, CPU) is None
    assert combine_masks(None, True, (2, 3, 1, 5), CPU) is None


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [(2, 5), (1, 5), (2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 4, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_mask_and_causal_combine(is_causal: bool, size: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(size))
    mask = torch.randint(0, 2, size, generator=generator).to(dtype)
    combined = combine_masks(mask, is_causal, SHAPE, CPU)
    assert combined is not None
    assert combined.dtype == torch.bool
    assert torch.equal(combined.expand(SHAPE), may_attend(mask, is_causal, SHAPE))


def test_a_users_mask_is_not_written_to() -> None:
    mask = torch.ones(2, 1, 4, 5, dtype=torch.bool)
    combine_masks(mask, True, SHAPE, CPU)
    assert mask.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_additive_masks_are_refused(dtype: torch.dtype) -> None:
    rule = f"attention_mask dtype = '{dtype}': must be bool or 0/1 integers, True = attend; additive masks"
    with pytest.raises(ArgumentError, match=re.escape(rule)):
        as_bool_mask(torch.zeros(2, 5, dtype=dtype), SHAPE)


@pytest.mark.parametrize("size", [(4, 5), (3, 5), (2, 4), (2, 1)])
def test_2d_masks_are_padding_only(size: tuple[int, int]) -> None:
    rule = f"attention_mask shape = {size}: a 2-D mask is padding, [batch, keys] = [2, 5]; write an [S, T] mask as"
    with pytest.raises(ArgumentError, match=re.escape(rule)):
        as_bool_mask(torch.ones(size, dtype=torch.bool), SHAPE)


@pytest.mark.parametrize("size", [(5,), (2, 4, 5), (1, 2, 3, 4, 5), (2, 3, 4, 4), (2, 2, 4, 5), (3, 1, 1, 5)])
def test_other_shapes_are_refused(size: tuple[int, ...]) -> None:
    rule = f"attention_mask shape = {size}: must be [2, 5] or broadcast to [B, H, S, T] = [2, 3, 4, 5]"
    with pytest.raises(ArgumentError, match=re.escape(rule)):
        as_bool_mask(torch.ones(size, dtype=torch.bool), SHAPE)
