"""Statistics of a layer's attention on a text, and the metrics of errors that follow from them.

Statistics are second moments of a layer's inputs, weighted by how much the output depends on them. From these follows
what an error of the layer's keys costs, through the scores, and of its values, through the output. They hold nothing
of a target, so that one calibration serves conversions to any.

Shapes: T tokens of a window, S sampled queries, H query heads, K key heads, D key dims, V value dim, E hidden, E' =
E, or E + 1 (a constant 1 stands last, for the biases). Everything but a window's own numbers is float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.base.processes import all_sum
from headwise.base.threads import map_in_threads
from headwise.conversion.solvers.joint_latent import Part, weighted
from headwise.conversion.solvers.layer import Layer, attention_weights, grouped_spec, rotation_tables, sample_rows
from headwise.models.specs import GroupedSpec

SAMPLES = 2304
"""The number of attention rows (queries times heads) sampled in a window: 256 queries of nine heads."""


class WindowStatistics(NamedTuple):
    """The numbers that one window adds to `Statistics`.

    Attributes:
        inputs: the attention's inputs and a constant 1, ``[T, E']``.
        token_weight: the weight of each token's key, ``[T]``.
        head_weight: the sum of these weights for each head, ``[H]``; see `Statistics`.
        distances: the sum of these weights by the distance from query to key, ``[H, …]``; see `Statistics`.
        queries: the number of sampled queries in each head.
    """

    inputs: Tensor
    token_weight: Tensor
    head_weight: Tensor
    distances: Tensor
    queries: int

    @classmethod
    def of(
        cls, layer: Layer, inputs: Tensor, metric: Tensor, *, positions: Tensor, window: int, longest: int
    ) -> WindowStatistics:
        """Measure one window.

        Args:
            layer: the source's layer, float32.
            inputs: the attention's inputs, ``[T, E]``.
            metric: the metric of each head's mixed values, ``[H, V, V]``; see `output_metric`.
            positions: the positions of the window's tokens, ``[T]``.
            window: the window's number in the text; each window's sample has other queries.
            longest: the number of distances that are counted, more than the last position.
        """
        H, T = layer.spec.num_heads, len(inputs)
        rows = sample_rows(T, max(SAMPLES // H, 8), window)  # [S], as many in every head
        # Float64: where a text has fewer tokens than there are inputs, rounding would make the moments indefinite.
        wide = torch.cat((inputs, inputs.new_ones(T, 1)), dim=1).double()  # [T, E']
        heads = layer.heads(inputs, rows, rotation_tables(grouped_spec(layer.spec), positions))
        weights = attention_weights(heads, layer.spec, rows)  # [H, S, T]
        steps = (positions[rows, None] - positions).abs().flatten()  # [S·T], from query to key
        token_weight = torch.zeros(T, dtype=torch.float64)
        head_weight, distances = torch.zeros(H, dtype=torch.float64), torch.zeros(H, longest, dtype=torch.float64)
        for head in range(H):
            probabilities = weights[head]  # [S, T]
            # The derivative of the output by a score is P_ts (v_s − Σ P v). Its square, in the metric of the loss, is
            # divided by P_ts: a score then counts once as often as it is attended to, not twice.
            value = heads.value[head] @ metric[head].float()  # [T, V]
            mean = probabilities @ value  # [S, V]
            distance = value.square().sum(-1) - 2 * mean @ value.mT + mean.square().sum(-1, keepdim=True)  # [S, T]
            score_weight = (probabilities * distance.clamp_min(0)).double()
            token_weight += score_weight.sum(0)
            head_weight[head] = score_weight.sum()
            distances[head].index_add_(0, steps, score_weight.flatten())
        return cls(wide, token_weight, head_weight, distances, len(rows))


@dataclass(frozen=True)
class Statistics:
    """Sums over a text, or their means (`means`).

    Attributes:
        inputs: the second moments of the inputs, ``Σ x xᵀ``, ``[E', E']``.
        keys: the second moments ``Σ w_s x_s x_sᵀ``, ``[E', E']``, where w_s is the weight of token s: how much the
            output depends on the scores of its key.
        head_weight: the sum of w for each head, ``[H]``.
        distances: the sum of w for each head by the distance from query to key, from 0 up, ``[H, …]``.
        queries: the number of sampled queries of each head.
    """

    inputs: Tensor
    keys: Tensor
    head_weight: Tensor
    distances: Tensor
    queries: Tensor

    @classmethod
    def zeros(cls, hidden_size: int, heads: int, tokens: int) -> Statistics:
        """Sums to begin with, before any text, for distances below ``tokens``."""
        width = hidden_size + 1
        shapes = ((width, width), (width, width), (heads,), (heads, tokens), ())
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    @classmethod
    def nothing(cls, hidden_size: int, heads: int, tokens: int) -> Statistics:
        """Means to assume without a text: equal inputs, equal heads, and distances Δ as likely as 1/(Δ + 1)."""
        gram = torch.eye(hidden_size + 1, dtype=torch.float64)
        distances = 1.0 / torch.arange(1, tokens + 1, dtype=torch.float64)
        distances = (distances / distances.sum()).expand(heads, -1).clone()
        ones = torch.ones(heads, dtype=torch.float64)
        return cls(gram, gram, ones, distances, ones[0])

    def add(self, window: WindowStatistics) -> None:
        """Add one window, in place."""
        self.inputs.addmm_(window.inputs.mT, window.inputs)
        self.keys.addmm_((window.inputs * window.token_weight[:, None]).mT, window.inputs)
        self.head_weight.add_(window.head_weight)
        self.distances.add_(window.distances)
        self.queries.add_(window.queries)

    def reduced(self) -> Statistics:
        """The sums over all processes, each of which has its own windows."""
        for field in fields(self):
            all_sum(getattr(self, field.name))
        return self

    def means(self) -> Statistics:
        """The means of these sums: moments whose constant input has mean square 1, and weights per sampled query."""
        count, weight = (gram[-1, -1].clamp_min(1e-300) for gram in (self.inputs, self.keys))
        return Statistics(
            self.inputs / count,
            self.keys / weight,
            self.head_weight / self.queries.clamp_min(1),
            self.distances / self.distances.sum(-1, keepdim=True).clamp_min(1e-300),
            self.queries,
        )


def statistics_of(
    layer: Layer, sensitivity: Tensor | None, windows: Iterable[tuple[int, Tensor]], positions: Tensor
) -> Statistics:
    """The statistics of one layer on a text, as means over all processes' windows.

    Args:
        layer: the source's layer, float32.
        sensitivity: the cost of an error of the layer's output, ``[E, E]``; see `output_metric`.
        windows: the windows of this process: the number of each in the text, and the attention's inputs ``[T, E]``.
        positions: the positions of the tokens of each window in the text, ``[N, T]``, as the layer sees them.
    """
    spec = grouped_spec(layer.spec)
    metric = output_metric(layer.state["o_proj.weight"], sensitivity, spec.num_heads)
    longest = int(positions.max()) + 1
    sums = Statistics.zeros(spec.hidden_size, spec.num_heads, longest)

    def measured(item: tuple[int, Tensor]) -> WindowStatistics:
        window, inputs = item
        return WindowStatistics.of(layer, inputs, metric, positions=positions[window], window=window, longest=longest)

    for window in map_in_threads(measured, windows):
        sums.add(window)
    return sums.reduced().means()


def output_metric(w_o: Tensor, sensitivity: Tensor | None, heads: int) -> Tensor:
    """The metric of a change of each head's mixed values, ``(W_oᵀ G W_o)^{1/2}``: ``[H, V, V]``.

    Args:
        w_o: the weight of the output projection, ``[E, H·V]``.
        sensitivity: the expected outer product G of the loss's derivative by the attention's output, ``[E, E]``; the
            same in every direction when None.
        heads: the number H of query heads.
    """
    by_head = torch.unflatten(w_o.double(), 1, (heads, -1)).transpose(0, 1)  # [H, E, V]
    return root(by_head.mT @ (by_head if sensitivity is None else sensitivity @ by_head))


def root(matrices: Tensor) -> Tensor:
    """The symmetric square root of positive semidefinite matrices ``[..., n, n]``."""
    values, vectors = torch.linalg.eigh(matrices)
    out: Tensor = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
    return out


_RIDGE = 1e-12
"""The part of a matrix's trace that its Cholesky factor may differ by: above float64's rounding."""


def factor(matrix: Tensor) -> Tensor:
    """A matrix L with ``L Lᵀ`` equal to a positive semidefinite one, ``[n, n]``: a tenth of the time of `root`."""
    ridge = _RIDGE * matrix.trace() * torch.eye(len(matrix), dtype=matrix.dtype)
    lower, info = torch.linalg.cholesky_ex(matrix + ridge)
    return root(matrix) if info else lower  # of a matrix without a positive trace, or of one that is not finite


KEY_BALANCE = 4.0
"""The weight of all key energy relative to all value energy, without statistics."""


def score_weight(weight: Tensor, source: GroupedSpec) -> Tensor:
    """The cost of a squared error of ``q·k`` in each head, ``[H]``, from that of the scaled score, ``weight``."""
    scale = source.head_dim**-0.5 if source.softmax_scale is None else source.softmax_scale
    return weight.clamp_min(0) * scale**2


def value_metric(w_o: Tensor, sensitivity: Tensor | None, source: GroupedSpec) -> Tensor:
    """The cost of an error of the values through the output: ``Σ_heads W_oᵀ G W_o``, ``[K, V, V]``."""
    heads = torch.unflatten(w_o.double(), 1, (source.num_kv_heads, source.group_size, source.value_dim))
    costs = heads if sensitivity is None else torch.einsum("ef,fkgv->ekgv", sensitivity, heads)
    return torch.einsum("ekgv,ekgw->kvw", heads, costs)  # of [E, K, H/K, V] both


def key_metric(queries: Tensor, moments: Tensor, weight: Tensor, source: GroupedSpec) -> Tensor:
    """The cost of an error of each key head through the scores: ``Σ_h w_h E[q qᵀ]`` of its queries, ``[K, D, D]``.

    Args:
        queries: the rows of the query heads, ``[H, D, E']``.
        moments: the second moments of the inputs, ``[E', E']``.
        weight: the weight of each head's scores, ``[H]``; see `Statistics.head_weight`.
        source: the layer's spec.
    """
    weights = score_weight(weight, source)  # [H]
    grams = torch.stack([w * (rows @ moments @ rows.mT) for w, rows in zip(weights, queries, strict=True)])
    # The H/K query heads of a key head add up: [H, D, D] → [K, D, D].
    return torch.unflatten(grams, 0, (source.num_kv_heads, -1)).sum(1)


def energy(rows: Tensor, moments: Tensor) -> Tensor:
    """The energy ``E|w·x|²`` of each real or complex row w ``[..., E']``, for inputs x of these second moments."""
    if rows.is_complex():
        return energy(rows.real, moments) + energy(rows.imag, moments)
    return ((rows @ moments) * rows).sum(-1)


def cost_without(part: Part) -> float:
    """The cost of leaving a part out."""
    return float((weighted(part.metric, part.rows @ part.moments) * part.rows).sum())


def centred(moments: Tensor) -> Tensor:
    """Second moments ``[E', E']`` without the mean, which shifts all scores of a query equally, unseen by softmax."""
    constant = moments[:, -1:]
    return moments - constant @ constant.mT / moments[-1, -1].clamp_min(torch.finfo(moments.dtype).tiny)
