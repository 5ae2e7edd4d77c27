"""Grouped attention without repeating keys and values: the query heads of a group become more queries of one head.

The G query heads of a group read the same keys, so ``[B, K·G, S, D]`` queries become ``[B, K, G·S, D]`` queries of K
heads, and the product reads each key once. This is for decoding (S = 1), where reading the cache takes most of the
time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
