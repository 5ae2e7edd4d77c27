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

from headwise.runtime.quantization.engine_code import GROUP, GroupedCode

BITS = (4, 2)


@dataclass(frozen=True)
class QuantoCode(GroupedCode):
    """Keys or values as optimum-quanto stores them, whose arithmetic is all done in the model's dtype.

    For example ``QuantoCode(4).token_bytes(64)`` is 36. Groups of narrower heads would reach over several tokens.

    Attributes:
        bits: of a code, one of `BITS`.
        dtype: the model's.
    """

    engine = "transformers"

    def __str__(self) -> str:
        return f"quanto{self.bits}"

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of states ``[…, D]``; a group with a number that is not finite is read as NaN."""
        self.token_bytes(turned.shape[-1])
        groups = torch.unflatten(turned.to(self.dtype), -1, (-1, GROUP))
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (most - least) / (2**self.bits - 1)
        # A group of equal numbers has a scale of 0, and is read as its shift.
        return self.rows((groups - least) / scale, scale, -least)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, rounded to the model's dtype, in float32."""
        codes, scale, shift = self.parts(rows, width)
        return (codes * scale - shift).float().flatten(-2)
