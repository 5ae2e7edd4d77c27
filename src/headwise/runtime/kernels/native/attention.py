"""Call the compiled attention kernel, ``attention.cpp``.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import mask_strides
from headwise.runtime.kernels.native.build import TYPES, built

# `Arguments` of mask.h: seven pointers, seven sizes, strides, the causal rule, threads, the scale.
_ARGUMENTS = struct.Struct("@7P7q 6q6q6q 4q 3q d")


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Compute `headwise.attend` by the compiled kernel.

    The tensors must be supported: `why_not` returns None for them.

    Args:
        query: ``[B, H, S, D]``, with any strides.
        key: ``[B, K, T, D]``; copied if the last dim is not contiguous.
        value: ``[B, K, T, V]``; copied if the last dim is not contiguous.
        mask: bool, broadcastable to ``[B, H, S, T]``; a key or value that no query sees is never read.
        is_causal: apply the bottom-right causal mask.
        window: the number of latest keys that a query sees.
        scale: multiplies the scores.
        key_scale: float32 ``[B, K, T]``, factors of int8 keys; None where keys are not int8.
        value_scale: float32 ``[B, K, T]``, factors of int8 values; required with ``key_scale``.

    Returns:
        ``[B, H, S, V]``, in memory ``[B, S, H, V]``, as the output projection reads it.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    library = built().library
    assert library is not None
    B, H, S, D = query.shape
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    query, key, value = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (query, key, value))
    out = query.new_empty(B, S, H, V).transpose(1, 2)
    if out.numel() == 0:
        return out
    mask_pointer = 0 if mask is None else mask.data_ptr()
    scale_strides: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    scale_pointers = (0, 0)
    if key_scale is not None and value_scale is not None:
        scale_strides = (*key_scale.stride(), *value_scale.stride())
        scale_pointers = (key_scale.data_ptr(), value_scale.data_ptr())
    arguments = _ARGUMENTS.pack(
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), mask_pointer, *scale_pointers),
        *(B, K, H // K, S, T, D, V),
        *query.stride()[:3],
        *out.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *scale_strides,
        *mask_strides(mask),
        *(is_causal, window or 0, torch.get_num_threads()),
        scale,
    )
    status = library.headwise_attention(arguments, TYPES[query.dtype], key_scale is not None)
    if status == 1:
        raise MemoryError("no memory to attend in")
    assert status == 0
    return out
