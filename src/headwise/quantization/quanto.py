"""transformers' quantised cache with optimum-quanto: groups of 64 channels of a head with a scale and a shift each.

Source: ``QuantoQuantizedLayer`` of transformers 5, and ``MaxOptimizer``, ``quantize_affine`` and ``QBitsDequantizer``
of optimum-quanto 0.2.7, read in 2026-11. Here each token is rounded once. transformers keeps up to 128 recent tokens
as they are, and rounds all tokens again whenever it has so many; a prompt attends to its own keys and values as they
are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.quantization.engine_code import EngineCode, as_bytes, from_bytes, whole_groups
from headwise.quantization.packing import pack_bits, packed_bytes, unpack_bits

GROUP = 64
"""Channels of a group (``q_group_size``). Groups of narrower heads would reach over several tokens."""

BITS = (4, 2)


@dataclass(frozen=True)
class QuantoCode(EngineCode):
    """Keys or values as optimum-quanto stores them, whose arithmetic is all done in the model's dtype.

    A row has the codes of all groups, their scales and their shifts. For example ``QuantoCode(4).token_bytes(64)`` is
    36.

    Attributes:
        bits: of a code, one of `BITS`.
        dtype: the model's.
    """

    bits: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"quanto{self.bits}"

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row.

        Raises:
            ArgumentError: groups do not divide a head.
        """
        groups = whole_groups(f"transformers:{self}", width, GROUP)
        return packed_bytes(width, self.bits) + 2 * groups * self.dtype.itemsize

    def block(self, width: int) -> int:
        """How many channels share a scale: 64."""
        self.token_bytes(width)
        return GROUP

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of states ``[…, D]``; a group with a number that is not finite is read as NaN."""
        self.token_bytes(turned.shape[-1])
        groups = torch.unflatten(turned.to(self.dtype), -1, (-1, GROUP))
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        levels = 2**self.bits - 1
        scale = (most - least) / levels
        # A group of equal numbers has a scale of 0, and is read as its shift.
        codes = ((groups - least) / scale).round().nan_to_num(0.0).clamp(0, levels).to(torch.uint8)
        parts = as_bytes(scale[..., 0], self.dtype), as_bytes(-least[..., 0], self.dtype)
        return torch.cat((pack_bits(codes.flatten(-2), self.bits), *parts), -1)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, rounded to the model's dtype, in float32."""
        end = packed_bytes(width, self.bits)
        codes = torch.unflatten(unpack_bits(rows[..., :end], self.bits, width), -1, (-1, GROUP))
        scale, shift = from_bytes(rows[..., end:], self.dtype).chunk(2, -1)
        return (codes * scale[..., None] - shift[..., None]).float().flatten(-2)

    def steps(self, turned: Tensor) -> Tensor:
        """How far apart the codes of each group lie, ``[…, D / 64]``, but for a factor."""
        groups = torch.unflatten(turned, -1, (-1, GROUP))
        return groups.amax(-1) - groups.amin(-1)
