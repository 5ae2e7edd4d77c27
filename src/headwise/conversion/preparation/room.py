"""What stored weights can be multiplied by before their type rounds or cuts them.

Shapes: K key–value heads, G groups of channels, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwise.conversion.preparation.change import Change, channels
from headwise.models.specs import GroupedSpec

FAR = 64
"""Exponents beyond which no type is asked."""

_LARGEST = 65504.0
_ROUNDED = 2.0**-11
"""The largest part of a row that may be lost by rounding its scales: what float16 rounds any number by."""

_TRIED = 128
"""Numbers of a row that are rounded to see what is lost."""

_SHIFTS = sorted(range(-12, 13), key=abs)

Span = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""The least and the largest exponent of each row."""


@dataclass(frozen=True, eq=False)
class Room:
    """What the stored queries and keys of a layer have room for.

    Attributes:
        keys: the least and the largest base-2 exponent of each row of keys, int64 ``[K, D]``.
        queries: those of queries, of all heads that share a key–value head together.
        turns: whether pairs may be turned by quarters, for which rows are negated.
        grain: the factors between a number and its double: 1 where each but a power of two would round weights.
    """

    keys: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    turns: bool = True
    grain: int = 1


def half_span(scales: npt.NDArray[np.float64]) -> Span:
    """The exponents that rows of float16 numbers can be multiplied by, as 2 to the power of them.

    Args:
        scales: ``[rows, n]``: the numbers of each row, or the scales of its blocks.
    """
    largest = np.abs(scales).max(1)
    most = np.where(largest > 0, np.floor(np.log2(_LARGEST / np.maximum(largest, 1e-30))), FAR)
    scales = scales[:, :: max(1, scales.shape[1] // _TRIED)]
    least = np.full(len(scales), -FAR)
    size = np.sqrt(np.square(scales).sum(1))
    open_rows = size > 0
    for exponent in range(-1, -FAR, -1):
        rounded = np.ldexp(np.ldexp(scales, exponent).astype(np.float16).astype(np.float64), -exponent)
        lost = np.sqrt(np.square(rounded - scales).sum(1)) > _ROUNDED * size
        least[open_rows & lost] = exponent + 1
        open_rows &= ~lost
        if not open_rows.any():
            break
    return least.astype(np.int64), np.minimum(most, FAR).astype(np.int64)


def within(change: Change, layer: GroupedSpec, room: Room) -> Change:
    """A change that the weights have room for: all exponents of a head shifted alike, which changes no rounding of
    the cache, and those cut that are still too large.

    Args:
        change: the wanted one.
        layer: its spec.
        room: of the layer's weights.
    """
    first, second = channels(layer).T
    least = torch.maximum(room.keys[0], -room.queries[1])
    most = torch.minimum(room.keys[1], -room.queries[0])
    least = torch.maximum(least[:, first], least[:, second])  # [K, G]
    most = torch.maximum(torch.minimum(most[:, first], most[:, second]), least)
    wanted = torch.stack([change.exponents + shift for shift in _SHIFTS])
    missed = (least - wanted).clamp_min(0) + (wanted - most).clamp_min(0)
    chosen = missed.sum(-1).argmin(0)  # [K], the smallest shift of equally good ones
    heads = torch.arange(len(chosen))
    return replace(
        change,
        exponents=wanted[chosen, heads].clamp(least, most),
        cut=int(missed[chosen, heads].max().ceil()),
    )
