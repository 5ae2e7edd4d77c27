"""Intervals and paired tests, against their definitions."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from headwise.measure.evaluation import compare_rates
from headwise.measure.evaluation.results import mcnemar_p_value, wilson_interval


def test_a_rate_alone() -> None:
    summary = compare_rates([True, False, True, True])
    assert (summary.items, summary.rate) == (4, 0.75)
    assert summary.reference is summary.difference is summary.p_value is None


@pytest.mark.parametrize(("right", "items"), [(0, 5), (5, 5), (330, 500), (1, 1)])
def test_wilson_holds_the_fractions_whose_score_test_accepts_what_was_seen(right: int, items: int) -> None:
    low, high = wilson_interval(right, items)
    assert 0 <= low <= right / items <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            assert abs(right / items - bound) / math.sqrt(bound * (1 - bound) / items) == pytest.approx(
                1.96, abs=1e-3
            )


@pytest.mark.parametrize(("first", "second"), [(0, 0), (3, 0), (2, 5), (5, 2), (4, 4)])
def test_mcnemar_counts_every_split_as_uneven(first: int, second: int) -> None:
    total = first + second
    splits = [sum(sides) for sides in product((0, 1), repeat=total)]
    extreme = [split for split in splits if abs(2 * split - total) >= abs(first - second)]
    assert mcnemar_p_value(first, second) == pytest.approx(len(extreme) / len(splits))


def test_mcnemar_of_many_items_is_no_overflow() -> None:
    assert 0 <= mcnemar_p_value(900, 1500) < 1e-30


def test_a_paired_rate_is_a_bootstrap_of_items() -> None:
    random = np.random.default_rng(1)
    right = (random.random(400) < 0.7).tolist()
    reference = [own if random.random() < 0.8 else not own for own in right]
    summary = compare_rates(right, reference, seed=5)
    both = np.array(right, float), np.array(reference, float)
    assert summary.difference == pytest.approx(float(both[0].mean() - both[1].mean()))
    assert summary.reference is not None
    assert summary.reference.rate == pytest.approx(float(both[1].mean()))
    assert summary.only_model == int((both[0] > both[1]).sum())
    assert summary.only_reference == int((both[0] < both[1]).sum())
    picked = random.integers(0, 400, (5000, 400))
    low, high = np.percentile((both[0] - both[1])[picked].mean(1), [2.5, 97.5])
    assert summary.difference_low == pytest.approx(low, abs=0.006)
    assert summary.difference_high == pytest.approx(high, abs=0.006)
    assert summary == compare_rates(right, reference, seed=5)


def test_equal_answers_have_no_difference() -> None:
    summary = compare_rates([True, False] * 5, [True, False] * 5)
    assert (summary.difference, summary.difference_low, summary.difference_high, summary.p_value) == (0, 0, 0, 1)
