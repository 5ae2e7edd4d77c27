"""Grouped attention without expanding keys and values: a group's query heads become more queries.

A group of G query heads reads the same keys, so ``[B, K·G, S, D]`` queries are ``[B, K, G·S, D]`` queries of K
heads and the product reads each key once. For decoding (S = 1), where the time is that of reading the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.reference import masked_softmax

FEW_TOKENS = 8
"""New tokens up to which folding the group into the queries pays; benchmarks/results/speed.json."""


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
    """As `headwise.kernels.reference.attend_reference`, K and V read in place; the weights only when asked for."""
    B, H, S, D = query.shape
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    group = H // K
    # SDPA on the CPU is slow in half precision with few queries, and has no blocked path for V ≠ D (`dispatch` in
    # benchmarks/speed.py); plain products then are the better way, at the price of all scores at once.
    if not return_weights and D == V and query.dtype.itemsize >= 4:
        folded = query.reshape(B, K, group * S, D)
        out = F.scaled_dot_product_attention(folded, key, value, _fold(mask, K, group, S), dropout_p, scale=scale)
        return out.view(B, H, S, V), None
    dtype = query.dtype
    if S > FEW_TOKENS:
        # Many scores would be rounded to the inputs' dtype; widening keys and values is then the lesser cost.
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    folded = (query * scale).reshape(B, K, group * S, D)
    scores = (folded @ key.transpose(-1, -2)).view(B, H, S, T)
    weights = masked_softmax(scores, mask)
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0)
    out = (weights.view(B, K, group * S, T) @ value).view(B, H, S, V).to(dtype)
    return out, weights.to(dtype) if return_weights else None


def _fold(mask: Tensor | None, K: int, group: int, S: int) -> Tensor | None:
    """A mask over ``[B, H, S, T]`` as one over ``[B, K, G·S, T]``."""
    if mask is None or mask.shape[1:3] == (1, 1):
        return mask
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, group, 1)
    return mask.expand(-1, -1, S, -1).reshape(mask.shape[0], K, group * S, mask.shape[3])
