"""What a code of an engine's own cache says of itself, beyond the bytes of its rows."""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor

from headwise.quantization.groups import TokenCode


class EngineCode(TokenCode, Protocol):
    """One side of an engine's own cache, rounded as that engine rounds.

    An engine may reorder and rotate the channels of a head before it stores them; queries then take part, and
    attention is computed in that order. *Turned* states are those that it stores.

    Shapes: D channels of a head.
    """

    @property
    def rounds(self) -> bool:
        """Whether it stores codes, and not numbers."""
        ...

    def block(self, width: int) -> int:
        """How many channels of a head of ``width`` share a scale, side by side as they are stored.

        Raises:
            ArgumentError: blocks do not divide a head.
        """
        ...

    def interleaved(self) -> Self:
        """The code for a model whose file keeps the two channels of a rotary pair side by side."""
        ...

    def turned(self, states: Tensor) -> Tensor:
        """Queries, keys or values ``[…, D]`` in the order and rotation that they are stored in."""
        ...

    def turned_back(self, states: Tensor) -> Tensor:
        """Undo `turned` for sums of values ``[…, D]``."""
        ...

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of turned states ``[…, D]``."""
        ...

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The turned states ``[…, width]`` that rows stand for, in float32."""
        ...

    def rounded_queries(self, turned: Tensor) -> Tensor:
        """Turned queries ``[…, D]`` as the engine multiplies them with keys, in float32."""
        ...

    def steps(self, turned: Tensor) -> Tensor:
        """How far apart the codes of each block of turned states lie, ``[…, D / block]``, but for a factor that all
        blocks share."""
        ...
