"""The fraction of items that a model has right, with an interval, and its difference from the reference's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from headwise.measure.evaluation.paired_results import Paired

_Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""
_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Rate(Paired, compared=("rate", "low", "high")):
    """The fraction of items that a model has right with its 95 % interval, and its difference from the reference's.

    Without a reference ``only_model`` and the attributes after it are None.

    Attributes:
        items: the number of items.
        rate: the fraction that the model has right.
        low: lower end of its Wilson interval.
        high: upper end of its Wilson interval.
        only_model: items that only the model has right.
        only_reference: items that only the reference has right.
        difference: the model's rate minus the reference's.
        difference_low: lower end of its 95 % bootstrap interval over items.
        difference_high: upper end of that interval.
        p_value: of McNemar's exact test: the probability that the items which only one of the two has right are split
            so unevenly by chance.
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
        right: for each item whether the model has it right; not empty.
        reference: for each item whether the reference has it right.
        seed: of the bootstrap interval.
    """
    items = len(right)
    low, high = wilson(sum(right), items)
    alone = Rate(items=items, rate=sum(right) / items, low=low, high=high)
    if reference is None:
        return alone
    only_model = sum(model and not other for model, other in zip(right, reference, strict=True))
    only_reference = sum(other and not model for model, other in zip(right, reference, strict=True))
    # The difference depends only on the numbers of items of three kinds, and resampling items with replacement draws
    # these numbers from a multinomial distribution.
    shares = np.array([only_model, only_reference, items - only_model - only_reference]) / items
    counts = np.random.default_rng(seed).multinomial(items, shares, size=_RESAMPLES)  # [resamples, 3]
    difference_low, difference_high = np.percentile((counts[:, 0] - counts[:, 1]) / items, [2.5, 97.5])
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
        right: the number of items that count.
        items: the number of all items.

    Returns:
        The lower and the upper end.
    """
    fraction, spread = right / items, _Z**2 / items
    middle = fraction + spread / 2
    half = _Z * math.sqrt(fraction * (1 - fraction) / items + spread / (4 * items))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return max(low, 0.0), min(high, 1.0)


def mcnemar(first: int, second: int) -> float:
    """The two-sided p-value of McNemar's exact test: the probability of a split at least as uneven by chance.

    Args:
        first: the number of items on one side.
        second: the number of items on the other side.
    """
    total, least = first + second, min(first, second)
    tail = sum(math.comb(total, count) for count in range(least + 1))
    return min(1.0, float(Fraction(tail, 2**total) * 2))
