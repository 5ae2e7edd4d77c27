"""One total over layers: the best allocation, compared with every possible one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.conversion.budget.allocation import REFINED, Choice, Node, allocate, coded_curve, curve, step_of
from headwise.errors import ArgumentError


def exponential(scale: float, share: int = 128, decay: float = 40.0) -> list[Choice]:
    """A layer whose loss is ``scale · e^(−values / decay)``, in steps of 8."""
    return [
        Choice(steps, Node(share + 8 * steps - 32, 32, scale * math.exp(-(share + 8 * steps) / decay)))
        for steps in range(-8, 9)
    ]


def test_layers_that_decay_alike_end_with_equal_slopes() -> None:
    """The optimum of Σ c·e^(−v/τ) is v = mean + τ·ln(c / geometric mean), here in whole steps."""
    scales = [math.exp(8 * k / 40) for k in (-3, -1, 0, 4)]
    allocation = allocate([exponential(scale) for scale in scales])
    assert [node.values - 128 for node in allocation] == [-24, -8, 0, 32]


def test_layers_that_are_alike_stay_even() -> None:
    assert [node.values for node in allocate([exponential(0.3)] * 5)] == [128] * 5


losses = st.floats(0, 10, allow_nan=False)


@given(st.lists(st.lists(st.tuples(st.integers(-3, 3), losses), min_size=1, max_size=4), min_size=1, max_size=4))
def test_no_allocation_loses_less(layers: list[list[tuple[int, float]]]) -> None:
    """Any losses, also such that are neither convex nor falling."""
    curves = [[Choice(0, Node(64, 32, 5.0)), *(Choice(k, Node(64 + 8 * k, 32, x)) for k, x in own)] for own in layers]
    every = [
        allocation for allocation in itertools.product(*curves) if sum(choice.steps for choice in allocation) == 0
    ]
    least = min(math.fsum(choice.node.loss for choice in allocation) for allocation in every)
    allocation = allocate(curves)
    assert sum(node.values for node in allocation) == 96 * len(curves)
    assert math.fsum(node.loss for node in allocation) == pytest.approx(least, abs=1e-12)


def test_what_cannot_be_spent_is_refused() -> None:
    for steps in (1, -1):
        with pytest.raises(ArgumentError, match="sum to 0"):
            allocate([[Choice(steps, Node(8, 2, 1.0))], [Choice(0, Node(8, 2, 1.0))]])
    with pytest.raises(ArgumentError, match="at least one choice"):
        allocate([[Choice(0, Node(8, 2, 1.0))], []])


def test_a_curve_goes_through_what_was_measured_and_is_exponential_between() -> None:
    nodes = [Node(64, 32, 0.08), Node(96, 32, 0.02), Node(128, 32, 0.01)]
    points = curve(nodes, 128, 8)
    assert [choice.steps for choice in points] == list(range(-4, 5))
    by_rank = {choice.node.rank: choice.node.loss for choice in points}
    assert [by_rank[rank] for rank in (64, 96, 128)] == pytest.approx([0.08, 0.02, 0.01])
    assert by_rank[80] == pytest.approx(0.04)
    assert all(choice.node.values == 128 + 8 * choice.steps for choice in points)


def test_a_curve_takes_the_better_rotary_width_and_never_rises() -> None:
    losses = {16: (0.08, 0.01, 0.01), 32: (0.04, 0.02, 0.04), 48: (0.16, 0.01, 0.001)}
    nodes = [
        Node(rank, rotary, x) for rotary in losses for rank, x in zip((64, 96, 128), losses[rotary], strict=True)
    ]
    by_values = {choice.node.values: choice.node for choice in curve(nodes, 128, 8)}
    assert sorted(by_values) == list(range(80, 177, 8))
    assert (by_values[96].rank, by_values[96].rotary) == (80, 16)
    assert by_values[96].loss == pytest.approx(math.sqrt(0.08 * 0.01))
    assert (by_values[112].rank, by_values[112].rotary) == (96, 16)
    assert by_values[160].rotary == 48  # not (128, 32), whose loss is that of 96
    assert by_values[160].loss == pytest.approx(math.sqrt(0.01 * 0.001))


def test_between_two_rotary_widths_the_loss_is_their_geometric_mean() -> None:
    nodes = [Node(rank, rotary, x) for rotary, x in ((16, 0.04), (32, 0.01)) for rank in (64, 72)]
    by_values = {choice.node.values: choice.node for choice in curve(nodes, 96, 8)}
    assert by_values[88] == Node(64, 24, pytest.approx(0.02))


def test_small_layers_go_in_small_steps() -> None:
    points = curve([Node(8, 4, 1.0), Node(12, 4, 0.5), Node(16, 4, 0.25)], 16, step_of([16, 16]))
    assert [(choice.steps, choice.node.values) for choice in points] == [(k, 16 + 2 * k) for k in range(-2, 3)]


def test_a_total_is_kept_where_some_layers_are_small() -> None:
    """A small layer gains much by growing, and a large one beside it loses nothing by shrinking."""
    assert step_of([48, 96]) == 8
    shares = [24, 96]
    small = [Node(16, 4, 3.0), Node(20, 4, 1.0), Node(30, 4, 0.1)]
    large = [Node(64, 16, 0.1), Node(80, 16, 0.1), Node(96, 16, 0.1)]
    allocation = allocate(
        [curve(nodes, share, step_of(shares)) for nodes, share in zip((small, large), shares, strict=True)]
    )
    assert [node.values for node in allocation] == [34, 86]


def test_a_layer_that_loses_nothing_has_a_curve() -> None:
    assert [choice.node.loss for choice in curve([Node(64, 32, 0.0), Node(80, 32, 0.0)], 96, 8)] == [0.0] * 3


def test_a_size_that_will_be_refined_counts_for_less() -> None:
    """Of a source's 100 values, a layer of 40 loses less when it is refined, and one of 90 is not refined."""
    for rank, left in ((30, REFINED), (80, 1.0)):
        nodes, rounding = [Node(rank, 10, 1.0), Node(rank + 1, 10, 1.0)], [(2.0, 1e-9), (8.0, 1e-9)]
        found = coded_curve(nodes, rounding, values=100, share=60, step=2)
        assert [choice.node.loss for choice in found] == pytest.approx([left] * len(found))
