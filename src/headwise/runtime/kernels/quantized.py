"""int8 keys and values with a scale for each token and head: a quarter of the bytes of float32, half of bfloat16.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels.attend import attend, check_shapes, check_window
from headwise.runtime.kernels.mask import Scoring, as_bool_mask
from headwise.runtime.kernels.native import are_plain, attend_fused, why_not

_LEVELS = 127


def quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise keys or values to int8; the largest magnitude of a token and head becomes ±127.

    For example ``codes, scales = quantize(torch.randn(1, 2, 100, 64))``.

    With an infinity or NaN, the scale of its token and head is not finite, and they are dequantised to NaN.

    Args:
        states: ``[B, K, T, D]``.

    Returns:
        int8 codes ``[B, K, T, D]`` and float32 scales ``[B, K, T]``.
    """
    wide = states.float()
    scale = wide.abs().amax(-1) / _LEVELS
    codes = (wide / scale[..., None]).round().nan_to_num(0.0)  # a token of zeros has scale 0
    return codes.to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Recover keys or values from codes and scales, within half a scale.

    For example ``dequantize(*quantize(keys), torch.float32)``.

    Args:
        codes: int8 ``[B, K, T, D]``.
        scale: float32 ``[B, K, T]``.
        dtype: the dtype of the result.

    Returns:
        ``[B, K, T, D]``.
    """
    return (codes.float() * scale[..., None]).to(dtype)


def pack(states: Tensor) -> Tensor:
    """Quantise keys or values to one tensor with codes and scales, so that a cache that moves tokens moves both.

    For example ``pack(torch.randn(1, 2, 100, 64)).shape`` is ``(1, 2, 100, 68)``.

    Args:
        states: ``[B, K, T, D]``.

    Returns:
        int8 ``[B, K, T, D + 4]``, each token's codes followed by the bytes of its scale.

    Raises:
        ArgumentError: D is not a multiple of 4, so that scales would not be aligned.
    """
    if states.shape[-1] % 4:
        raise ArgumentError("head_dim", states.shape[-1], "must be a multiple of 4 for an int8 cache")
    codes, scale = quantize(states)
    return torch.cat((codes, scale[..., None].view(torch.int8)), dim=-1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[B, K, T, D]`` and scales ``[B, K, T]`` as views of a tensor from `pack`.

    For example ``codes, scales = unpack(pack(keys))``.
    """
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
    """Compute `headwise.attend` with quantised keys and values, which the fused kernel reads without a wider copy.

    For example ``attend_quantized(query, quantize(key), quantize(value), is_causal=True)``.

    Args:
        query: ``[B, H, S, D]``.
        key: codes ``[B, K, T, D]`` and scales ``[B, K, T]``.
        value: codes ``[B, K, T, V]`` and scales.
        attn_mask: the mask of `headwise.attend`.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores; ``1/sqrt(D)`` when None.
        window: the number of latest keys that a query sees, with ``is_causal``; all when None.

    Returns:
        ``[B, H, S, V]``.

    Raises:
        ArgumentError: shapes do not fit together, or codes are not int8 with a float32 scale for each token and head.
    """
    for name, (codes, scales) in (("key", key), ("value", value)):
        if codes.dtype != torch.int8:
            raise ArgumentError(f"{name} codes", codes.dtype, "must be int8")
        if scales.dtype != torch.float32 or scales.shape != codes.shape[:3]:
            description = f"{scales.dtype} {list(scales.shape)}"
            raise ArgumentError(f"{name} scales", description, f"must be torch.float32 {list(codes.shape[:3])}")
    check_shapes(query, key[0], value[0])
    check_window(window, is_causal)
    needs_grad = torch.is_grad_enabled() and query.requires_grad
    can_fuse = why_not(query.dtype, query.device, needs_grad=needs_grad) is None
    if not can_fuse or not are_plain(query, *key, *value, attn_mask):
        # Where the kernel does not run, such as on a GPU or with gradients, everything is decoded first.
        keys, values = (dequantize(*states, query.dtype) for states in (key, value))
        return attend(query, keys, values, attn_mask, is_causal=is_causal, scale=scale, window=window)
    B, H, S, D = query.shape
    T = key[0].shape[2]
    mask = None if attn_mask is None else as_bool_mask(attn_mask, (B, H, S, T))
    scoring = Scoring(mask, is_causal, D**-0.5 if scale is None else scale, window)
    return attend_fused(query, key[0], value[0], scoring, key_scale=key[1], value_scale=value[1])
