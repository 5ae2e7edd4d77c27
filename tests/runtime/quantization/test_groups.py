"""Codes of single tokens: every byte by hand, and how far a number is from what its code stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.costs.formulas.target import GROUPS
from headwise.errors import ArgumentError
from headwise.runtime.quantization.groups import BITS, Float8Code, GroupCode, affine_codes, rotated
from tests.runtime.quantization.by_hand import codes_of, hadamard, halves

WIDTHS = (8, 16, 20, 32, 64, 96, 128, 192)
CODES = st.builds(GroupCode, st.sampled_from(BITS), st.sampled_from(GROUPS))


def states_of(seed: int, *shape: int) -> Tensor:
    """Random numbers whose channels have other means and sizes, as keys have, from the smallest to large ones."""
    noise = torch.Generator().manual_seed(seed)
    size = torch.logspace(-3, 1, shape[-1])[torch.randperm(shape[-1], generator=noise)]
    return size * (torch.randn(shape, generator=noise) + 4 * torch.randn(shape[-1], generator=noise))


def fits(code: GroupCode, width: int) -> bool:
    return width <= code.group or width % code.group == 0


@settings(max_examples=150, deadline=None)
@given(CODES, st.sampled_from(WIDTHS), st.integers(0, 2**31))
def test_bytes_say_what_is_decoded_and_it_is_within_half_a_scale(code: GroupCode, width: int, seed: int) -> None:
    if not fits(code, width):
        with pytest.raises(ArgumentError, match=f"of {code.group} channels, which do not divide the {width}"):
            code.token_bytes(width)
        return
    states = states_of(seed, 1, 2, 3, width)
    rows = code.encode(states)
    groups = max(1, width // code.group)
    end = -(-width * code.bits // 8)
    assert rows.dtype == torch.uint8
    assert rows.shape == (1, 2, 3, code.token_bytes(width))
    assert code.token_bytes(width) == end + 4 * groups
    decoded = code.decode(rows, width, torch.float64)
    for token, row, result in zip(states.flatten(0, 2), rows.flatten(0, 2), decoded.flatten(0, 2), strict=True):
        data = bytes(row.tolist())
        scale, zero = halves(data[end:]).reshape(2, groups)
        codes = np.array(codes_of(data[:end], code.bits, width)).reshape(groups, -1)
        by_hand = zero[:, None] + scale[:, None] * codes
        exact = token.double().numpy().reshape(groups, -1)
        assert np.abs(result.numpy().reshape(groups, -1) - by_hand).max() <= 1e-6 * np.abs(exact).max()
        assert (np.abs(by_hand - exact) <= scale[:, None] * (0.5 + 1e-4)).all()
        # The scale is no larger than the rounding of its zero point and of itself to float16 makes it.
        span = exact.max(-1) - exact.min(-1) + 2.0**-10 * np.abs(exact.min(-1)) + 2.0**-24
        assert (scale <= span / (2**code.bits - 1) * (1 + 2.0**-9) + 2.0**-24).all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from(GROUPS), st.sampled_from((8, 32, 64, 128)), st.integers(0, 2**31))
def test_a_rotated_code_is_the_code_of_rotated_numbers(bits: int, group: int, width: int, seed: int) -> None:
    states = states_of(seed, 1, 2, 3, width)
    matrix = torch.tensor(hadamard(width))
    assert (rotated(states).double() - states.double() @ matrix).abs().max() <= 1e-5 * states.abs().max()
    plain, code = GroupCode(bits, group), GroupCode(bits, group, True)
    rows = code.encode(states)
    assert torch.equal(rows, plain.encode(rotated(states)))
    exact = plain.decode(rows, width, torch.float64) @ matrix
    assert (code.decode(rows, width, torch.float64) - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_a_token_has_the_same_code_alone_as_among_others() -> None:
    states = states_of(0, 2, 3, 50, 64)
    for code in (GroupCode(4), GroupCode(3, 32, True), Float8Code()):
        together = code.encode(states)
        alone = torch.cat([code.encode(states[:, :, i : i + 1]) for i in range(50)], 2)
        assert torch.equal(together, alone)


@pytest.mark.parametrize("width", [20, 48, 96])
def test_a_width_that_cannot_be_rotated_is_refused(width: int) -> None:
    with pytest.raises(
        ArgumentError, match=rf"^quantize = 'int4:16\+hadamard': needs heads .* have {width} channels"
    ):
        GroupCode(4, 16, True).encode(torch.zeros(1, 1, 1, width))


def test_a_group_that_does_not_divide_a_head_names_those_that_do() -> None:
    rule = r"^quantize = 'int4': has groups of 64 .* the 80 of this model's heads; groups of 16, 128, 256 do$"
    with pytest.raises(ArgumentError, match=rule):
        GroupCode(4).encode(torch.zeros(1, 1, 1, 80))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", [GroupCode(8), GroupCode(4, 16), GroupCode(2, 16, True), Float8Code()], ids=str)
def test_constants_and_zeros_are_kept_in_every_dtype(code: GroupCode | Float8Code, dtype: torch.dtype) -> None:
    for number in (0.0, 1.0, -3.5, 0.001):
        states = torch.full((1, 1, 2, 16), number, dtype=dtype)
        back = code.decode(code.encode(states), 16, dtype)
        assert back.dtype == dtype
        loss, least = (0.07, 2.0**-10) if isinstance(code, Float8Code) else (0.01, 1e-6)
        assert (back - states).abs().max() <= loss * abs(number) + least


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38, -1e5])
@pytest.mark.parametrize("bits", BITS)
def test_a_group_with_what_float16_cannot_hold_is_nan_and_others_are_not(bits: int, bad: float) -> None:
    states = torch.randn(1, 1, 3, 64)
    states[0, 0, 1, 5] = bad
    code = GroupCode(bits, 32)
    back = code.decode(code.encode(states), 64, torch.float32)
    expected = torch.zeros(1, 1, 3, 64, dtype=torch.bool)
    expected[0, 0, 1, :32] = True
    assert torch.equal(back.isnan(), expected)
    assert back[~expected].isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from((8, 64)))
def test_fp8_is_within_a_sixteenth_and_ends_at_448(seed: int, width: int) -> None:
    states = states_of(seed, 1, 2, 4, width) * 10
    rows = Float8Code().encode(states)
    assert rows.shape[-1] == Float8Code().token_bytes(width) == width
    back = Float8Code().decode(rows, width, torch.float64)
    exact = states.double().clamp(-448, 448)
    assert ((back - exact).abs() <= exact.abs() / 16 + 2.0**-10).all()


def test_fp8_of_what_is_no_number_is_nan() -> None:
    states = torch.tensor([[[[float("nan"), float("inf"), -float("inf"), 1e9, -1e9, 1.0]]]])
    back = Float8Code().decode(Float8Code().encode(states), 6, torch.float32)[0, 0, 0]
    assert back[:3].isnan().all()
    assert back[3:].tolist() == [448, -448, 1]


@pytest.mark.parametrize("value", [70000.0, 65504.0, 1e-9, -1e-9, -65504.0, 2.0**-24, 0.1, -0.1, 333.3, -333.3])
def test_zero_points_are_rounded_down(value: float) -> None:
    _, _, zero = affine_codes(torch.tensor([[value, value + abs(value)]]), 8)
    below = float(zero)
    assert below <= np.float32(value)
    assert below == 65504 or np.nextafter(np.float16(below), np.float16(np.inf)) > np.float32(value)
