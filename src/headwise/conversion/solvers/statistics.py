"""What one layer's attention sees of a text: second moments of its inputs, weighted by what depends on them.

Shapes: T tokens of a window, S sampled queries, H query heads, K key heads, V value dim, E hidden, E' = E + 1 (a
constant 1 stands last). Sums are float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headwise.conversion.solvers.layer import Layer, Rotation, attention_weights, rotation_tables, sample_rows
from headwise.processes import all_sum
from headwise.specs import GroupedSpec

SAMPLES = 2304
"""Queries times heads looked at in a window: 256 of nine heads."""


def sampled_queries(heads: int) -> int:
    """How many queries of a window are looked at, of all heads."""
    return max(SAMPLES // heads, 8)


@dataclass(frozen=True)
class Statistics:
    """Sums over a text, or what they are on average (`means`).

    Attributes:
        inputs: ``[E', E']`` ``Σ x xᵀ``.
        keys: ``[E', E']`` ``Σ w_s x_s x_sᵀ``, w_s being how much of the output turns on that token's score.
        head_weight: ``[H]``, the sum of w for each head.
        distances: ``[H, T]``, that sum by the distance from query to key.
        queries: how many of each head were sampled.
    """

    inputs: Tensor
    keys: Tensor
    head_weight: Tensor
    distances: Tensor
    queries: Tensor

    @classmethod
    def zeros(cls, hidden_size: int, heads: int, tokens: int) -> Statistics:
        """Of no text yet."""
        wide = hidden_size + 1
        shapes = ((wide, wide), (wide, wide), (heads,), (heads, tokens), ())
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    @classmethod
    def nothing(cls, hidden_size: int, heads: int, tokens: int) -> Statistics:
        """Where no text is given: all inputs alike, heads alike, and distances as likely as they are short."""
        gram = torch.eye(hidden_size + 1, dtype=torch.float64)
        distances = 1.0 / torch.arange(1, tokens + 1, dtype=torch.float64)
        distances = (distances / distances.sum()).expand(heads, -1).clone()
        one = torch.ones(heads, dtype=torch.float64)
        return cls(gram, gram, one, distances, one[0])

    def add(self, layer: Layer, inputs: Tensor, metric: Tensor, *, rotation: Rotation | None, window: int) -> None:
        """Add one window, in place.

        Args:
            layer: the source's, float32.
            inputs: ``[T, E]``.
            metric: `output_metric`, ``[H, V, V]``.
            rotation: of the window's positions.
            window: which of the text's, so that other queries are looked at in each.
        """
        H, T = layer.spec.num_heads, len(inputs)
        rows = sample_rows(T, sampled_queries(H), window)
        seen = torch.cat((inputs, inputs.new_ones(T, 1)), dim=1)
        wide = seen.double()
        self.inputs.addmm_(wide.mT, wide)
        heads = layer.heads(inputs, rows, rotation)
        weights = attention_weights(heads, layer.spec, rows)
        behind = (rows[:, None] - torch.arange(T)).abs().flatten()
        asked = torch.zeros(T, dtype=torch.float64)
        for head in range(H):
            own = weights[head]
            # A score's derivative of the output is P_ts (v_s − Σ P v). Its square, in the metric of the loss, is
            # divided by P_ts, so that scores count as often as they are met and not twice over.
            value = heads.value[head] @ metric[head].float()
            mean = own @ value
            distance = value.square().sum(-1) - 2 * mean @ value.mT + mean.square().sum(-1, keepdim=True)
            turning = (own * distance.clamp_min(0)).double()
            asked += turning.sum(0)
            self.head_weight[head] += turning.sum()
            self.distances[head].index_add_(0, behind, turning.flatten())
        self.queries.add_(len(rows))
        self.keys.addmm_((wide * asked[:, None]).mT, wide)

    def reduced(self) -> Statistics:
        """The sum over all processes, each with windows of its own."""
        for field in fields(self):
            all_sum(getattr(self, field.name))
        return self

    def means(self) -> Statistics:
        """As averages: moments with a constant of mean square 1; weights a sampled query."""
        count, asked = (gram[-1, -1].clamp_min(1e-300) for gram in (self.inputs, self.keys))
        return Statistics(
            self.inputs / count,
            self.keys / asked,
            self.head_weight / self.queries.clamp_min(1),
            self.distances / self.distances.sum(-1, keepdim=True).clamp_min(1e-300),
            self.queries,
        )


def statistics_of(
    layer: Layer, sensitivity: Tensor | None, windows: Iterable[tuple[int, Tensor]], tokens: int
) -> Statistics:
    """What a layer sees of a text, as means over all processes' windows.

    Args:
        layer: the source's, float32.
        sensitivity: see `output_metric`.
        windows: this process's: each one's place in the text, and what goes into the attention, ``[T, E]``.
        tokens: T.
    """
    spec = layer.spec
    assert isinstance(spec, GroupedSpec)
    metric = output_metric(layer.state["o_proj.weight"], sensitivity, spec.num_heads)
    rotation = rotation_tables(spec, tokens)
    sums = Statistics.zeros(spec.hidden_size, spec.num_heads, tokens)
    for at, inputs in windows:
        sums.add(layer, inputs, metric, rotation=rotation, window=at)
    return sums.reduced().means()


def output_metric(w_o: Tensor, sensitivity: Tensor | None, heads: int) -> Tensor:
    """``(W_oᵀ G W_o)^{1/2}`` of each head, ``[H, V, V]``: how much a change of its mixed values costs.

    Args:
        w_o: ``[E, H·V]``.
        sensitivity: G, ``[E, E]``: expected squared derivative of the loss by the attention's output; the
            same in every direction when None.
        heads: H.
    """
    by_head = torch.unflatten(w_o.double(), 1, (heads, -1)).transpose(0, 1)
    return root(by_head.mT @ (by_head if sensitivity is None else sensitivity @ by_head))


def root(matrices: Tensor) -> Tensor:
    """The symmetric square root of positive semidefinite matrices ``[..., n, n]``."""
    values, vectors = torch.linalg.eigh(matrices)
    out: Tensor = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
    return out
