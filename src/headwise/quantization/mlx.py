"""MLX-LM's quantised cache: groups of 64 channels of a head with a scale and a bias each, as ``mx.quantize`` does.

Source: ``QuantizedKVCache`` of mlx-lm 0.32.2, and the affine ``quantize`` of MLX 0.32's CPU backend, read in 2026-11.
Its Metal kernel differs where half a code is rounded (away from zero, not to even) and in groups without a number
above zero, whose largest it takes to be 0. Attention multiplies queries with codes and adds scales and biases
in float32, so that what is read is not rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.quantization.engine_code import EngineCode, as_bytes, from_bytes, whole_groups
from headwise.quantization.packing import pack_bits, packed_bytes, unpack_bits

GROUP = 64
"""Channels of a group (``--kv-group-size``)."""

BITS = (4, 8)

_LEAST_SCALE = 1e-7


@dataclass(frozen=True)
class MlxCode(EngineCode):
    """Keys or values as MLX-LM's ``--kv-bits`` stores them.

    The number farthest from zero is a group's bias, and its scale has such a size that zero is a code. A row has the
    codes of all groups, their scales and their biases. For example ``MlxCode(4).token_bytes(64)`` is 36.

    Attributes:
        bits: of a code, one of `BITS`.
        dtype: of scales and biases, which is the model's.
    """

    bits: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return str(self.bits)

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row.

        Raises:
            ArgumentError: groups do not divide a head.
        """
        groups = whole_groups(f"mlx:{self}", width, GROUP)
        return packed_bytes(width, self.bits) + 2 * groups * self.dtype.itemsize

    def block(self, width: int) -> int:
        """How many channels share a scale: 64."""
        self.token_bytes(width)
        return GROUP

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of states ``[…, D]``; a group with a number that is not finite is read as NaN."""
        self.token_bytes(turned.shape[-1])
        groups = torch.unflatten(turned.float(), -1, (-1, GROUP))
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        levels = 2**self.bits - 1
        below = least.abs() > most.abs()
        scale = ((most - least) / levels).clamp_min(_LEAST_SCALE)
        scale = torch.where(below, scale, -scale)
        edge = torch.where(below, least, most)
        number = (edge / scale).round()
        scale = torch.where(number != 0, edge / number, scale)
        bias = torch.where(number != 0, edge, 0.0)
        codes = ((groups - bias) / scale).round().nan_to_num(0.0).clamp(0, levels).to(torch.uint8)
        parts = as_bytes(scale[..., 0], self.dtype), as_bytes(bias[..., 0], self.dtype)
        return torch.cat((pack_bits(codes.flatten(-2), self.bits), *parts), -1)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, in float32."""
        end = packed_bytes(width, self.bits)
        codes = torch.unflatten(unpack_bits(rows[..., :end], self.bits, width), -1, (-1, GROUP))
        scale, bias = from_bytes(rows[..., end:], self.dtype).float().chunk(2, -1)
        return (codes.float() * scale[..., None] + bias[..., None]).flatten(-2)

    def steps(self, turned: Tensor) -> Tensor:
        """How far apart the codes of each group lie, ``[…, D / 64]``, but for a factor."""
        groups = torch.unflatten(turned, -1, (-1, GROUP))
        return groups.amax(-1) - groups.amin(-1)
