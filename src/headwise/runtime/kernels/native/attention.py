"""Call the compiled attention kernel, ``attention.cpp``.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import mask_strides
from headwise.runtime.kernels.native.abi import FusedArguments
from headwise.runtime.kernels.native.build import call


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
    B, H, S, D = query.shape
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    query, key, value = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (query, key, value))
    out = query.new_empty(B, S, H, V).transpose(1, 2)
    if out.numel() == 0:
        return out
    arguments = FusedArguments(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        out=out.data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        B=B,
        K=K,
        G=H // K,
        S=S,
        T=T,
        D=D,
        V=V,
        causal=is_causal,
        window=window or 0,
        threads=torch.get_num_threads(),
        scale=scale,
    )
    arguments.query_stride[:], arguments.out_stride[:] = query.stride()[:3], out.stride()[:3]
    arguments.key_stride[:], arguments.value_stride[:] = key.stride()[:3], value.stride()[:3]
    arguments.mask_stride[:] = mask_strides(mask)
    if key_scale is not None and value_scale is not None:
        arguments.key_scale, arguments.value_scale = key_scale.data_ptr(), value_scale.data_ptr()
        arguments.key_scale_stride[:], arguments.value_scale_stride[:] = key_scale.stride(), value_scale.stride()
    call("headwise_attention", arguments, query.dtype)
    return out
