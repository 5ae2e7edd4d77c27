"""Trellis codes of rows of values, by Viterbi's algorithm, and the gains of their tokens."""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
from torch import Tensor

from headwise.runtime.kernels.native.build import built

# `TrellisArguments` of trellis.cpp: eight pointers, three sizes, threads.
_ARGUMENTS = struct.Struct("@8P3qq")
# `GainsArguments` of gains.cpp: ten pointers, five numbers, threads, a step.
_GAINS_ARGUMENTS = struct.Struct("@10P5qqd")


def can_encode() -> bool:
    """Whether the kernels could be compiled."""
    return built().library is not None


def trellis_encode(
    values: Tensor,
    weights: Tensor,
    bits: Tensor,
    tables: Tensor,
    starts: Tensor,
    *,
    gains: Tensor | None = None,
    codes: Tensor | None = None,
) -> Tensor:
    """Choose the codes of rows of values, each row's together.

    Args:
        values: float32 ``[n, W]``.
        weights: float32 ``[W]``, of squared errors.
        bits: uint8 ``[W]``, 1 to 8.
        tables: float32 ``[9, 256]``, the levels of windows of eight bits that end with a code of so many bits.
        starts: uint8 ``[n]``, the byte of the stream before a row's codes.
        gains: float32 ``[n, W]``, factors of a value's error; 1 when None.
        codes: uint8 ``[n, bytes]`` of zeros, rows whose codes are written.

    Returns:
        The levels that were chosen, float32 ``[n, W]``.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    library = built().library
    assert library is not None
    values, weights, tables = values.contiguous(), weights.contiguous(), tables.contiguous()
    gains = None if gains is None else gains.contiguous()
    levels = torch.empty_like(values)
    rows, width = values.shape
    arguments = _ARGUMENTS.pack(
        *(values.data_ptr(), 0 if gains is None else gains.data_ptr(), weights.data_ptr(), bits.data_ptr()),
        *(tables.data_ptr(), starts.data_ptr(), 0 if codes is None else codes.data_ptr(), levels.data_ptr()),
        *(rows, width, 0 if codes is None else codes.stride(0)),
        torch.get_num_threads(),
    )
    if library.headwise_trellis(arguments):
        raise MemoryError("no memory to encode in")
    return levels


def choose_gains(
    values: Tensor,
    channels: tuple[Tensor, Tensor, Tensor, Tensor],
    parts: tuple[int, ...],
    gains: Tensor,
    *,
    tried: int,
    zero: int,
    step: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the gain of each part of some tokens.

    Args:
        values: float32 ``[n, W]``.
        channels: offset, scale, noise and reach of each channel, float32 ``[W]``.
        parts: the widths of the parts with a gain of their own; two at most, which add up to W.
        gains: float32 ``[16]``, of each number.
        tried: how many numbers are tried, from that of the root mean square on.
        zero: the number of the gain 1.
        step: the factor between neighbouring gains.

    Returns:
        Values over scales and gains, and the gains, each ``[n, W]``; a byte a token: the numbers of its gains.
    """
    library = built().library
    assert library is not None
    inputs = tuple(tensor.contiguous() for tensor in (values, *channels, gains))
    assert all(tensor.dtype == torch.float32 for tensor in inputs)
    normal, of_channel = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    starts = values.new_empty(len(values), dtype=torch.uint8)
    widths = _widths(parts)
    arguments = _GAINS_ARGUMENTS.pack(
        *(tensor.data_ptr() for tensor in (*inputs, widths, starts, normal, of_channel)),
        *(*values.shape, len(parts), tried, zero),
        torch.get_num_threads(),
        step,
    )
    library.headwise_gains(arguments)
    return normal, of_channel, starts


@lru_cache
def _widths(parts: tuple[int, ...]) -> Tensor:
    return torch.tensor(parts, dtype=torch.int64, device="cpu")
