"""Call the compiled attention kernels.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import mask_strides
from headwise.runtime.kernels.native.abi import KERNELS
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
    """Compute `headwise.attend` by ``attention.cpp``.

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
    own: dict[str, Any] = {"window": window or 0}
    if key_scale is not None and value_scale is not None:
        own |= {"key_scale": key_scale.data_ptr(), "key_scale_stride": key_scale.stride()}
        own |= {"value_scale": value_scale.data_ptr(), "value_scale_stride": value_scale.stride()}
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    return attend_stored("headwise_attention", (query, key, value), (K, T, V, V), mask, is_causal, scale, own)


def attend_stored(
    kernel: str,
    states: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, int, int, int],
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    own: dict[str, Any],
) -> Tensor:
    """Call a kernel of attention.

    Args:
        kernel: one of `headwise.runtime.kernels.native.abi.KERNELS`.
        states: queries ``[B, H, S, D]``, and what the kernel takes as keys and values.
        sizes: K, T, V and the numbers of a row of the result.
        mask: bool, broadcastable to ``[B, H, S, T]``.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.
        own: the arguments that not every kernel of attention has. The tensors whose addresses they hold have to keep
            a name until this returns.

    Returns:
        ``[B, H, S, …]``, in memory ``[B, S, H, …]``.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    query, key, value = map(dense, states)
    B, H, S, D = query.shape
    K, T, V, columns = sizes
    out = query.new_empty(B, S, H, columns).transpose(1, 2)
    if out.numel() == 0:
        return out
    arguments = KERNELS[kernel](
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        out=out.data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        causal=is_causal,
        scale=scale,
        B=B,
        K=K,
        G=H // K,
        S=S,
        T=T,
        D=D,
        V=V,
        threads=torch.get_num_threads(),
        **own,
    )
    arguments.query_stride[:], arguments.out_stride[:] = query.stride()[:3], out.stride()[:3]
    arguments.key_stride[:], arguments.value_stride[:] = key.stride()[:3], value.stride()[:3]
    arguments.mask_stride[:] = mask_strides(mask)
    call(kernel, arguments, query.dtype)
    return out


def dense(states: Tensor) -> Tensor:
    """The same ``[B, K, T, D]`` with a contiguous last dim; copied if need be."""
    return states if states.stride(3) == 1 or states.shape[3] == 1 else states.contiguous()
