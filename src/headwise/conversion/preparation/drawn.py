"""Queries and keys drawn as often as the errors of their products matter to what a layer's attention gives.

A query whose weights are spread over many keys hardly feels that one of them is off, and a key that nobody attends to
may be rounded anyhow. The error of a score moves the output by the weight times how far the key's value is from the
output, so that is how much a pair of a query and a key counts.

Shapes: N drawn samples, B windows, W tokens of a window, S queries of a window, H query heads, K key–value heads, D
head dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.preparation.chosen import output_weight
from headwise.conversion.preparation.samples import Projected

_DRAWN = 4096
_EVERY = 4
"""One query in so many is looked at."""


def drawn(projected: Projected, state: Mapping[str, Tensor], shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw rotated queries ``[K, N, D]`` of all heads that share a key–value head together, and keys ``[K, N, D]``.

    Args:
        projected: the layer's queries, keys and values.
        state: its attention under headwise's names.
        shift: added to the keys before they are rotated, ``[K, D]``.
    """
    layer, positions = projected.layer, projected.positions
    W, generator = len(positions), torch.Generator().manual_seed(0)
    asked = torch.arange(W // 16, W, _EVERY)
    queries = torch.unflatten(projected.rotated("q", positions)[:, :, asked], 0, (layer.num_kv_heads, -1))
    keys = projected.rotated("k", positions, shift)
    by_head = torch.unflatten(output_weight(state, layer), -1, (layer.num_heads, -1))
    metric = torch.unflatten(torch.einsum("ehv,ehw->hvw", by_head, by_head), 0, queries.shape[:2])
    apart = asked[:, None] - torch.arange(W)
    hidden = apart < 0
    if layer.sliding_window is not None:
        hidden |= apart >= layer.sliding_window
    samples = []
    for head, of_head in enumerate(queries):
        asking, seen = torch.zeros(of_head.shape[:-1]), torch.zeros(keys.shape[1], W)
        for group, of_group in enumerate(of_head):
            for window, rows in enumerate(of_group):  # [S, D]
                own = projected.values[head, window]
                weights = (rows @ keys[head, window].T * projected.scale).masked_fill(hidden, -torch.inf).softmax(-1)
                shares = weights.square() * _distances(own, weights @ own, metric[head, group])
                asking[group, window] = shares.sum(-1)
                seen[window] += (shares * rows.square().sum(-1, keepdim=True)).sum(0)
        samples.append(
            [
                states[torch.multinomial(shares.flatten() + 1e-30, _DRAWN, True, generator=generator)]
                for states, shares in ((of_head.flatten(0, 2), asking), (keys[head].flatten(0, 1), seen))
            ]
        )
    drawn_queries, drawn_keys = (torch.stack(side) for side in zip(*samples, strict=True))
    return drawn_queries, drawn_keys


def _distances(values: Tensor, outputs: Tensor, metric: Tensor) -> Tensor:
    """The squared lengths ``[S, W]`` of all differences of values ``[W, V]`` and outputs ``[S, V]`` in a metric."""
    of_values, of_outputs = values @ metric, outputs @ metric
    ends = (of_values * values).sum(-1), (of_outputs * outputs).sum(-1, keepdim=True)
    return (ends[0] - 2 * outputs @ of_values.T + ends[1]).clamp_min(0.0)
