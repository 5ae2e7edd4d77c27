"""Codes read out of bytes in the simplest way, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def codes_of(row: bytes, bits: int, count: int) -> list[int]:
    """Code i takes the bits from ``bits · i`` on, the lowest bit first."""
    number = int.from_bytes(row, "little")
    return [(number >> (bits * i)) & (2**bits - 1) for i in range(count)]


def halves(data: bytes) -> NDArray[np.float64]:
    """float16 numbers out of bytes."""
    return np.frombuffer(data, dtype="<f2").astype(np.float64)


def hadamard(width: int) -> NDArray[np.float64]:
    """The Hadamard matrix over the root of its size: its entries' signs are the parities of common bits."""
    parity = [[bin(i & j).count("1") % 2 for j in range(width)] for i in range(width)]
    return (1.0 - 2.0 * np.array(parity)) / width**0.5
