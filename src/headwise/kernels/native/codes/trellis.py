"""Trellis codes of rows of values, by Viterbi's algorithm."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from headwise.kernels.native.build import built

# `TrellisArguments` of trellis.cpp: eight pointers, three sizes, threads.
_ARGUMENTS = struct.Struct("@8P3qq")


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
