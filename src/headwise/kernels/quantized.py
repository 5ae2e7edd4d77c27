"""Keys and values in int8 with a scale for each token and head: a quarter of float32's bytes, half of bfloat16's.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels.attend import attend, check_shapes, check_window
from headwise.kernels.mask import as_bool_mask
from headwise.kernels.native import are_plain, attend_fused, why_not

_LEVELS = 127


def quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes ``[B, K, T, D]`` and float32 scales ``[B, K, T]``; a token's largest number becomes ±127.

    An infinity or NaN makes the scale of its token and head so, and all its numbers come back as NaN.
    """
    wide = states.float()
    scale = wide.abs().amax(-1) / _LEVELS
    codes = (wide / scale[..., None]).round().nan_to_num(0.0)  # a token of zeros has scale 0
    return codes.to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, K, T, D]`` numbers from codes and scales, within half a scale of those that were quantised."""
    return (codes.float() * scale[..., None]).to(dtype)


def pack(states: Tensor) -> Tensor:
    """Quantise, with codes and scales side by side, ``[B, K, T, D + 4]`` int8: a cache that moves tokens moves both.

    Raises:
        ArgumentError: D is not a multiple of 4, so that scales would not be aligned.
    """
    if states.shape[-1] % 4:
        raise ArgumentError("head_dim", states.shape[-1], "must be a multiple of 4 for an int8 cache")
    codes, scale = quantize(states)
    return torch.cat((codes, scale[..., None].view(torch.int8)), dim=-1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[B, K, T, D]`` and scales ``[B, K, T]`` from a result of `pack`, as views."""
    return packed[..., :-4], packed[..., -4:].view(torch.float32)[..., 0]


def attend_quantized(
    query: Tensor,
    key: tuple[Tensor, Tensor],
    value: tuple[Tensor, Tensor],
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    window: int | None = None,
) -> Tensor:
    """`headwise.attend` to quantised keys and values, which the fused kernel reads without widening them in memory.

    Args:
        query: ``[B, H, S, D]``.
        key: codes ``[B, K, T, D]`` and scales ``[B, K, T]``.
        value: codes ``[B, K, T, V]`` and scales.
        attn_mask: as `headwise.attend`.
        is_causal: bottom-right.
        scale: multiplies the scores; ``1/sqrt(D)`` when None.
        window: with ``is_causal``, how many of the latest keys a query sees.

    Returns:
        ``[B, H, S, V]``.

    Raises:
        ArgumentError: shapes do not fit together, or codes are not int8 with a float32 scale for each token and head.
    """
    for name, (codes, scales) in (("key", key), ("value", value)):
        if codes.dtype != torch.int8:
            raise ArgumentError(f"{name} codes", codes.dtype, "must be int8")
        if scales.dtype != torch.float32 or scales.shape != codes.shape[:3]:
            held = f"{scales.dtype} {list(scales.shape)}"
            raise ArgumentError(f"{name} scales", held, f"must be torch.float32 {list(codes.shape[:3])}")
    check_shapes(query, key[0], value[0])
    check_window(window, is_causal)
    needs_grad = torch.is_grad_enabled() and query.requires_grad
    can_fuse = why_not(query.dtype, query.device, needs_grad=needs_grad) is None
    if not can_fuse or not are_plain(query, *key, *value, attn_mask):
        keys, values = (dequantize(*states, query.dtype) for states in (key, value))
        return attend(query, keys, values, attn_mask, is_causal=is_causal, scale=scale, window=window)
    B, H, S, D = query.shape
    T = key[0].shape[2]
    mask = None if attn_mask is None else as_bool_mask(attn_mask, (B, H, S, T))
    return attend_fused(
        *(query, key[0], value[0], mask, is_causal, window, D**-0.5 if scale is None else scale),
        key_scale=key[1],
        value_scale=value[1],
    )
