"""How often a model is right, with an interval, and paired with its reference on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

_Z = 1.959963984540054
_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A fraction of items, with its 95 % interval; the rest is None without a reference.

    Attributes:
        items: how many.
        rate: the fraction the model has right.
        low: of its Wilson interval.
        high: of its Wilson interval.
        reference_rate: the fraction the reference has right.
        only_model: items that only the model has right.
        only_reference: items that only the reference has right.
        difference: the model's rate less the reference's.
        difference_low: of its bootstrap interval, items resampled.
        difference_high: of its bootstrap interval.
        p_value: McNemar's exact test: how likely so uneven a split of the items that only one has right is by chance.
    """

    items: int
    rate: float
    low: float
    high: float
    reference_rate: float | None = None
    reference_low: float | None = None
    reference_high: float | None = None
    only_model: int | None = None
    only_reference: int | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None


def rate(right: Sequence[bool], reference: Sequence[bool] | None = None, *, seed: int = 0) -> Rate:
    """The rate of a list of rights and wrongs, and what a reference's list over the same items says about it.

    Args:
        right: one an item, at least one.
        reference: the same items.
        seed: of the resampling.
    """
    items = len(right)
    low, high = wilson(sum(right), items)
    if reference is None:
        return Rate(items=items, rate=sum(right) / items, low=low, high=high)
    only_model = sum(own and not other for own, other in zip(right, reference, strict=True))
    only_reference = sum(other and not own for own, other in zip(right, reference, strict=True))
    reference_low, reference_high = wilson(sum(reference), items)
    # Items are alike within each of three kinds, so to resample them is to draw how many of each kind there are.
    kinds = np.array([only_model, only_reference, items - only_model - only_reference]) / items
    drawn = np.random.default_rng(seed).multinomial(items, kinds, size=_RESAMPLES)
    difference_low, difference_high = np.percentile((drawn[:, 0] - drawn[:, 1]) / items, [2.5, 97.5])
    return Rate(
        items=items,
        rate=sum(right) / items,
        low=low,
        high=high,
        reference_rate=sum(reference) / items,
        reference_low=reference_low,
        reference_high=reference_high,
        only_model=only_model,
        only_reference=only_reference,
        difference=(only_model - only_reference) / items,
        difference_low=float(difference_low),
        difference_high=float(difference_high),
        p_value=mcnemar(only_model, only_reference),
    )


def wilson(right: int, items: int) -> tuple[float, float]:
    """The 95 % interval of a fraction. Source: Wilson 1927."""
    share, spread = right / items, _Z**2 / items
    middle = share + spread / 2
    half = _Z * math.sqrt(share * (1 - share) / items + spread / (4 * items))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return max(low, 0.0), min(high, 1.0)


def mcnemar(first: int, second: int) -> float:
    """The two-sided exact probability of so uneven a split or a worse one, when either side is as likely."""
    total, least = first + second, min(first, second)
    tail = sum(math.comb(total, count) for count in range(least + 1))
    return min(1.0, float(Fraction(tail, 2**total) * 2))
