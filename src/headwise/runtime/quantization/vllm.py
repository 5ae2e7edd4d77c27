"""vLLM's and SGLang's caches: small floats, integers with a scale for each token and head, and TurboQuant.

Source: vLLM 0.32.0's Triton kernels (``triton_reshape_and_cache_flash.py``, ``int4_per_token_head.py``,
``triton_turboquant_store.py``, ``triton_turboquant_decode.py``) and its ``centroids.py``, read in 2026-11. What is
rotated is not rounded to the model's dtype here, as it is there. With TurboQuant, a prompt attends to its own keys
and values as they are there, and to what their codes stand for here.

Small floats are those of vLLM 0.32.0 (``triton_reshape_and_cache_flash.py``, ``attention.py``) and SGLang 0.5.23
(``memory_pool.py``, ``flashattention_backend.py``, ``kvfp4_tensor.py``), read in 2026-11. Scales of a tensor are 1,
as both have them where a checkpoint brings none. Both round the queries of an fp8 cache too: vLLM's FlashAttention
and Triton backends on CUDA, and SGLang's FlashAttention. They then round the softmax's weights as well, which is not
done here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.quantization.engine_code import EngineCode, whole_groups
from headwise.runtime.quantization.groups import (
    Float8Code,
    as_bytes,
    from_bytes,
    pack_bits,
    packed_bytes,
    rotated,
    unpack_bits,
)

_LEAST_SCALE = 1e-6
_SIGNS = 0x9E3779B9
"""The seed of the signs that channels are multiplied by before they are rotated."""

BLOCK = 16
"""The number of channels of a block of fp4."""

_FLOAT8 = torch.float8_e4m3fn
_MOST = 448.0
_STEP = 0.0919
"""A number's step of codes over the number: the root of the mean square, (1 − 1/4) / (2 ln 2) / 8²."""

_LEAST_STEP = 2.0**-9

_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_BIAS, _NO_SCALE = 127, 255


