"""Grouped attention without expanding keys and values: a group's query heads become more queries.

A group of G query heads reads the same keys, so ``[B, K·G, S, D]`` queries are ``[B, K, G·S, D]`` queries of K
heads and the product reads each key once. For decoding (S = 1), where the time is that of reading the cache.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.reference import masked_softmax


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """As `headwise.kernels.reference.attend_reference`, in plain torch, K and V read in place.

    Scores of all pairs are held at once: ``B·H·S·T`` values, small for few queries.
    """
    B, H, S, D = query.shape
    K, T = key.shape[1], key.shape[2]
    folded = (query * scale).reshape(B, K, H // K * S, D)
    scores = (folded @ key.transpose(-1, -2)).view(B, H, S, T)
    weights = masked_softmax(scores, mask)
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0)
    out = weights.view(B, K, H // K * S, T) @ value
    return out.view(B, H, S, value.shape[-1]), weights
