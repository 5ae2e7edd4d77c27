"""Bytes of codes for each layer: whole numbers that the blocks of its channels can spend, and no bytes left over."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwise.models.specs import GroupedSpec, LatentSpec
from headwise.runtime.quantization.transform_code import blocks, code_shape


def whole_shares(wanted: Sequence[float], specs: Sequence[GroupedSpec | LatentSpec]) -> tuple[int, ...]:
    """Round the bytes a token of each layer's codes down; what is left over goes to the next layer.

    For example ``whole_shares([10.5, 10.5], specs)`` is ``(9, 11)`` for layers whose channels are in blocks of 16:
    another bit for a block takes two bytes, and the gains take one.

    Args:
        wanted: bytes a token, each layer's.
        specs: of the layers with codes.

    Returns:
        The bytes of each layer: for the gains one, and for each value from one bit to eight where ``wanted`` has one
        bit for each.
    """
    counts: list[int] = []
    left = 0.0
    for bytes_, spec in zip(wanted, specs, strict=True):
        widths = [end - start for start, end in blocks(code_shape(spec)[0])]
        bits = math.gcd(*widths)
        step = bits // 8 if bits % 8 == 0 else 1
        left += bytes_
        counts.append(1 + min(math.floor((left - 1) / step) * step, sum(widths)))  # eight bits a value are the most
        left -= counts[-1]
    return tuple(counts)