@dataclass(frozen=True)
class EngineFloat8Code(EngineCode):
    """Numbers of 8 bits, e4m3, without a scale.

    Attributes:
        saturates: whether numbers beyond ±448 become ±448, and not NaN.
        rounds_queries: whether queries are rounded in the same way as keys.
        name: the name by which the engine knows the code.
    """

    saturates: bool = True
    rounds_queries: bool = True
    name: str = "fp8"

    def __str__(self) -> str:
        return self.name

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row: one for each of its ``width`` channels."""
        return width

    def block(self, width: int) -> int:
        """How many channels share a scale: each number has an exponent of its own, so 1."""
        return 1

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of states ``[…, D]``; infinities are read as NaN."""
        if self.saturates:
            return Float8Code().encode(turned)
        # Numbers round to ±448 up to the middle of 448 and 480, which would be the next.
        return turned.float().masked_fill(turned.abs() > _MOST + 16, torch.nan).to(_FLOAT8).view(torch.uint8)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, in float32."""
        return Float8Code().decode(rows, width, torch.float32)

    def rounded_queries(self, turned: Tensor) -> Tensor:
        """Queries ``[…, D]`` as they are multiplied with keys, in float32."""
        return self.as_read(self.stored(turned), turned.shape[-1]) if self.rounds_queries else turned.float()

    @property
    def spread(self) -> None:
        """What the step of a number follows from: its own size, within limits."""
        return None

    def steps(self, turned: Tensor) -> Tensor:
        """How far apart codes lie around each number, ``[…, D]``; beyond ±448, so far that it is off by as much."""
        sizes = turned.abs()
        return (_STEP * sizes).clamp_min(_LEAST_STEP) + math.sqrt(12) * (sizes - _MOST).clamp_min(0.0)

    def loss(self, turned: Tensor, queries: Tensor) -> Tensor:
        """What scores lose by rounding keys and queries; see `EngineCode.loss`.

        Factors of a channel change nothing of it, but for numbers that are too large or too small. A channel's
        queries are taken to have a normal distribution.
        """
        lost = super().loss(turned, queries)
        if not self.rounds_queries:
            return lost
        most = _MOST / queries.clamp_min(1e-30).sqrt()
        density = (-0.5 * most.square()).exp() / math.sqrt(2 * math.pi)
        beyond = ((1 + most.square()) * torch.special.ndtr(-most) - most * density).clamp_min(0.0)
        squares: Tensor = (_STEP**2 * queries).clamp_min(_LEAST_STEP**2) + 24 * queries * beyond  # of steps
        return lost + (turned.square().mean(-2) * squares).sum(-1)


@dataclass(frozen=True)
class Float4Code(EngineCode):
    """SGLang's ``fp4_mx_block16``: numbers of 4 bits, e2m1, and a power of two for each 16 channels of a head.

    A row has the codes, two a byte, and the exponents. For example ``Float4Code().token_bytes(64)`` is 36.
    """

    def __str__(self) -> str:
        return "fp4"

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row.

        Raises:
            ArgumentError: blocks do not divide a head.
        """
        return width // 2 + whole_groups(f"sglang:{self}", width, BLOCK)

    def block(self, width: int) -> int:
        """How many channels share a scale: 16."""
        self.token_bytes(width)
        return BLOCK

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of states ``[…, D]``; a block with a number that is not finite is read as NaN."""
        self.token_bytes(turned.shape[-1])
        blocks = torch.unflatten(turned.float(), -1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        exponents = (largest / _LEVELS[-1]).clamp_min(1e-10).log2().ceil()
        scaled = blocks / exponents.exp2()
        # Halfway between two levels, the larger one.
        bounds = torch.tensor(_BOUNDS, device=turned.device)
        codes = torch.bucketize(scaled.abs().contiguous(), bounds, right=True) + 8 * (scaled < 0)
        scales = torch.where(largest.isfinite(), exponents + _BIAS, _NO_SCALE).to(torch.uint8)
        return torch.cat((pack_bits(codes.to(torch.uint8).flatten(-2), 4), scales[..., 0]), -1)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, in float32."""
        codes = torch.unflatten(unpack_bits(rows[..., : width // 2], 4, width), -1, (-1, BLOCK)).long()
        levels = torch.tensor((*_LEVELS, *(-level for level in _LEVELS)), device=rows.device)
        exponents = rows[..., width // 2 :, None]
        scales = torch.where(exponents == _NO_SCALE, torch.nan, (exponents.float() - _BIAS).exp2())
        return (levels[codes] * scales).flatten(-2)


@dataclass(frozen=True)
class Int8TokenCode(EngineCode):
    """``int8_per_token_head``: an integer for each number, and a float32 scale for each token and head.

    For example ``Int8TokenCode().token_bytes(64)`` is 68.
    """

    def __str__(self) -> str:
        return "int8_per_token_head"

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row."""
        return width + 4

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of states ``[…, D]``; a row with a number that is not finite is read as NaN."""
        scale = (turned.abs().amax(-1, keepdim=True) / 127).clamp_min(_LEAST_SCALE)
        codes = _away_from_zero(turned * (1 / scale)).clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
        return torch.cat((codes.view(torch.uint8), as_bytes(scale, torch.float32)), -1)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, in float32."""
        codes = rows[..., :width].contiguous().view(torch.int8)
        return codes.float() * from_bytes(rows[..., width:], torch.float32)


@dataclass(frozen=True)
class Int4TokenCode(EngineCode):
    """``int4_per_token_head``: signs and a Hadamard rotation, then integers with a scale and a zero for each token.

    The lowest four bits of the float32 scale are the zero, which is one of the codes: of rotated numbers that are all
    above or all below zero, the far ones are cut. For example ``Int4TokenCode().token_bytes(64)`` is 36.
    """

    def __str__(self) -> str:
        return "int4_per_token_head"

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row.

        Raises:
            ArgumentError: a head has an odd number of channels.
        """
        if width % 2:
            rule = f"stores pairs of channels, and this model's heads have {width}"
            raise ArgumentError("quantize", f"vllm:{self}", rule)
        return width // 2 + 4

    def turned(self, states: Tensor) -> Tensor:
        """Queries, keys or values ``[…, D]`` with other signs, and rotated by the largest power of two in D."""
        size = _power_of_two(states.shape[-1])
        blocks = torch.unflatten(states, -1, (-1, size))
        return rotated(blocks * _signs(size).to(states)).flatten(-2)

    def turned_back(self, states: Tensor) -> Tensor:
        """Undo `turned` for sums of values ``[…, D]``."""
        size = _power_of_two(states.shape[-1])
        return (rotated(torch.unflatten(states, -1, (-1, size))) * _signs(size).to(states)).flatten(-2)

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of turned states ``[…, D]``; a row with a number that is not finite is read as NaN."""
        self.token_bytes(turned.shape[-1])
        longer = turned * math.sqrt(_power_of_two(turned.shape[-1]))  # vLLM's rotation makes numbers longer by this
        least, most = longer.amin(-1, keepdim=True), longer.amax(-1, keepdim=True)
        scale = ((most - least) / 15).clamp_min(_LEAST_SCALE)
        zero = _away_from_zero(-least / scale).clamp(0, 15).nan_to_num(0.0)
        codes = _away_from_zero(longer * (1 / scale) + zero).clamp(0, 15).nan_to_num(0.0).to(torch.uint8)
        bits = scale.contiguous().view(torch.int32) & -16 | zero.to(torch.int32)
        return torch.cat((pack_bits(codes, 4), as_bytes(bits, torch.int32)), -1)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The turned states ``[…, width]`` that rows stand for, in float32."""
        bits = from_bytes(rows[..., width // 2 :], torch.int32)
        codes = unpack_bits(rows[..., : width // 2], 4, width).float()
        scale = (bits & -16).view(torch.float32) / math.sqrt(_power_of_two(width))
        return (codes - (bits & 15)) * scale

    @property
    def spread(self) -> Literal["range"]:
        """What the step of a head follows from: the range of its numbers."""
        return "range"


@dataclass(frozen=True)
class _TurboCode(EngineCode):
    """One side of TurboQuant's pair of codes.

    Attributes:
        bits: the bits of a code, 4 or 3.
        name: the name of the pair of codes for keys and values.
    """

    bits: int
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class TurboKeyCode(_TurboCode):
    """TurboQuant's keys: a Hadamard rotation, a float16 norm, and for each channel the nearest of a few levels.

    The levels are those that lose least of a normal distribution; those of a token are scaled to have its norm.
    """

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row.

        Raises:
            ArgumentError: the width of a head is no power of two, or less than 8.
        """
        if width < 8 or width & (width - 1):
            rule = f"needs heads whose width is a power of two from 8 on, and this model's have {width} channels"
            raise ArgumentError("quantize", f"vllm:{self}", rule)
        return packed_bytes(width, self.bits) + 2

    def turned(self, states: Tensor) -> Tensor:
        """Queries or keys ``[…, D]``, rotated."""
        self.token_bytes(states.shape[-1])
        return rotated(states)

    def turned_back(self, states: Tensor) -> Tensor:
        """Undo `turned`."""
        return rotated(states)

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of turned states ``[…, D]``; a row with a number that is not finite is read as no number."""
        norm = turned.norm(dim=-1, keepdim=True)
        levels = levels_of_normal(turned.shape[-1], self.bits).to(turned.device)
        unit = (turned / (norm + 1e-8)).contiguous()
        codes = torch.bucketize(unit, (levels[:-1] + levels[1:]) / 2, right=True)
        return torch.cat((pack_bits(codes.to(torch.uint8), self.bits), as_bytes(norm, torch.float16)), -1)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The turned states ``[…, width]`` that rows stand for, in float32."""
        end = packed_bytes(width, self.bits)
        levels = levels_of_normal(width, self.bits).to(rows.device)
        guess = levels[unpack_bits(rows[..., :end], self.bits, width).long()]
        scale = 1 / (guess.square().sum(-1, keepdim=True) + 1e-16).sqrt()
        return from_bytes(rows[..., end:], torch.float16).float() * (guess * scale)

    @property
    def spread(self) -> None:
        """What the step of a head follows from: its norm."""
        return None

    def steps(self, turned: Tensor) -> Tensor:
        """How far apart a head's codes lie, ``[…, 1]``, but for a factor."""
        return (turned.square().sum(-1, keepdim=True) + 1e-30).sqrt()


@dataclass(frozen=True)
class TurboValueCode(_TurboCode):
    """TurboQuant's values: integers with a float16 scale and a float16 zero point for each token and head."""

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row."""
        return packed_bytes(width, self.bits) + 4

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of states ``[…, D]``; a row with a number that is not finite is read as NaN."""
        least, most = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
        levels = 2**self.bits - 1
        scale = ((most - least) / levels).clamp_min(1e-8)
        codes = ((turned - least) / scale + 0.5).nan_to_num(0.0).clamp(0, levels).to(torch.uint8)
        parts = as_bytes(scale, torch.float16), as_bytes(least, torch.float16)
        return torch.cat((pack_bits(codes, self.bits), *parts), -1)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, in float32."""
        end = packed_bytes(width, self.bits)
        scale, least = from_bytes(rows[..., end:], torch.float16).float().chunk(2, -1)
        return unpack_bits(rows[..., :end], self.bits, width).float() * scale + least

    @property
    def spread(self) -> Literal["range"]:
        """What the step of a head follows from: the range of its numbers."""
        return "range"


@lru_cache
def levels_of_normal(width: int, bits: int) -> Tensor:
    """The levels that lose least of numbers of variance 1 / ``width`` of a normal distribution, float32 ``[2^bits]``.

    Lloyd's and Max's conditions, solved as vLLM solves them: from even levels on, with integrals by trapezoids.

    Args:
        width: D.
        bits: the bits of a code.
    """
    spread = torch.tensor(width, dtype=torch.float64) ** -0.5
    count, pieces = 2**bits, 200
    places = torch.arange(pieces + 1, dtype=torch.float64) / pieces
    ends = 3.5 * spread * torch.tensor([-1.0, 1.0], dtype=torch.float64)
    levels: Tensor = ends[0] + (ends[1] - ends[0]) * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for _ in range(200):
        edges = torch.cat((3 * ends[:1], (levels[:-1] + levels[1:]) / 2, 3 * ends[1:]))
        points = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * places
        density = (-0.5 * (points / spread).square()).exp()
        better = torch.trapezoid(points * density) / torch.trapezoid(density)
        if (better - levels).abs().max() < 1e-10:
            break
        levels = better
    return levels.float()


@lru_cache
def _signs(width: int) -> Tensor:
    """Signs of channels, ±1 in float32 ``[width]``, which are the same for every head and model."""
    generator = torch.Generator().manual_seed(_SIGNS)
    return 2 * torch.bernoulli(torch.full((width,), 0.5), generator=generator) - 1


def _power_of_two(width: int) -> int:
    """The largest power of two that divides a width."""
    return width & -width


def _away_from_zero(values: Tensor) -> Tensor:
    """The nearest integers; of two equally near, the one farther from zero."""
    return (values + torch.where(values >= 0, 0.5, -0.5)).trunc()
