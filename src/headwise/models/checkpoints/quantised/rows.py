"""A quantised matrix as rows of codes with scales, which can be multiplied by powers of two and exchanged exactly.

Shapes: R rows (output channels), C columns (input channels), G groups of columns, b bits of a code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_SIGN = 0x80
"""The bit of an 8-bit float that is its sign."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix ``(codes − zeros) · scales``, by rows, whatever the format that stores it.

    Attributes:
        codes: int16 ``[R, C]``; of floats, their bits, uint8.
        scales: ``[R, G]`` in the dtype that they are stored in; ``[⌈R / rows_per_scale⌉, G]`` where rows share them.
        groups: int64 ``[C]``, the group of each column.
        zeros: int16 ``[R, G]``, the codes that mean 0; None where that is code 0.
        ends: the sum of the least and the largest code of a format that stores zeros, so that a row is negated by
            taking codes and zeros from it; None where zeros are fixed, and a negative row has no codes.
        rows_per_scale: rows that share a scale.
    """

    codes: Tensor
    scales: Tensor
    groups: Tensor
    zeros: Tensor | None = None
    ends: int | None = None
    rows_per_scale: int = 1

    @property
    def is_float(self) -> bool:
        """Whether codes are 8-bit floats."""
        return self.codes.dtype == torch.uint8

    @property
    def can_turn(self) -> bool:
        """Whether codes can say that a row is negated. Scales are left positive: vLLM's Marlin kernel with int8
        activations reads them as unsigned (vllm-project/vllm#48905)."""
        return self.is_float or (self.zeros is not None and self.ends is not None)

    def row_scales(self) -> Tensor:
        """The scales of each row, ``[R, G]``."""
        return self.scales.repeat_interleave(self.rows_per_scale, 0)[: len(self.codes)]

    def weight(self) -> Tensor:
        """The matrix in float32, ``[R, C]``.

        It is exact but where a scale has more than 16 bits, where products are rounded as transformers rounds them.
        """
        values = self.codes.view(torch.float8_e4m3fn).float() if self.is_float else self.codes.float()
        if self.zeros is not None:
            values = values - self.zeros.float()[:, self.groups]
        return values * self.row_scales().float()[:, self.groups]

    def multiplied(self, factors: Tensor) -> Rows:
        """The matrix with each row times ``factors[row]``; codes and zeros stay.

        Args:
            factors: float64 ``[R]``.
        """
        assert self.rows_per_scale == 1
        return replace(self, scales=(self.scales.double() * factors[:, None]).to(self.scales.dtype))

    def taken(self, order: Tensor, signs: Tensor) -> Rows:
        """The matrix with row ``order[r]`` in the place of row r, times ``signs[r]``.

        Args:
            order: int64 ``[R]``.
            signs: int64 ``[R]``, each 1 or −1; all 1 unless `can_turn`.
        """
        assert self.rows_per_scale == 1
        codes, zeros = self.codes[order], None if self.zeros is None else self.zeros[order]
        negated = (signs < 0)[:, None]
        if bool(negated.any()):
            assert self.can_turn
            if self.is_float:
                codes = torch.where(negated, codes ^ _SIGN, codes)
            elif zeros is not None and self.ends is not None:
                codes = torch.where(negated, self.ends - codes, codes)
                zeros = torch.where(negated, self.ends - zeros, zeros)
        return replace(self, codes=codes, scales=self.scales[order], zeros=zeros)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes in 32-bit words, the lowest bits first: int16 ``[…, n · 32 / b]`` of int32 ``[…, n]``.

    For example ``unpacked(torch.tensor([0x76543210], dtype=torch.int32), 4)`` is ``0 … 7``.

    Args:
        words: to unpack along the last dimension.
        bits: of a code; a divisor of 32.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.int16).flatten(-2)


def packed(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpacked`; the last word is filled with zeros.

    Args:
        codes: ``[…, n]`` from 0 to 2ᵇ − 1.
        bits: of a code; a divisor of 32.
    """
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % each))
    words: Tensor = torch.unflatten(codes, -1, (-1, each)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.int32)  # the upper half of the range becomes negative
