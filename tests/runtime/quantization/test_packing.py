"""Codes in bytes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.runtime.quantization.groups import pack_bits, packed_bytes, unpack_bits


@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 2**16))
def test_codes_come_back(bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, 2, count), generator=generator, dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, packed_bytes(count, bits))
    assert torch.equal(unpack_bits(packed, bits, count), codes)


def test_the_first_code_takes_the_lowest_bits() -> None:
    assert pack_bits(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b00_11_10_01]
    assert pack_bits(torch.tensor([5, 1, 7], dtype=torch.uint8), 3).tolist() == [0b11_001_101, 0b1]
