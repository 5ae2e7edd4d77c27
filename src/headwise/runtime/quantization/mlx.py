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

from headwise.runtime.quantization.engine_code import GROUP, GroupedCode

BITS = (4, 8)

_LEAST_SCALE = 1e-7


@dataclass(frozen=True)
class MlxCode(GroupedCode):
    """Keys or values as MLX-LM's ``--kv-bits`` stores them.

    The number farthest from zero is a group's bias, and its scale has such a size that zero is a code. For
    example ``MlxCode(4).token_bytes(64)`` is 36.

    Attributes:
        bits: of a code, one of `BITS`.
        dtype: of scales and biases, which is the model's.
    """

    engine = "mlx"

    def __str__(self) -> str:
        return str(self.bits)

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of states ``[…, D]``; a group with a number that is not finite is read as NaN."""
        self.token_bytes(turned.shape[-1])
        groups = torch.unflatten(turned.float(), -1, (-1, GROUP))
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        below = least.abs() > most.abs()
        scale = ((most - least) / (2**self.bits - 1)).clamp_min(_LEAST_SCALE)
        scale = torch.where(below, scale, -scale)
        edge = torch.where(below, least, most)
        number = (edge / scale).round()
        scale = torch.where(number != 0, edge / number, scale)
        bias = torch.where(number != 0, edge, 0.0)
        return self.rows((groups - bias) / scale, scale, bias)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, in float32."""
        codes, scale, bias = self.parts(rows, width)
        return (codes.float() * scale.float() + bias.float()).flatten(-2)
