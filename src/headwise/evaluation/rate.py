"""How often a model is right, with an interval; and compared with its reference on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from headwise.evaluation.paired_results import Paired

_Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""
_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Rate(Paired, compared=("rate", "low", "high")):
    """A fraction of items with its 95 % interval, and its difference from the reference's.

    Without a reference ``only_model`` and all that follow are None.

    Attributes:
        items: how many.
        rate: the fraction that is answered rightly.
        low: lower end of its Wilson interval.
        high: upper end of its Wilson interval.
        only_model: items that only the model has right.
        only_reference: items that only the reference has right.
        difference: the model's rate less the reference's.
        difference_low: lower end of its 95 % bootstrap interval, items resampled.
        difference_high: upper end.
        p_value: McNemar's exact test: the probability that the items only one of the two has right split so unevenly
            by chance.
    """

    items: int
    rate: float
    low: float
    high: float
    only_model: int | None = None
    only_reference: int | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None


def rate(right: Sequence[bool], reference: Sequence[bool] | None = None, *, seed: int = 0) -> Rate:
    """Summarise whether a model was right on each item, beside its reference on the same items.

    For example ``rate([True, False], [True, True]).difference`` is -0.5.

    Args:
        right: for each item whether the model has it right; at least one.
        reference: for each item whether the reference has it right.
        seed: of the interval's resampling.
    """
    items = len(right)
    low, high = wilson(sum(right), items)
    alone = Rate(items=items, rate=sum(right) / items, low=low, high=high)
    if reference is None:
        return alone
    only_model = sum(ours and not theirs for ours, theirs in zip(right, reference, strict=True))
    only_reference = sum(theirs and not ours for ours, theirs in zip(right, reference, strict=True))
    # Items are alike within each of three kinds, so to resample them is to draw how many of each kind there are.
    kinds = np.array([only_model, only_reference, items - only_model - only_reference]) / items
    drawn = np.random.default_rng(seed).multinomial(items, kinds, size=_RESAMPLES)
    difference_low, difference_high = np.percentile((drawn[:, 0] - drawn[:, 1]) / items, [2.5, 97.5])
    return replace(
        alone,
        reference=rate(reference),
        only_model=only_model,
        only_reference=only_reference,
        difference=(only_model - only_reference) / items,
        difference_low=float(difference_low),
        difference_high=float(difference_high),
        p_value=mcnemar(only_model, only_reference),
    )


def wilson(right: int, items: int) -> tuple[float, float]:
    """The 95 % interval of a fraction. Source: Wilson 1927.

    Args:
        right: items that count.
        items: all of them.
    """
    fraction, spread = right / items, _Z**2 / items
    middle = fraction + spread / 2
    half = _Z * math.sqrt(fraction * (1 - fraction) / items + spread / (4 * items))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return max(low, 0.0), min(high, 1.0)


def mcnemar(first: int, second: int) -> float:
    """The two-sided exact probability of a split at least as uneven, if both sides are equally likely.

    Args:
        first: items on one side.
        second: items on the other.
    """
    total, least = first + second, min(first, second)
    tail = sum(math.comb(total, count) for count in range(least + 1))
    return min(1.0, float(Fraction(tail, 2**total) * 2))
