"""Trellis codes: of each value a few bits, whose level also depends on the bits before them.

A code of b bits is appended to the stream of a token's codes. The last eight bits of the stream, its window, say
which of 256 levels the value has. Neighbouring values share bits, so that the codes of a token are chosen together,
by Viterbi's algorithm, and the error is a third smaller than that of the best levels for each value by itself.

Source: M. W. Marcellin and T. R. Fischer, "Trellis coded quantization" (1990); the windows are those of QTIP
(A. Tseng et al., arXiv:2406.11235), here with tables of 256 trained levels.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files

import torch
from torch import Tensor

from headwise.runtime.kernels.gpu import encode_windows, why_not_plain
from headwise.runtime.kernels.native.build import are_plain
from headwise.runtime.kernels.native.calls import can_encode, trellis_encode

UNIT = 1 / 32
"""Levels are whole numbers of this unit, from −127 to 127, so that they fit in int8 and bfloat16."""

NOISE = (0.0, 0.289, 0.081, 0.022, 0.0062, 0.0018, 0.0006, 0.0003, 0.00009)
"""The mean squared error of values of variance 1, of a normal distribution, by the number of bits."""

REACH = (0.0, 1.5, 2.4, 3.0, 3.2, 3.45, 3.5, 3.6, 3.97)
"""The size beyond which a single value's error is mostly its distance from this size, by the number of bits."""

_WINDOW = 8
_ROWS, _ROWS_OF_A_GPU = 256, 16_384
"""The rows that are encoded at a time without the compiled kernel, whose memory is 100 bytes a value. On a GPU,
starting an operation takes as long as hundreds of rows."""


@lru_cache
def tables(device: torch.device | None = None) -> Tensor:
    """The levels of every window that ends with a code of so many bits: float32 ``[9, 256]``.

    They are trained for values of variance 1 of a normal distribution. ``tables()[4]`` has those of 4 bits.

    They are multiples of `UNIT` by small integers, so that kernels may multiply them in int8 or bfloat16 without
    rounding.

    Args:
        device: the device of the result; the CPU when None.
    """
    numbers = json.loads((files("headwise.runtime.quantization") / "trellis_levels.json").read_text())
    rows = [[0] * 256, *(numbers[str(bits)] for bits in range(1, 8)), list(range(-128, 128))]
    return torch.tensor(rows, device=device).clamp(-127, 127).float() * UNIT


def encode(
    values: Tensor,
    weights: Tensor,
    bits: Tensor,
    starts: Tensor,
    gains: Tensor | None = None,
    *,
    codes: Tensor | None = None,
    pack: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Choose the codes of rows of values of variance about 1, each row's together.

    For example ``encode(values, torch.ones(64), bits, starts)`` for values ``[10, 64]``.

    Args:
        values: float32 ``[n, W]``.
        weights: float32 ``[W]``, of squared errors.
        bits: uint8 ``[W]``, 1 to 8.
        starts: uint8 ``[n]``, the window before a row's first code.
        gains: float32 ``[n, W]``, factors of a value's error; 1 when None.
        codes: uint8 ``[n, bytes]`` of zeros, rows to write the codes to; new ones when None.
        pack: whether codes are returned besides levels.

    Returns:
        The levels, float32 ``[n, W]``; and the codes, uint8 ``[n, bytes]``, the highest bit of a byte first, or None.
    """
    if pack and codes is None:
        codes = values.new_zeros(len(values), -(-int(bits.sum()) // 8), dtype=torch.uint8)
    if can_encode() and are_plain(values, weights, bits, starts, gains, codes):
        return trellis_encode(values, weights, bits, tables(), starts, gains=gains, codes=codes), codes
    squares = weights.expand_as(values) if gains is None else weights * gains.square()
    if values.is_cuda and why_not_plain(values, squares, bits, starts) is None:
        windows = encode_windows(values, squares, bits, tables(values.device), starts)
    else:
        windows = _windows_in_torch(values, squares, starts, bits)
    levels = tables(values.device)[bits.long(), windows.long()]
    return levels, None if codes is None else codes.copy_(_packed(windows, bits, codes.shape[1]))


def _windows_in_torch(values: Tensor, squares: Tensor, starts: Tensor, bits: Tensor) -> Tensor:
    """The windows of the best path of each row, int64 ``[n, W]``."""
    pieces = zip(
        *(torch.split(rows, _ROWS if values.is_cpu else _ROWS_OF_A_GPU) for rows in (values, squares, starts)),
        strict=True,
    )
    return torch.cat([_encode(rows, costs, first, bits.tolist()) for rows, costs, first in pieces])


def decode(codes: Tensor, bits: Tensor, starts: Tensor) -> Tensor:
    """The levels that codes stand for, float32 ``[…, W]``; see `encode`.

    Args:
        codes: uint8 ``[…, bytes]``.
        bits: uint8 ``[W]``.
        starts: uint8 ``[…]``.
    """
    end = bits.long().cumsum(0) - 1  # the last bit of each code
    stream = torch.cat((starts[..., None], codes), -1).int()
    byte = end // 8 + 1
    windows = (stream[..., byte - 1] << 8 | stream[..., byte]) >> (7 - end % 8).int() & 255
    return tables(codes.device)[bits.long(), windows]


def _encode(values: Tensor, squares: Tensor, starts: Tensor, bits: list[int]) -> Tensor:
    """The windows of the best path, int64 ``[n, W]``."""
    n = len(values)
    cost = values.new_full((n, 256), 1e30)
    cost.scatter_(1, starts.long()[:, None], 0.0)
    table = tables(values.device)
    dropped: list[Tensor] = []
    for i, b in enumerate(bits):
        least, source = torch.unflatten(cost, 1, (2**b, -1)).min(1)  # [n, states]
        dropped.append(source.to(torch.uint8))
        error = (table[b] - values[:, i, None]).square() * squares[:, i, None]
        cost = least.repeat_interleave(2**b, 1) + error
    window = cost.argmin(1)
    windows = [window]
    for b, source in zip(reversed(bits[1:]), reversed(dropped[1:]), strict=True):
        state = window >> b
        window = source.gather(1, state[:, None])[:, 0].long() << (_WINDOW - b) | state
        windows.append(window)
    return torch.stack(windows[::-1], 1)


def _packed(windows: Tensor, bits: Tensor, size: int) -> Tensor:
    """The bytes ``[n, size]`` of the codes that windows end with."""
    end = bits.long().cumsum(0)
    place = torch.arange(8 * size, device=windows.device)
    owner = torch.searchsorted(end, place, right=True).clamp_max(len(bits) - 1)  # the code that each bit belongs to
    bit = (windows[:, owner] >> (end[owner] - 1 - place).clamp_min(0)) & 1
    bit = torch.where(place < end[-1], bit, 0)
    weights = 1 << torch.arange(7, -1, -1, device=windows.device)
    return (torch.unflatten(bit, 1, (-1, 8)) * weights).sum(-1).to(torch.uint8)
