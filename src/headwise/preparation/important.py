"""Which queries and keys of a layer count: those through which an error of a score reaches the attention's output.

A score of a query that is off by e moves the output by p · e · (v − o): the weight of the key, and how far its value
lies from the output. Errors of keys are independent, so that their squares add up: a key counts by the sum of
p² |v − o|² over queries. A few keys that many queries attend to, such as that of the first token, count most.

Shapes: B windows, W tokens of a window, S queries of a window, H query heads, K key–value heads, V value dim, E
hidden size, N queries and T keys that are taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.preparation.samples import Projected

QUERIES = 64
"""Queries of a window that are asked, evenly spread."""

TAKEN_QUERIES = 1024
TAKEN_KEYS = 256

_EVEN = 0.1
"""The part of the keys and queries that are taken whatever they count."""


def asked(windows_length: int) -> Tensor:
    """The queries of a window that attention's weights are computed for, ``[S]``."""
    return torch.linspace(windows_length // 8, windows_length - 1, min(QUERIES, windows_length)).long()


def important(projected: Projected, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Samples by how much they count: indices of queries ``[K, N]`` and of keys ``[K, T]``.

    They index queries ``[K, H/K · B · W]`` of all heads that share a key–value head, and keys ``[K, B · W]``.

    Args:
        projected: the layer's queries, keys and values.
        state: its attention under headwise's names.
    """
    queries, keys = (projected.rotated(side, projected.positions) for side in "qk")
    K, B, W = keys.shape[:3]
    places = asked(W)
    grouped = torch.unflatten(queries[:, :, places], 0, (K, -1))  # [K, H/K, B, S, D]
    scores = torch.einsum("kgbsd,kbtd->kgbst", grouped, keys) * projected.scale
    weights = scores.masked_fill(torch.arange(W) > places[:, None], -torch.inf).softmax(-1)
    values = projected.values[:, None]  # [K, 1, B, W, V]
    metric = torch.unflatten(output_gram(state, projected), 0, (K, -1))[:, :, None]  # [K, H/K, 1, V, V]
    out = weights @ values  # [K, H/K, B, S, V]
    of_values = ((values @ metric) * values).sum(-1)[..., None, :]  # [K, H/K, B, 1, W]
    of_out = ((out @ metric) * out).sum(-1)[..., None]
    apart = (of_values + of_out - 2 * (out @ metric) @ values.mT).clamp_min(0)
    counted = weights.square() * apart  # [K, H/K, B, S, W]
    G = counted.shape[1]
    of_queries = torch.zeros(K, G, B, W).index_copy(3, places, counted.sum(-1))
    even = torch.zeros(W).index_fill(0, places, 1.0).expand(K, G, B, W)
    of_keys = counted.sum((1, 3))
    return (
        _drawn(of_queries.flatten(1), even.flatten(1), TAKEN_QUERIES),
        _drawn(of_keys.flatten(1), torch.ones_like(of_keys).flatten(1), TAKEN_KEYS),
    )


def output_gram(state: Mapping[str, Tensor], projected: Projected) -> Tensor:
    """What the squared length of each query head's output is a quadratic form of, ``[H, V, V]``."""
    H, V = projected.layer.num_heads, projected.values.shape[-1]
    if (weight := state.get("o_proj.weight")) is None:
        return torch.eye(V).expand(H, V, V)
    by_head = torch.unflatten(weight.float(), -1, (H, V)).permute(1, 0, 2)  # [H, E, V]
    return by_head.mT @ by_head


def _drawn(counts: Tensor, even: Tensor, size: int) -> Tensor:
    """Indices ``[K, size]``, each as often as it counts, at even distances along their sum."""
    shares = counts / counts.sum(-1, keepdim=True).clamp_min(1e-30)
    shares = (1 - _EVEN) * shares + _EVEN * even / even.sum(-1, keepdim=True)
    sums = shares.double().cumsum(-1)
    marks = (torch.arange(size) + 0.5) / size * sums[:, -1:]
    return torch.searchsorted(sums, marks.contiguous()).clamp_max(counts.shape[-1] - 1)


def at(states: Tensor, taken: Tensor) -> Tensor:
    """Those of ``[K, n, D]`` that are taken, ``[K, N, D]``.

    Args:
        states: queries or keys.
        taken: their indices, ``[K, N]``.
    """
    return states.gather(1, taken[..., None].expand(-1, -1, states.shape[-1]))
