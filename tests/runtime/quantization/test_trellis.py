"""Trellis codes: the compiled encoder, the one in torch and a search of all paths agree; errors are as published."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.runtime.quantization import trellis
from headwise.runtime.quantization.trellis import UNIT, decode, encode, tables

NORMAL_DB = {1: 4.40, 2: 9.30, 3: 14.62, 4: 20.22, 5: 26.02}
"""Signal to noise of the best levels for each value of a normal distribution by itself (J. Max, 1960), in decibel."""

TRELLIS_DB = {1: 5.4, 2: 11.0, 3: 16.6, 4: 22.2}
"""Of the codes, as docs/conversion.md has it."""

BOUND_DB = 6.0206
"""Signal to noise for each bit that no code of such values can exceed."""


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "can_encode", lambda: False)


def rows(n: int, bits: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    width = len(bits)
    values = torch.randn(n, width, generator=generator)
    weights = torch.rand(width, generator=generator) + 0.1
    starts = torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)
    gains = torch.rand(n, width, generator=generator) + 0.5
    return values, weights, torch.tensor(bits, dtype=torch.uint8), starts, gains


def test_levels_are_whole_numbers_of_int8() -> None:
    numbers = tables() / UNIT
    assert torch.equal(numbers, numbers.round())
    assert numbers.abs().max() <= 127
    assert torch.equal(tables(), tables().bfloat16().float())


@pytest.mark.parametrize("bits", range(1, 7))
def test_the_error_of_normal_values(bits: int) -> None:
    values, _, counts, starts, _ = rows(200, [bits] * 256, seed=bits)
    levels, _ = encode(values, torch.ones(256), counts, starts, pack=False)
    decibel = -10 * float((levels - values).square().mean().log10())
    assert NORMAL_DB.get(bits, 30.0) + 0.9 < decibel < BOUND_DB * bits
    assert decibel == pytest.approx(TRELLIS_DB.get(bits, decibel), abs=0.2)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.integers(0, 2**16))
def test_codes_decode_to_the_chosen_levels(bits: list[int], seed: int) -> None:
    values, weights, counts, starts, gains = rows(5, bits, seed)
    levels, codes = encode(values, weights, counts, starts, gains)
    assert codes is not None
    assert codes.shape == (5, -(-sum(bits) // 8))
    assert torch.equal(decode(codes, counts, starts), levels)
    unused = -sum(bits) % 8
    assert not (codes[:, -1] & (2**unused - 1)).any()


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.integers(0, 2**16))
def test_torch_encodes_as_the_kernel_does(bits: list[int], seed: int) -> None:
    values, weights, counts, starts, gains = rows(300, bits, seed)
    by_kernel = encode(values, weights, counts, starts, gains)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trellis, "can_encode", lambda: False)
        by_torch = encode(values, weights, counts, starts, gains)
    assert torch.equal(by_kernel[0], by_torch[0])
    assert by_kernel[1] is not None
    assert by_torch[1] is not None
    assert torch.equal(by_kernel[1], by_torch[1])


@pytest.mark.parametrize("bits", [[1] * 10, [2, 1, 3, 2], [3, 3, 4], [8, 1, 2]])
def test_no_other_path_has_less_error(bits: list[int]) -> None:
    values, weights, counts, starts, gains = rows(3, bits)
    levels, _ = encode(values, weights, counts, starts, gains)
    squares = weights * gains.square()
    chosen = (squares * (levels - values).square()).sum(1)
    for row in range(3):
        least = torch.inf
        for codes in itertools.product(*(range(2**b) for b in bits)):
            window, error = int(starts[row]), 0.0
            for place, (code, b) in enumerate(zip(codes, bits, strict=True)):
                window = (window << b | code) & 255
                difference = float(tables()[b, window]) - float(values[row, place])
                error += float(squares[row, place]) * difference**2
            least = min(least, error)
        assert float(chosen[row]) == pytest.approx(least, rel=1e-5)


@pytest.mark.usefixtures("in_torch")
def test_rows_are_encoded_in_pieces() -> None:
    values, weights, counts, starts, gains = rows(trellis._ROWS + 3, [3, 2, 5])
    whole, _ = encode(values, weights, counts, starts, gains)
    parts = [
        encode(values[a:b], weights, counts, starts[a:b], gains[a:b])[0] for a, b in ((0, 100), (100, len(values)))
    ]
    assert torch.equal(whole, torch.cat(parts))
