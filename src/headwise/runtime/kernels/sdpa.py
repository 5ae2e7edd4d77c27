"""The backend of `attend` that calls torch's ``scaled_dot_product_attention``.

Grouped attention repeats no keys and values. The G query heads of a group read the same keys, so ``[B, K·G, S, D]``
queries become ``[B, K, G·S, D]`` queries of K heads, and the product reads each key once. This is for decoding (S =
1), where reading the cache takes most of the time.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.runtime.kernels.mask import as_bool_mask
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


def attend_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Compute `headwise.attend` by torch's kernels; the arguments are the same, already checked.

    Returns:
        ``[B, H, S, V]``.
    """
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
