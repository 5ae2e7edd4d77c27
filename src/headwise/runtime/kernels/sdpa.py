"""The backend of `attend` that calls torch's ``scaled_dot_product_attention``.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.runtime.kernels.mask import as_bool_mask

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
