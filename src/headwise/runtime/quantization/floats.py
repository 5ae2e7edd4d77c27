"""Engines' caches of small floats: vLLM's and SGLang's fp8, and SGLang's fp4.

Source: vLLM 0.32.0 (``triton_reshape_and_cache_flash.py``, ``attention.py``) and SGLang 0.5.23 (``memory_pool.py``,
``flashattention_backend.py``, ``kvfp4_tensor.py``), read in 2026-11. Scales of a tensor are 1, as both have them
where a checkpoint brings none. Both round the queries of an fp8 cache too: vLLM's FlashAttention and Triton backends
on CUDA, and SGLang's FlashAttention. They then round the softmax's weights as well, which is not done here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.runtime.quantization.engine_code import EngineCode, whole_groups
from headwise.runtime.quantization.groups import Float8Code, pack_bits, unpack_bits

BLOCK = 16
"""Channels of a block of fp4."""

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
        rounds_queries: whether queries are rounded alike.
        name: by which the engine knows it.
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

    def steps(self, turned: Tensor) -> Tensor:
        """How far apart the codes of each block lie, ``[…, D / 16]``, but for a factor."""
        return torch.unflatten(turned, -1, (-1, BLOCK)).abs().amax(-1)
