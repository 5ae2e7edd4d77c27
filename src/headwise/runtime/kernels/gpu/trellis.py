"""Call the Triton kernel that chooses trellis codes."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.runtime.kernels.gpu.split import on_device_of

_MEMORY = 2**27
"""Bytes of predecessors of the tokens that are coded at a time; each has 128 a value."""


def encode_windows(values: Tensor, squares: Tensor, bits: Tensor, tables: Tensor, starts: Tensor) -> Tensor:
    """The windows of the best path of each row: uint8 ``[n, W]``.

    Each row is a program that takes W steps, one after another. `headwise.runtime.kernels.gpu.why_not_plain` returns
    None for the tensors.

    Args:
        values: float32 ``[n, W]``.
        squares: float32 ``[n, W]``, the cost of a squared error of each value.
        bits: uint8 ``[W]``, 1 to 8.
        tables: float32 ``[9, 256]``, the levels of windows by the number of bits.
        starts: uint8 ``[n]``, the window before a row's first code.
    """
    from headwise.runtime.kernels.gpu.kernels import walk_trellis

    n, W = values.shape
    windows = torch.empty(n, W, dtype=torch.uint8, device=values.device)
    rows = max(1, _MEMORY // (128 * W))
    sources = torch.empty(min(n, rows), W, 128, dtype=torch.uint8, device=values.device)
    values, squares, starts = values.contiguous(), squares.contiguous(), starts.contiguous()
    with on_device_of(values):
        for begin in range(0, n, rows):
            part = slice(begin, begin + rows)
            given = (values[part], squares[part], bits, tables, starts[part], sources, windows[part])
            walk_trellis[(len(values[part]),)](*given, W, num_warps=1)
    return windows
