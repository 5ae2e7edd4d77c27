"""KVQuant (Hooper et al. 2024, arXiv:2401.18079): non-uniform levels, keys per channel before rotation.

As its authors' code has it: levels in [-1, 1] for each projection of each layer, by k-means weighted with squared
derivatives of the loss, on 16 windows; keys are scaled to it per channel by fixed percentiles, values per token by
their own range; 1 % of numbers, outside the percentiles, are kept apart in 16 bits; the first token is kept whole;
levels of 2 bits are shifted and scaled to the mean and deviation they should have (Q-Norm).

Bytes of an outlier: its 16-bit number and a byte for its channel, and a byte a token for the number of a key's
outliers. The authors have 16-bit channels and 32-bit counts, for wider models. A token's values have a 16-bit scale
and offset. Outliers of keys are counted on the windows that are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.rivals.simulation import BF16, Design, Rotary, Study, grouped_attention
from torch import Tensor

BITS = (2, 3, 4, 5)
OUTLIERS = 0.01
WINDOWS = 16
"""Windows that levels are calibrated on, as in the paper."""
ABOVE = 1.05
"""The most that a way may take over the wanted bytes, because there are few ways."""
SINKS = 1
"""First tokens of a window that are kept whole."""
ITERATIONS = 50
CELLS = 1 << 14
"""Cells of the histogram that k-means works on."""
NORMALISED = 2
"""The number of bits with Q-Norm."""


@dataclass
class QuantisedLayer:
    """A layer with quantised keys and values.

    Attributes:
        lower: ``[K·D]``, the keys' lower thresholds.
        upper: ``[K·D]``, their upper thresholds.
        key_levels: ``[2^b]``, in [-1, 1], Q-Norm included.
        value_levels: ``[2^b]``.
        sparse: whether outliers are kept.
        key_outliers: the number of keys' outliers so far.
        tokens: the number of tokens so far.
    """

    lower: Tensor
    upper: Tensor
    key_levels: Tensor
    value_levels: Tensor
    sparse: bool
    key_outliers: int = field(default=0)
    tokens: int = field(default=0)

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        """See `simulation.Rival`."""
        keys, values = attention.k_proj(hidden)[0], attention.v_proj(hidden)[0]
        new_keys, new_values = self.keys(keys), self.values(values)
        new_keys[:SINKS], new_values[:SINKS] = keys[:SINKS], values[:SINKS]
        return grouped_attention(attention, hidden, new_keys[None], new_values[None], rotary)

    def keys(self, keys: Tensor) -> Tensor:
        """Keys ``[S, K·D]`` as they are read."""
        outliers = (keys < self.lower) | (keys > self.upper)
        self.key_outliers += int(outliers[SINKS:].sum())
        self.tokens += len(keys)
        rounded = scaled_to_levels(keys, self.lower, self.upper, self.key_levels)
        return torch.where(outliers, keys.half().float(), rounded) if self.sparse else rounded

    def values(self, values: Tensor) -> Tensor:
        """Values ``[S, K·D]`` as they are read."""
        if not self.sparse:
            low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
            return scaled_to_levels(values, low, high, self.value_levels)
        low, high = (values.quantile(at, -1, keepdim=True) for at in (OUTLIERS / 2, 1 - OUTLIERS / 2))
        outliers = (values <= low) | (values >= high)
        # Outliers are set to the median, so that the range is that of the others.
        inner = torch.where(outliers, values.median(-1, keepdim=True).values, values)
        low, high = inner.amin(-1, keepdim=True), inner.amax(-1, keepdim=True)
        return torch.where(outliers, values.half().float(), scaled_to_levels(values, low, high, self.value_levels))


def scaled_to_levels(states: Tensor, low: Tensor, high: Tensor, levels: Tensor) -> Tensor:
    """The nearest of levels in [-1, 1] that are scaled to a range."""
    offset, scale = ((high + low) / 2).half().float(), ((high - low) / 2).half().float().clamp_min(1e-6)
    boundaries = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize((states - offset) / scale, boundaries)] * scale + offset


def designs(study: Study, fraction: float) -> list[Design]:
    """The number of bits, with or without outliers, whose bytes come nearest; none below the smallest."""
    ways = [(bits, sparse) for bits in BITS for sparse in (True, False)]
    sizes = {way: study.layers * expected_bytes(study.width, *way) for way in ways}
    most = ABOVE * fraction * study.full
    fitting = [way for way in ways if sizes[way] <= most]
    return [
        Design(
            [_layer(study.statistics, index, bits, sparse) for index in range(study.layers)],
            sizes[bits, sparse],
            {"bits": bits, "outliers": OUTLIERS if sparse else 0},
        )
        for bits, sparse in sorted(fitting, key=lambda way: sizes[way])[-1:]
    ]


def expected_bytes(width: int, bits: int, sparse: bool, key_outliers: float | None = None) -> float:
    """Bytes of a token in one layer.

    Args:
        width: K·D.
        bits: of a code.
        sparse: whether outliers are kept.
        key_outliers: of a token; the calibrated number when None.
    """
    dense = 2 * width * bits / 8 + 2 * BF16  # with the values' scale and offset
    if not sparse:
        return dense
    key_outliers = OUTLIERS * width if key_outliers is None else key_outliers
    value_outliers = 2 * max(1, round(OUTLIERS / 2 * width))
    return dense + (BF16 + 1) * (key_outliers + value_outliers) + 1


def measured_bytes(layers: list[QuantisedLayer], bits: int, window: int) -> float:
    """Bytes of a token in all layers, with the outliers that were met and the first tokens of each window."""
    total = 0.0
    for layer in layers:
        width = len(layer.lower)
        coded = expected_bytes(width, bits, layer.sparse, layer.key_outliers / max(layer.tokens, 1))
        total += ((window - SINKS) * coded + SINKS * 2 * width * BF16) / window
    return total


def _layer(statistics: Mapping[str, Tensor], index: int, bits: int, sparse: bool) -> QuantisedLayer:
    way = "sparse" if sparse else "dense"
    names = (f"keys.{way}.lower", f"keys.{way}.upper", f"keys.{way}.levels{bits}", f"values.{way}.levels{bits}")
    return QuantisedLayer(*(statistics[f"{index}.{name}"] for name in names), sparse)


def calibrated(name: str, states: Tensor, weights: Tensor, first: Tensor) -> dict[str, Tensor]:
    """Thresholds and levels of one projection.

    Args:
        name: ``keys`` or ``values``.
        states: ``[n, K·D]`` of all calibration windows.
        weights: ``[n, K·D]``, the squared derivatives of the loss.
        first: bool ``[n]``, the tokens that are kept whole.
    """
    dim, found = (0 if name == "keys" else 1), {}
    for way, tail in (("sparse", OUTLIERS / 2), ("dense", 0.0)):
        lower, upper = _percentiles(states, tail, dim)
        scaled = (states - (lower + upper) / 2) / ((upper - lower) / 2).clamp_min(1e-6)
        used = (scaled.abs() <= 1) & ~first[:, None]
        counted, weighing = scaled[used], weights[used]
        if name == "keys":
            found |= {f"keys.{way}.lower": lower.flatten(), f"keys.{way}.upper": upper.flatten()}
        for bits in BITS:
            levels = weighted_levels(counted, weighing, 1 << bits)
            if bits == NORMALISED:
                levels = normalised(levels, counted)
            found[f"{name}.{way}.levels{bits}"] = levels
    return found


def _percentiles(states: Tensor, tail: float, dim: int) -> tuple[Tensor, Tensor]:
    ordered = states.sort(dim).values
    last = states.shape[dim] - 1
    at = tail * last
    low, part = int(at), at - int(at)

    def place(index: int) -> Tensor:
        return ordered.narrow(dim, index, 1)

    lower = place(low) + part * (place(min(low + 1, last)) - place(low))
    upper = place(last - low) - part * (place(last - low) - place(max(last - low - 1, 0)))
    return lower, upper


def weighted_levels(states: Tensor, weights: Tensor, count: int) -> Tensor:
    """The centres of weighted k-means of numbers in [-1, 1], in rising order, ``[count]``.

    The authors begin with k-means++; here it begins with quantiles of the weights' cube root, the optimal density of
    many levels, so that the result does not depend on a seed.
    """
    cell = ((states + 1) / 2 * CELLS).long().clamp(0, CELLS - 1)
    mass = torch.bincount(cell, weights.double(), CELLS)
    moment = torch.bincount(cell, weights.double() * states.double(), CELLS)
    masses, moments = (torch.cat((torch.zeros(1), x.cumsum(0))) for x in (mass, moment))
    density = (mass.view(-1, CELLS // 256).sum(1) ** (1 / 3)).repeat_interleave(CELLS // 256).cumsum(0)
    goals = (torch.arange(count) + 0.5) / count * density[-1]
    centres = (torch.searchsorted(density, goals).double() + 0.5) / CELLS * 2 - 1
    for _ in range(ITERATIONS):
        middle = (centres[1:] + centres[:-1]) / 2
        edge = torch.cat((torch.tensor([0]), ((middle + 1) / 2 * CELLS).round().long(), torch.tensor([CELLS])))
        weight, first = masses[edge].diff(), moments[edge].diff()
        centres = torch.where(weight > 0, first / weight.clamp_min(1e-300), centres)
    return centres.float()


def normalised(levels: Tensor, states: Tensor) -> Tensor:
    """Q-Norm: levels whose numbers have the mean and deviation of the numbers that are rounded to them."""
    rounded = levels[torch.bucketize(states, (levels[1:] + levels[:-1]) / 2)]
    scale = states.std() / rounded.std()
    return (levels - rounded.mean()) * scale + states.mean()
