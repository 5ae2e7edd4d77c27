"""The definition of attention, in plain torch operations: every other backend is tested against it.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
Source: Vaswani et al. 2017, equation 1; Ainslie et al. 2023 for the groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Compute ``softmax(scale · Q Kᵀ) V``, where query head i reads key–value head ``i // (H / K)``.

    The arithmetic is in float32, or in float64 for float64 inputs.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        mask: bool, broadcastable to ``[B, H, S, T]``; a row without True gives zeros.
        scale: multiplies the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        The output ``[B, H, S, V]`` and the weights ``[B, H, S, T]`` (after dropout).
    """
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    key = key.to(wide).repeat_interleave(group, dim=1)  # [B, H, T, D]
    value = value.to(wide).repeat_interleave(group, dim=1)  # [B, H, T, V]
    weights = masked_softmax(query.to(wide) @ key.transpose(-1, -2) * scale, mask)  # [B, H, S, T]
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0)
    return (weights @ value).to(dtype), weights.to(dtype)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the last dim, computed in float32 or float64; masked entries, and so empty rows, are exactly 0.

    For example ``masked_softmax(torch.zeros(3), torch.tensor([True, True, False])).tolist()`` is
    ``[0.5, 0.5, 0.0]``.

    Args:
        scores: ``[..., T]``.
        mask: bool, broadcastable to the scores, True = attend; None for no mask.
    """
    dtype = scores.dtype
    scores = scores.to(torch.promote_types(dtype, torch.float32))
    if mask is None:
        return scores.softmax(-1).to(dtype)
    # A finite minimum instead of -inf, so that an empty row has a finite softmax and finite gradients before it is
    # set to 0.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~mask, 0.0).to(dtype)
