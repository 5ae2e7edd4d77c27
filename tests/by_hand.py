"""Attention from first principles: float64, one query row at a time, nothing shared with the library.

Shapes: B batch, H query heads, K key–value heads, S queries, T keys, D head dim, V value dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def may_attend(
    mask: Tensor | None, is_causal: bool, shape: tuple[int, int, int, int], window: int | None = None
) -> Tensor:
    """The pairs ``[B, H, S, T]`` that a mask, bottom-right causality and a window allow, computed pair by pair."""
    B, H, S, T = shape
    values = None if mask is None else mask.tolist()

    def kept(b: int, h: int, s: int, t: int) -> bool:
        if is_causal and t > T - S + s:
            return False
        if window is not None and t <= T - S + s - window:
            return False
        if mask is None or values is None:
            return True
        sizes = tuple(mask.shape)
        if len(sizes) == 2:
            return bool(values[b % sizes[0]][t])
        return bool(values[b % sizes[0]][h % sizes[1]][s % sizes[2]][t % sizes[3]])

    return torch.tensor(
        [[[[kept(b, h, s, t) for t in range(T)] for s in range(S)] for h in range(H)] for b in range(B)]
    )


def project(linear: nn.Linear | None, x: Tensor) -> Tensor:
    """``x Wᵀ + b``."""
    assert linear is not None
    out = x @ linear.weight.T
    return out if linear.bias is None else out + linear.bias


def attend_by_rows(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, scale: float | None = None) -> Tensor:
    """For each row: the keys it may see, their softmax, the weighted sum of their values; differentiable."""
    B, H, S, D = query.shape
    group = H // key.shape[1]
    scale = 1 / math.sqrt(D) if scale is None else scale
    query, key, value = query.double(), key.double(), value.double()
    rows = []
    for b in range(B):
        for h in range(H):
            for s in range(S):
                keys = kept[b, h, s].nonzero()[:, 0]
                if len(keys) == 0:
                    rows.append(value.new_zeros(value.shape[-1]))
                    continue
                scores = scale * (key[b, h // group, keys] @ query[b, h, s])
                powers = (scores - scores.max()).exp()
                rows.append((powers / powers.sum()) @ value[b, h // group, keys])
    return torch.stack(rows).view(B, H, S, value.shape[-1])


def rotate_by_hand(x: Tensor, positions: Tensor, angles: tuple[float, ...], *, interleaved: bool) -> Tensor:
    """Turn each pair of ``[S, D]`` by position times angle, as a complex number; dims beyond the pairs pass."""
    P = 2 * len(angles)
    first, second = (x[:, 0:P:2], x[:, 1:P:2]) if interleaved else (x[:, : P // 2], x[:, P // 2 : P])
    phase = positions.double()[:, None] * torch.tensor(angles, dtype=torch.float64)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(phase), phase)
    out = x.clone()
    if interleaved:
        out[:, 0:P:2], out[:, 1:P:2] = turned.real, turned.imag
    else:
        out[:, : P // 2], out[:, P // 2 : P] = turned.real, turned.imag
    return out


def rms_by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight · x / sqrt(mean(x²) + eps)``."""
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
