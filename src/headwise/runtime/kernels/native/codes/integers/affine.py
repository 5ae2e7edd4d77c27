"""Call the compiled kernel of attention to keys and values in integer codes, ``affine.cpp``.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, N tokens in codes, D head dim, V value
dim.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import mask_strides
from headwise.runtime.kernels.native.build import TYPES, built

# `AffineArguments` of affine.cpp: `Arguments` of sight.h, two times four sizes, two sizes, the scales of blocks, two
# pointers, two times three strides.
_ARGUMENTS = struct.Struct("@7P7q 6q6q6q 4q 3q d 4q4q 2q P3q 2P6q")


@dataclass(frozen=True, eq=False)
class AffineRows:
    """Keys or values as rows of integer codes, the lowest bit of a byte first; a code of 8 bits stands for itself.

    Attributes:
        rows: uint8 ``[B, K, N, bytes]``, of each token the codes, and then the scales and the zero points of its
            groups of channels in float16.
        width: D or V.
        bits: of a code, 1 to 8.
        groups: the number of groups, each of as many channels: several only of a multiple of 16; 0 for keys without
            scales in their rows.
    """

    rows: Tensor
    width: int
    bits: int
    groups: int

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return -(-self.width * self.bits // 8)


@dataclass(frozen=True, eq=False)
class KeyBlocks:
    """Scales of keys for each channel and block of tokens.

    Attributes:
        scales: float16 ``[B, K, N / tokens, 2 · D]``, scales and then zero points.
        tokens: of a block, a multiple of 16.
    """

    scales: Tensor
    tokens: int


def attend_affine(
    query: Tensor,
    key: AffineRows,
    value: AffineRows,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    *,
    blocks: KeyBlocks | None = None,
    late: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `headwise.attend` with keys and values that are read as they are stored.

    Args:
        query: ``[B, H, S, D]``.
        key: the keys of the first N tokens.
        value: their values.
        mask: bool, broadcastable to ``[B, H, S, T]``, True where a query attends.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.
        blocks: scales of the keys; None where they are in their rows.
        late: keys ``[B, K, T - N, D]`` and values ``[B, K, T - N, V]`` of the other tokens, of the query's dtype.

    Returns:
        ``[B, H, S, V]``, in memory ``[B, S, H, V]``; zeros where a query sees nothing.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    library = built().library
    assert library is not None
    B, H, S, D = query.shape
    K, N = key.rows.shape[1:3]
    T = N if late is None else N + late[0].shape[2]
    query, keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key.rows, value.rows))
    out = query.new_empty(B, S, H, value.width).transpose(1, 2)
    if out.numel() == 0:
        return out
    scales = None if blocks is None else blocks.scales.contiguous()
    late_pointers: tuple[int, int] = (0, 0)
    late_strides: tuple[int, ...] = (0,) * 6
    if late is not None:
        late_keys, late_values = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in late)
        late_pointers = late_keys.data_ptr(), late_values.data_ptr()
        late_strides = (*late_keys.stride()[:3], *late_values.stride()[:3])
    arguments = _ARGUMENTS.pack(
        *(query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()),
        *(0 if mask is None else mask.data_ptr(), 0, 0),
        *(B, K, H // K, S, T, D, value.width),
        *query.stride()[:3],
        *out.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        *(0,) * 6,
        *mask_strides(mask),
        *(is_causal, 0, torch.get_num_threads()),
        scale,
        *_about(key),
        *_about(value),
        *(N, 0 if blocks is None else blocks.tokens),
        *((0,) * 4 if scales is None else (scales.data_ptr(), *scales.stride()[:3])),
        *late_pointers,
        *late_strides,
    )
    status = library.headwise_affine(arguments, TYPES[query.dtype])
    if status == 1:
        raise MemoryError("no memory to attend in")
    assert status == 0
    return out


def _about(rows: AffineRows) -> tuple[int, int, int, int]:
    """`AffineRows` of affine.cpp."""
    return rows.bits, rows.width // max(rows.groups, 1), rows.groups, rows.code_bytes
