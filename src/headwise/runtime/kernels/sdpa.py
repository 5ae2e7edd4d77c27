"""Backends of `attend` by libraries: torch's ``scaled_dot_product_attention`` and FlexAttention, and flash-attn.

Grouped attention repeats no keys and values. The G query heads of a group read the same keys, so ``[B, K·G, S, D]``
queries become ``[B, K, G·S, D]`` queries of K heads, and the product reads each key once. This is for decoding (S =
1), where reading the cache takes most of the time.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.runtime.kernels.mask import Scoring, as_bool_mask
from headwise.runtime.kernels.reference import masked_softmax

FEW_TOKENS = 8
"""The most new tokens for which folding is faster; measured in benchmarks/results/speed.json."""


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout_p: float,
    *,
    return_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute `headwise.attend` without copying keys and values for the heads of a group.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        mask: bool, broadcastable to ``[B, H, S, T]``.
        scale: multiplies the scores.
        dropout_p: probability of dropping a weight.
        return_weights: whether to return the weights.

    Returns:
        The output ``[B, H, S, V]``, and the weights ``[B, H, S, T]`` or None.
    """
    B, H, S, D = query.shape
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    group = H // K
    # SDPA on the CPU is slow in half precision with few queries, and has no blocked path for V ≠ D (`dispatch` in
    # benchmarks/speed.py), and on a GPU in float32. Plain products are faster then, although they keep all scores.
    if not return_weights and D == V and query.dtype.itemsize >= 4 and query.device.type != "cuda":
        folded = query.reshape(B, K, group * S, D)  # [B, K, G·S, D]
        out = F.scaled_dot_product_attention(folded, key, value, _fold(mask, K, group, S), dropout_p, scale=scale)
        return out.view(B, H, S, V), None
    dtype = query.dtype
    if S > FEW_TOKENS:
        # Otherwise all scores would be rounded to the inputs' dtype. With many queries, widening keys and values
        # costs little beside them.
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    folded = (query * scale).reshape(B, K, group * S, D)  # [B, K, G·S, D]
    scores = (folded @ key.transpose(-1, -2)).view(B, H, S, T)  # [B, K, G·S, T] → [B, H, S, T]
    weights = masked_softmax(scores, mask)
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0)
    out = (weights.view(B, K, group * S, T) @ value).view(B, H, S, V).to(dtype)  # [B, H, S, V]
    return out, weights.to(dtype) if return_weights else None


def _fold(mask: Tensor | None, K: int, group: int, S: int) -> Tensor | None:
    """Fold a mask for ``[B, H, S, T]`` into one for ``[B, K, G·S, T]``."""
    if mask is None or mask.shape[1:3] == (1, 1):
        return mask
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, group, 1)
    return mask.expand(-1, -1, S, -1).reshape(mask.shape[0], K, group * S, mask.shape[3])


_QUERIES = 512
"""Queries that share one mask."""


def attend_sdpa(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, dropout_p: float) -> Tensor:
    """Compute `headwise.attend` by torch's kernels; the arguments are the same, already checked.

    The mask may be any that `headwise.attend` takes.

    Returns:
        ``[B, H, S, V]``.
    """
    attn_mask, is_causal, scale, window = scoring
    B, H, S, _ = query.shape
    T = key.shape[2]
    # torch's blocked kernels for the CPU have no dropout and need equal widths of keys and values. Padding with
    # columns of zeros does not change the result, and takes a third to half the time of torch's other path, which
    # keeps all scores in memory.
    V = value.shape[3]
    width = max(query.shape[3], V) if query.device.type == "cpu" and not dropout_p else 0
    query, key, value = (x if x.shape[3] >= width else F.pad(x, (0, width - x.shape[3])) for x in (query, key, value))
    if S == 1 and window is not None and attn_mask is None:  # the one query sees all of the latest tokens
        key, value, T, window = key[:, :, -window:], value[:, :, -window:], min(T, window), None
    grouped = key.shape[1] != H
    # torch's causal flag is top-left, which is bottom-right only for S = T; with it, torch skips the masked half.
    flag = is_causal and attn_mask is None and S == T and window is None
    sees_all = attn_mask is None and (not is_causal or (S == 1 and window is None))
    if flag or sees_all:
        out = F.scaled_dot_product_attention(
            query, key, value, None, dropout_p, flag, scale=scale, enable_gqa=grouped
        )
        return out[..., :V]
    mask = None if attn_mask is None else as_bool_mask(attn_mask, (B, H, S, T))
    # A few queries at a time: a mask for all of them would be as large as their scores, and half of a causal mask
    # hides its keys anyway.
    parts = []
    for start in range(0, S, _QUERIES):
        rows = range(start, min(start + _QUERIES, S))
        # `visible` is [B or 1, H or 1, rows, tokens].
        visible, tokens = _visible(rows, mask, is_causal, window, S, T, query.device)
        states = query[:, :, rows.start : rows.stop], key[:, :, tokens], value[:, :, tokens]
        parts.append(  # [B, H, rows, width]
            F.scaled_dot_product_attention(*states, visible, dropout_p, scale=scale, enable_gqa=grouped)
        )
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))[..., :V]


def _visible(
    rows: range, mask: Tensor | None, is_causal: bool, window: int | None, S: int, T: int, device: torch.device
) -> tuple[Tensor | None, slice]:
    """A mask for the queries in ``rows``, and the range of tokens that any of them may see, its columns.

    The range has at least one token, because torch needs a key.
    """
    if mask is not None:
        mask = mask.expand(-1, -1, -1, T)
        mask = mask[:, :, rows.start : rows.stop] if mask.shape[2] > 1 else mask
    if not is_causal:
        return mask, slice(0, T)
    last = min(T, max(1, T - S + rows.stop))
    first = 0 if window is None else min(last - 1, max(0, T - S + rows.start - window + 1))
    at = torch.arange(T - S + rows.start, T - S + rows.stop, device=device)[:, None]  # [rows, 1]
    token = torch.arange(first, last, device=device)  # [tokens]
    visible = token <= at if window is None else (token <= at) & (token > at - window)  # [rows, tokens]
    return visible[None, None] if mask is None else mask[..., first:last] & visible, slice(first, last)


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


def attend_flash(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, dropout_p: float) -> Tensor:
    """Compute `headwise.attend` by flash-attn, whose causal mask is bottom-right too.

    The tensors must be supported: `why_not_flash` returns None for them.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, D]``.
        scoring: which tokens queries attend to, without a mask, and the factor of their scores.
        dropout_p: probability of dropping an attention weight.

    Returns:
        ``[B, H, S, D]``.
    """
    function: Any = importlib.import_module("flash_attn").flash_attn_func
    out: Tensor = function(
        *(x.transpose(1, 2) for x in (query, key, value)),  # [B, S or T, heads, D]
        dropout_p=dropout_p,
        softmax_scale=scoring.scale,
        causal=scoring.is_causal,
        window_size=(-1, -1) if scoring.window is None else (scoring.window - 1, 0),
    )
    return out.transpose(1, 2)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute `headwise.attend` by torch's FlexAttention, which skips blocks that no query sees; compiled on a GPU.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        scoring: which tokens queries attend to, and the factor of their scores.

    Returns:
        ``[B, H, S, V]``.
    """
    from torch.nn.attention.flex_attention import flex_attention  # imports torch's compiler, which takes seconds

    mask, is_causal, scale, window = scoring
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
