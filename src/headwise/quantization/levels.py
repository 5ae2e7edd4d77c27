"""The levels that a code of b bits stands for, before the scale of its channel: those of least error for a normal
distribution.

Source: S. P. Lloyd (1982) and J. Max (1960), "Quantizing for minimum distortion"; their conditions are solved here.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""The numbers of bits that a code may have."""

_UNIFORM = 8
"""Codes of so many bits have equal steps, whose error is far below what the cache's own numbers are sure to."""


@lru_cache
def levels(bits: int) -> Tensor:
    """The levels of a code of ``bits`` bits for a normal distribution of variance 1, in rising order.

    Each is a number of bfloat16, so that kernels may multiply codes in that format without a further error.

    Args:
        bits: one of `WIDTHS`.

    Returns:
        float32 ``[2**bits]``, symmetric about 0.

    >>> levels(1).tolist()
    [-0.796875, 0.796875]
    """
    count = 2**bits
    if bits == _UNIFORM:
        return (torch.arange(count) - (count - 1) / 2) / 32
    half = torch.linspace(0.5, count - 0.5, count // 2, dtype=torch.float64) * (3.5 / count)  # positive levels
    for _ in range(20_000):
        edges = torch.cat((half.new_zeros(1), (half[1:] + half[:-1]) / 2, half.new_full((1,), 40.0)))
        mass = torch.special.ndtr(edges[1:]) - torch.special.ndtr(edges[:-1])
        density = torch.exp(-edges.square() / 2) * (2 * torch.pi) ** -0.5
        centres = (density[:-1] - density[1:]) / mass
        change = float((centres - half).abs().max())
        half = centres
        if change < 1e-9:
            break
    return torch.cat((-half.flip(0), half)).bfloat16().float()


@lru_cache
def thresholds(bits: int) -> Tensor:
    """The midpoints between neighbouring `levels`, float32 ``[2**bits - 1]``.

    For example ``torch.bucketize(values, thresholds(4))`` gives the codes of least error.

    Args:
        bits: one of `WIDTHS`.
    """
    table = levels(bits)
    return (table[1:] + table[:-1]) / 2
