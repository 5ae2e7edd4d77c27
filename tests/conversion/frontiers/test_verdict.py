"""At which sizes of the cache to quantise, to convert, or to do both."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.conversion.frontiers.candidate import Candidate
from headwise.conversion.frontiers.points import Measured, SizeRange, size_ranges, verdict_lines

TOKENS = 10_000


def measured(target: str, fraction: float, ratio: float, kl: float | None = None) -> Measured:
    return Measured(target, Candidate(target).kind, fraction, ratio, math.log(ratio) if kl is None else kl)


LADDER = [
    measured("int8", 0.53, 1.0002),
    measured("mla:0.5", 0.5, 1.06),
    measured("kivi4", 0.28, 1.03),
    measured("mla@0.25", 0.25, 1.08),
    measured("kivi3", 0.22, 1.4),
    measured("mla@0.15", 0.15, 1.3),
]


def test_the_ranges_of_a_ladder() -> None:
    assert size_ranges(LADDER, TOKENS) == (
        SizeRange(most=1.0, least=0.28, kinds=("quantised",), best=("int8", "kivi4"), ratio=1.03),
        SizeRange(most=0.28, least=0.15, kinds=("both",), best=("mla@0.25", "mla@0.15"), ratio=1.3),
    )
    assert verdict_lines(size_ranges(LADDER, TOKENS)) == [
        "of a bfloat16 cache: down to 28% quantise (×1.03), then down to 15% convert and quantise (×1.3)",
        "100% to 28%, quantise: int8, kivi4",
        "28% to 15%, convert and quantise: mla@0.25, mla@0.15",
    ]


def test_what_differs_by_chance_alone_is_as_good_and_the_least_work_is_named() -> None:
    near = [measured("kivi4", 0.28, 1.031), measured("mla@0.28", 0.28, 1.03), measured("mla@0.15", 0.15, 1.3)]
    (tie, rest) = size_ranges(near, TOKENS)
    assert tie.kinds == ("quantised", "both")
    assert tie.best == ("kivi4", "mla@0.28")
    assert rest.kinds == ("both",)
    assert verdict_lines((tie, rest))[:2] == [
        "of a bfloat16 cache: down to 28% quantise (×1.03), then down to 15% convert and quantise (×1.3)",
        "100% to 28%, quantise, or convert and quantise (no difference beyond chance): kivi4, mla@0.28",
    ]
    more_text = size_ranges(near, 100 * TOKENS)  # on which the same difference is none of chance
    assert [one.kinds for one in more_text] == [("both",)]
    assert verdict_lines(more_text)[0] == "of a bfloat16 cache: down to 15% convert and quantise (×1.3)"


def test_a_hundredth_of_the_bytes_is_no_difference_in_size() -> None:
    points = [measured("kivi3:32", 0.25, 1.1), measured("mla@0.25", 0.251, 1.05), measured("mla@0.15", 0.15, 1.3)]
    assert [one.kinds for one in size_ranges(points, TOKENS)] == [("both",)]
    points[1] = measured("mla@0.26", 0.26, 1.05)
    assert [one.kinds for one in size_ranges(points, TOKENS)] == [("both",), ("quantised",), ("both",)]


def test_the_sentence_joins_ranges_that_ask_for_the_same() -> None:
    ranges = (
        SizeRange(most=1.0, least=0.5, kinds=("quantised",), best=("int8",), ratio=1.0),
        SizeRange(most=0.5, least=0.28, kinds=("quantised", "both"), best=("kivi4", "mla@0.28"), ratio=1.031),
        SizeRange(most=0.28, least=0.0625, kinds=("both",), best=("mla@0.0625",), ratio=1.3152),
    )
    assert verdict_lines(ranges)[0] == (
        "of a bfloat16 cache: down to 28% quantise (×1.031), then down to 6.25% convert and quantise (×1.315)"
    )


@pytest.mark.parametrize(
    "points",
    [
        [],
        [measured("int8", 0.53, 1.0), measured("kivi4", 0.28, 1.03)],  # nothing else was tried
        [measured("int8", 0.53, 1.0), measured("mla:0.5", 1.0, 1.0)],  # as large as the source
        [measured("int8", 0.53, 1.0), measured("mqa", 0.3, math.inf, 9.0)],
    ],
)
def test_without_two_kinds_to_choose_between_there_is_no_verdict(points: list[Measured]) -> None:
    assert size_ranges(points, TOKENS) == ()
    assert verdict_lines(()) == []


TARGETS = st.sampled_from(["int8", "kivi4", "mla:0.5", "mqa", "mla@0.25", "same@0.2"])


@given(st.lists(st.builds(measured, TARGETS, st.sampled_from([0.1, 0.2, 0.4, 0.8]), st.floats(1.0, 9.0)), max_size=9))
def test_the_ranges_cover_all_sizes_and_name_the_best_of_each(points: list[Measured]) -> None:
    ranges = size_ranges(points, TOKENS)
    if len({point.kind for point in points}) < 2:
        assert ranges == ()
        return
    assert ranges[0].most == 1.0
    assert ranges[-1].least == min(point.fraction for point in points)
    assert [one.least for one in ranges[:-1]] == [one.most for one in ranges[1:]]
    assert all(one.kinds != other.kinds for one, other in pairwise(ranges))
    for one in ranges:
        for size in {point.fraction for point in points if one.least <= point.fraction < one.most}:
            best = min((point for point in points if point.fraction <= size), key=lambda point: point.ratio)
            assert best.kind in one.kinds
        assert one.ratio == min(point.ratio for point in points if point.fraction <= one.least)
