"""`EngineCode`, what a code of an engine's own cache says of itself; and the codes of MLX-LM and optimum-quanto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.quantization.groups import TokenCode, as_bytes, from_bytes, pack_bits, packed_bytes, unpack_bits

GROUP = 64
"""Channels of a group of a `GroupedCode` (MLX-LM's ``--kv-group-size``, optimum-quanto's ``q_group_size``)."""


class EngineCode(TokenCode, Protocol):
    """One side of an engine's own cache, rounded as that engine rounds.

    An engine may reorder and rotate the channels of a head before it stores them; queries then take part, and
    attention is computed in that order. *Turned* states are those that it stores. What most engines do is what the
    methods do here; a code says what it does in another way.

    Shapes: D channels of a head.
    """

    @property
    def rounds(self) -> bool:
        """Whether it stores codes, and not numbers."""
        return True

    def block(self, width: int) -> int:
        """How many channels of a head of ``width`` share a scale, side by side as they are stored; all of them here.

        Raises:
            ArgumentError: blocks do not divide a head.
        """
        self.token_bytes(width)
        return width

    def interleaved(self) -> Self:
        """The code for a model whose file keeps the two channels of a rotary pair side by side: a GGUF file's."""
        return self

    def encode(self, states: Tensor) -> Tensor:
        """Rows of bytes, uint8 ``[B, K, T, token_bytes(D)]``, of keys or values ``[B, K, T, D]``."""
        return self.stored(self.turned(states.float()))

    def decode(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The keys or values ``[B, K, T, width]`` that rows stand for."""
        return self.turned_back(self.as_read(rows, width)).to(dtype)

    def turned(self, states: Tensor) -> Tensor:
        """Queries, keys or values ``[…, D]`` in the order and rotation that they are stored in."""
        return states

    def turned_back(self, states: Tensor) -> Tensor:
        """Undo `turned` for sums of values ``[…, D]``."""
        return states

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of turned states ``[…, D]`` in float32."""
        ...

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The turned states ``[…, width]`` that rows stand for, in float32."""
        ...

    def rounded_queries(self, turned: Tensor) -> Tensor:
        """Turned queries ``[…, D]`` as the engine multiplies them with keys, in float32."""
        return turned.float()

    @property
    def spread(self) -> Literal["size", "range"] | None:
        """What the step of a block of keys follows from: the largest size of its numbers, which is so here, or their
        range; None where it is another function of them."""
        return "size"

    def steps(self, turned: Tensor) -> Tensor:
        """How far apart the codes of each block of turned states lie, ``[…, D / block]``, but for a factor that all
        blocks share.

        For example ``GgmlCode("q4_0").steps(torch.tensor([[3.0, -1.0] * 16]))`` is ``[[3.0]]``.
        """
        blocks = torch.unflatten(turned, -1, (-1, self.block(turned.shape[-1])))
        return blocks.amax(-1) - blocks.amin(-1) if self.spread == "range" else blocks.abs().amax(-1)

    def loss(self, turned: Tensor, queries: Tensor) -> Tensor:
        """What scores lose by rounding: the mean square of their error, but for a factor of the format alone.

        A block of keys is off by a random part of a step in each channel, so that it is the sum over blocks of the
        mean square of their steps times that of the queries in them.

        Args:
            turned: keys ``[…, T, D]``.
            queries: the mean squares of queries, summed over the channels of each block, ``[…, D / block]``.

        Returns:
            ``[…]``, which has derivatives.
        """
        return (self.steps(turned).square().mean(-2) * queries).sum(-1)


@dataclass(frozen=True)
class GroupedCode(EngineCode):
    """Integers with two numbers for each group of 64 channels, as several engines have them by default.

    A row has the codes of all groups, the first numbers of all of them and then the second ones.

    Attributes:
        bits: the bits of a code.
        dtype: the dtype of the two numbers, which is the model's.
    """

    bits: int
    dtype: torch.dtype = torch.bfloat16

    engine: ClassVar[str]

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row.

        Raises:
            ArgumentError: groups do not divide a head.
        """
        groups = whole_groups(f"{self.engine}:{self}", width, GROUP)
        return packed_bytes(width, self.bits) + 2 * groups * self.dtype.itemsize

    def block(self, width: int) -> int:
        """How many channels share a scale: 64."""
        self.token_bytes(width)
        return GROUP

    @property
    def spread(self) -> Literal["range"]:
        """What the step of a group follows from: the range of its numbers."""
        return "range"

    def rows(self, codes: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Rows of bytes of codes before they are rounded.

        Args:
            codes: ``[…, G, 64]``; NaN stands for 0.
            first: the first number of each group, ``[…, G, 1]``.
            second: the second number of each group, ``[…, G, 1]``.
        """
        rounded = codes.round().nan_to_num(0.0).clamp(0, 2**self.bits - 1).to(torch.uint8).flatten(-2)
        numbers = (as_bytes(each[..., 0], self.dtype) for each in (first, second))
        return torch.cat((pack_bits(rounded, self.bits), *numbers), -1)

    def parts(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes ``[…, G, 64]``, and the two numbers of each group, ``[…, G, 1]``, of `rows`."""
        end = packed_bytes(width, self.bits)
        codes = torch.unflatten(unpack_bits(rows[..., :end], self.bits, width), -1, (-1, GROUP))
        first, second = from_bytes(rows[..., end:], self.dtype).chunk(2, -1)
        return codes, first[..., None], second[..., None]


def whole_groups(code: object, width: int, group: int) -> int:
    """How many groups of channels a head of ``width`` has: ``whole_groups("mlx:4", 128, 64)`` is 2.

    Raises:
        ArgumentError: the groups do not divide a head.
    """
    if width % group:
        rule = f"has groups of {group} channels, which do not divide the {width} of this model's heads"
        raise ArgumentError("quantize", str(code), rule)
    return width // group


MLX_BITS = (4, 8)

_LEAST_SCALE = 1e-7


@dataclass(frozen=True)
class MlxCode(GroupedCode):
    """Keys or values as MLX-LM's ``--kv-bits`` stores them: groups with a scale and a bias, as ``mx.quantize`` does.

    The number farthest from zero is a group's bias, and its scale has such a size that zero is a code. For
    example ``MlxCode(4).token_bytes(64)`` is 36.

    Source: ``QuantizedKVCache`` of mlx-lm 0.32.2, and the affine ``quantize`` of MLX 0.32's CPU backend, read in
    2026-11. Its Metal kernel differs where half a code is rounded (away from zero, not to even) and in groups without
    a number above zero, whose largest it takes to be 0. Attention multiplies queries with codes and adds scales and
    biases in float32, so that what is read is not rounded again.

    Attributes:
        bits: the bits of a code, one of `MLX_BITS`.
        dtype: the dtype of scales and biases, which is the model's.
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


QUANTO_BITS = (4, 2)


@dataclass(frozen=True)
class QuantoCode(GroupedCode):
    """transformers' quantised cache with optimum-quanto, whose arithmetic is all done in the model's dtype.

    For example ``QuantoCode(4).token_bytes(64)`` is 36. Groups have a scale and a shift; those of narrower heads
    would reach over several tokens.

    Source: ``QuantoQuantizedLayer`` of transformers 5, and ``MaxOptimizer``, ``quantize_affine`` and
    ``QBitsDequantizer`` of optimum-quanto 0.2.7, read in 2026-11. Here each token is rounded once. transformers keeps
    up to 128 recent tokens as they are, and rounds all tokens again whenever it has so many; a prompt attends to its
    own keys and values as they are.

    Attributes:
        bits: the bits of a code, one of `QUANTO_BITS`.
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
