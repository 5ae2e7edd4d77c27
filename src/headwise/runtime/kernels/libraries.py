"""Kernels of other libraries behind `attend`: torch's FlexAttention, and flash-attn where it is installed.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

FLASH_WIDEST = 256
"""The widest heads that FlashAttention takes, torch's copy of it too."""
_FLASH_CAPABILITY = (8, 0)
"""The first GPUs that torch's copy runs on."""


def why_not_flash(
    dtype: torch.dtype, device: torch.device, width: int, value_width: int, *, has_mask: bool = False
) -> str | None:
    """The reason why flash-attn does not support such tensors, or None if it does.

    Args:
        dtype: the dtype of queries, keys and values.
        device: the device of the tensors.
        width: D, the head dim.
        value_width: V, the value dim.
        has_mask: whether there is a mask besides the causal one.
    """
    if not has_flash():
        return "flash-attn is not installed"
    if device.type != "cuda":
        return f"it is for CUDA GPUs, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {dtype}"
    if width > FLASH_WIDEST or width != value_width:
        return f"heads are {width} and {value_width} wide, and it takes one width up to {FLASH_WIDEST}"
    return "it takes no masks" if has_mask else None


@cache
def has_flash() -> bool:
    """Whether flash-attn can be imported."""
    return importlib.util.find_spec("flash_attn") is not None


def has_flash_in_torch(device: torch.device) -> bool:
    """Whether torch's SDPA computes grouped heads by FlashAttention on a GPU, and is allowed to."""
    is_allowed: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return is_allowed and _capability(device) >= _FLASH_CAPABILITY


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, window: int | None, scale: float, dropout_p: float
) -> Tensor:
    """Compute `headwise.attend` by flash-attn, whose causal mask is bottom-right too.

    The tensors must be supported: `why_not_flash` returns None for them.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, D]``.
        is_causal: apply the bottom-right causal mask.
        window: the number of latest keys that a query sees.
        scale: multiplies the scores.
        dropout_p: probability of dropping an attention weight.

    Returns:
        ``[B, H, S, D]``.
    """
    function: Any = importlib.import_module("flash_attn").flash_attn_func
    out: Tensor = function(
        *(x.transpose(1, 2) for x in (query, key, value)),  # [B, S or T, heads, D]
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return out.transpose(1, 2)


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, window: int | None, scale: float
) -> Tensor:
    """Compute `headwise.attend` by torch's FlexAttention, which skips blocks that no query sees; compiled on a GPU.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        mask: bool, broadcastable to ``[B, H, S, T]``.
        is_causal: apply the bottom-right causal mask.
        window: the number of latest keys that a query sees.
        scale: multiplies the scores.

    Returns:
        ``[B, H, S, V]``.
    """
    from torch.nn.attention.flex_attention import flex_attention  # imports torch's compiler, which takes seconds

    S, T = query.shape[2], key.shape[2]
    block_mask = None
    if mask is not None:
        block_mask = _block_mask(S, T, is_causal, window, query.device, mask)
    elif is_causal and (S > 1 or window is not None):
        block_mask = causal_block_mask(S, T, window, query.device)
    function: Any = _compiled() if query.device.type == "cuda" else flex_attention
    out: Tensor = function(
        query, key, value, block_mask=block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@lru_cache(maxsize=64)
def causal_block_mask(S: int, T: int, window: int | None, device: torch.device) -> Any:
    """FlexAttention's block mask for a bottom-right causal window; cached, because all layers use the same mask.

    Args:
        S: new tokens.
        T: all tokens.
        window: the number of latest keys that a query sees; all when None.
        device: the device of the mask.
    """
    return _block_mask(S, T, True, window, device, None)


def _block_mask(
    S: int, T: int, is_causal: bool, window: int | None, device: torch.device, mask: Tensor | None
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads = (None, None) if mask is None else (n if n > 1 else None for n in mask.shape[:2])
    full = None if mask is None else mask.expand(-1, -1, S, T)

    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        position = q + (T - S)
        visible = k <= position if is_causal else k >= 0
        if window is not None:
            visible = visible & (k > position - window)
        if full is not None:
            visible = visible & full[b if batch else 0, h if heads else 0, q, k]
        return visible

    return create_block_mask(attends, batch, heads, S, T, device=str(device))
