"""Dominated points, recommendations, and the tables that show them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.conversion.frontiers.candidate import Candidate, Kind, Tried
from headwise.conversion.frontiers.page import figure, markdown, tables, title
from headwise.conversion.frontiers.points import Frontier, advice, collect, dominates, shown

Spot = tuple[float, float]
WHOLE = 1000.0


def result(spot: Spot, texts: tuple[str, ...] = ("a/one.txt",), mechanism: str = "mla") -> dict[str, Any]:
    scores = [{"text": text, "perplexity_ratio": spot[1], "reference_perplexity": 9.0} for text in texts]
    return {
        "conversion": {
            "label": "MLA 1 + 2",
            "mechanism": mechanism,
            "seconds": 4.0,
            "calibration_tokens": 512,
            "calibration_window": 256,
        },
        "evaluation": {
            "cache_bytes_per_token": spot[0],
            "reference_cache_bytes_per_token": WHOLE,
            "perplexity_ratio": spot[1],
            "kl": 0.25,
            "kl_999": 2.5,
            "top1_agreement": 0.75,
            "top1_changed": 31,
            "tokens": 126,
            "window": 64,
            "dtype": "float32",
            "threads": 1,
            "texts": scores,
        },
        "cache": {"bytes_per_token": spot[0], "source_bytes_per_token": WHOLE},
    }


def plain(spot: Spot) -> dict[str, Any]:
    """The result of a format of the source's cache."""
    return {**result(spot), "conversion": None}


def found(
    candidates: Sequence[tuple[Tried, dict[str, Any]]], *, methods: bool = False, source: str = "my/model"
) -> Frontier:
    return collect(
        candidates,
        source=source,
        label="GQA 4/2 × 8",
        calibrate=("c.txt",),
        calibration_tokens=512,
        methods=methods,
        versions={"headwise": "0"},
        notes=[],
    )


def ladder(*spots: Spot) -> Frontier:
    return found([(Candidate(f"mla:0.{index + 1}"), result(spot)) for index, spot in enumerate(spots)])


@pytest.mark.parametrize(
    ("spots", "faint"),
    [
        ([(500.0, 1.2), (250.0, 1.5)], [False, False]),
        ([(500.0, 1.2), (400.0, 1.2)], [True, False]),
        ([(500.0, 1.2), (500.0, 1.3)], [False, True]),
        ([(500.0, 1.2), (500.0, 1.2)], [False, False]),  # one is as good as the other
        ([(1000.0, 1.0), (1000.0, 1.1), (2000.0, 1.0)], [False, True, True]),  # beside the source itself
        ([(1200.0, 0.9)], [False]),
        ([(250.0, math.inf), (500.0, 1.1)], [False, False]),
        ([(250.0, math.inf), (250.0, 7.0)], [True, False]),
    ],
)
def test_dominated(spots: list[Spot], faint: list[bool]) -> None:
    assert [point.dominated for point in ladder(*spots).points] == faint


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12))
def test_what_is_not_dominated_is_the_best_for_some_cache(spots: list[tuple[int, int]]) -> None:
    for spot in spots:
        best = min(ratio for size, ratio in spots if size <= spot[0])
        cheapest = min(size for size, ratio in spots if ratio <= spot[1])
        assert any(dominates(other, spot) for other in spots) == ((cheapest, best) != spot)


def test_a_ladder_is_shown_from_the_most_cache_to_the_least() -> None:
    points = shown(ladder((250.0, 1.5), (500.0, 1.3), (750.0, 1.1), (500.0, 1.2)))
    assert [(point.cache_bytes_per_token, point.perplexity_ratio) for point in points] == [
        (750.0, 1.1),
        (500.0, 1.2),
        (500.0, 1.3),
        (250.0, 1.5),
    ]


def test_advice_is_the_smallest_cache_within_each_loss() -> None:
    lines = advice(ladder((750.0, 1.04), (500.0, 1.15), (250.0, 1.6), (1000.0, 1.0)))
    assert lines == [
        "perplexity up by at most 5%: mla:0.1, 75.0% of the cache (× 1.040)",
        "perplexity up by at most 15%: mla:0.2, 50.0% of the cache (× 1.150)",
        "perplexity up by at most 50%: mla:0.2, 50.0% of the cache (× 1.150)",
    ]
    assert advice(ladder((750.0, 2.0)))[0].endswith(": nothing that was tried")


def test_of_the_folds_the_best_on_held_out_text_alone_is_shown_and_all_are_kept() -> None:
    ways = [Candidate("mla:0.5"), Candidate("mla:0.5", without=("refit",)), Candidate("mla:0.5", "mha2mla")]
    results = [(candidate, result((500.0, ratio))) for candidate, ratio in zip(ways, (1.1, 1.2, 3.0), strict=True)]
    # The exam would have another: a choice by it would be part of what it measures.
    folds = [
        (Candidate("mla:0.5", f"transmla:{fold}"), {**result((500.0, ratio)), "held_out_loss": loss})
        for fold, ratio, loss in ((1, 2.6, 3.2), (2, 2.4, 3.0), (4, 2.2, 3.1))
    ]
    all_ways = found(results + folds, methods=True)
    (table,) = tables(all_ways)
    assert table.heading[0] == "mla:0.5"
    assert [row[0] for row in table.rows] == [
        "original",
        "headwise",
        "without refit",
        "MHA2MLA",
        "TransMLA (fold 2)",
    ]
    assert len(all_ways.to_dict()["points"]) == 6
    assert title(all_ways) == "model: ways to convert to mla:0.5"
    assert advice(all_ways) == []


def test_a_broken_model_has_its_place_in_the_table_and_in_json() -> None:
    broken = ladder((250.0, math.inf), (500.0, 1.1))
    text = json.dumps(broken.to_dict(), allow_nan=False)
    assert json.loads(text)["points"][0]["perplexity_ratio"] is None
    assert "inf" in markdown(broken)
    assert all(math.isfinite(y) for line in figure(broken).axes[0].lines for y in line.get_ydata())


def test_the_table_has_each_text() -> None:
    candidates = [(Candidate("mqa"), result((500.0, 1.25), ("x/one.txt", "y/two.txt after 1,024 tokens"), "mqa"))]
    (table,) = tables(found(candidates))
    assert table.heading == (
        "",
        "attention",
        "kind",
        "cache B/token",
        "share",
        "× one.txt",
        "× two.txt",
        "KL",
        "99.9%",
        "top-1",
        "changed",
        "s",
    )
    assert table.rows[0] == ("original", "GQA 4/2 × 8", "", "1,000", "100%", "1", "1", "0", "0", "100%", "0", "")
    numbers = ("500", "50.0%", "1.2500", "1.2500", "0.2500", "2.5000", "75.0%", "31")
    assert table.rows[1] == ("mqa", "MLA 1 + 2", "converted", *numbers, "4")
    twins = [(Candidate("mqa"), result((500.0, 1.25), ("x/one.txt", "y/one.txt")))]
    assert tables(found(twins))[0].heading[5:7] == ("× x/one.txt", "× y/one.txt")


def test_the_table_has_formats_without_a_conversion() -> None:
    candidates = [(Candidate("kivi4"), plain((300.0, 1.25))), (Candidate("mla@0.25"), result((260.0, 1.25)))]
    (table,) = tables(found(candidates))
    assert table.rows[1][:5] == ("kivi4", "GQA 4/2 × 8", "quantised", "300", "30.0%")
    assert table.rows[1][-1] == ""
    assert table.rows[2][:5] == ("mla@0.25", "MLA 1 + 2", "both", "260", "26.0%")
    only_formats = found(candidates[:1])
    assert only_formats.points[0].mechanism == "GQA"
    assert only_formats.verdict == ()
    assert "No conversion used a calibration text" in markdown(only_formats)


def test_the_documents_have_the_verdict() -> None:
    candidates = [(Candidate("kivi4"), plain((300.0, 1.25))), (Candidate("mla@0.15"), result((150.0, 4.0)))]
    both = found(candidates)
    line = "of a bfloat16 cache: down to 30% quantise (×1.25), then down to 15% convert and quantise (×4)"
    assert f"- {line}\n" in markdown(both)
    document = both.to_dict()
    assert document["advice"][0] == line
    assert document["verdict"][1] == {
        "most": 0.3,
        "least": 0.15,
        "kinds": ["both"],
        "best": ["mla@0.15"],
        "ratio": 4.0,
    }
    assert [point["kind"] for point in document["points"]] == ["quantised", "both"]


def test_the_plot_has_the_points_of_each_kind_the_source_and_the_best_for_each_cache() -> None:
    candidates = [
        (Candidate("mla@0.5"), result((500.0, 1.1))),
        (Candidate("gqa:2"), result((500.0, 1.9), mechanism="gqa")),
        (Candidate("kivi2"), plain((125.0, 2.5))),
    ]
    frontier = found(candidates)
    axes = figure(frontier).axes[0]
    best, *marks, original = axes.lines
    assert best.get_label() == "best so far"
    assert list(best.get_xdata()) == [125.0, 500.0, 1000.0]
    assert list(best.get_ydata()) == pytest.approx([1.5, 0.1, 0.001])  # what is lost
    legend = [entry.get_label() for entry in axes.collections]
    assert legend == ["quantised", "converted", "converted and quantised"]
    names = [text.get_text() for text in axes.texts]
    assert names == ["kivi2", "gqa:2", "mla@0.5", "original"]
    assert [mark.get_alpha() for mark in marks] == [1.0, pytest.approx(0.4), 1.0]
    assert (list(original.get_xdata()), list(original.get_ydata())) == ([1000.0], [0.001])
    (table,) = tables(frontier)
    lost = ("1.9000", "0.2500", "2.5000", "75.0%", "31")
    assert table.rows[-2] == ("gqa:2", "MLA 1 + 2", "converted", "500", "50.0%", *lost, "4")
    assert table.marks == {len(table.rows) - 2: "faint"}
    assert axes.get_yscale() == axes.get_xscale() == "log"
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ["125\n12.5%", "250\n25%", "500\n50%", "1,000\n100%"]


@dataclass(frozen=True)
class Published:
    """A row that `headwise.frontier` did not make."""

    target: str = "Palu@0.5"
    kind: Kind = "published"
    way: str = "Palu"


def test_a_published_method_is_a_point_beside_the_others_though_its_kl_is_unknown() -> None:
    unknown = {**plain((500.0, 1.05))["evaluation"], "kl": math.nan, "top1_agreement": math.nan}
    del unknown["kl_999"], unknown["top1_changed"]
    rows: list[tuple[Tried, dict[str, Any]]] = [
        (Published(), {**plain((500.0, 1.05)), "label": "3 bits", "evaluation": unknown}),
        (Candidate("int8"), plain((530.0, 1.001))),
        (Candidate("mla@0.25"), result((250.0, 1.6))),
    ]
    for _, one in rows:
        one["evaluation"]["tokens"] = 1_000_000
    joined = found(rows)
    assert advice(joined)[0] == (
        "of a bfloat16 cache: down to 53% quantise (×1.001), then down to 50% use a published method "
        "(×1.05), then down to 25% convert and quantise (×1.6)"
    )
    (row,) = (cells for cells in tables(joined)[0].rows if cells[0] == "Palu@0.5")
    assert row[1:5] == ("3 bits", "published", "500", "50.0%")
    assert row[6:] == ("", "", "", "", "")
    document = json.loads(json.dumps(joined.to_dict(), allow_nan=False))
    assert [document["points"][0][name] for name in ("kl", "kl_999", "top1_changed")] == [None] * 3
    axes = figure(joined).axes[0]
    assert "published methods" in [entry.get_label() for entry in axes.collections]
    assert "Palu@0.5" in [text.get_text() for text in axes.texts]


@settings(max_examples=20, deadline=None)  # figures take their time
@given(st.lists(st.floats(0.5, 1e6), min_size=1, max_size=6))
def test_ticks_lie_on_the_axis_and_apart(ratios: list[float]) -> None:
    axes = figure(ladder(*((100.0 * (index + 1), ratio) for index, ratio in enumerate(ratios)))).axes[0]
    places = [math.log10(tick) for tick in axes.get_yticks()]
    low, high = map(math.log10, axes.get_ylim())
    end = max(10.0, min(ratios))  # a few points beyond must not press the others together
    within = [y for line in axes.lines for y in line.get_ydata() if y < end]
    assert all(low <= math.log10(y) <= high for y in within)
    assert high < math.log10(end) + 0.2
    assert len(places) <= 18
    assert all(other - one >= 0.03 * (high - low) for one, other in pairwise(places))
    assert low <= places[0]
    assert places[-1] <= high


def test_ratios_near_one_are_told_apart_and_ticks_name_ratios() -> None:
    axes = figure(ladder((500.0, 1.01), (250.0, 2.0), (300.0, 0.99))).axes[0]
    marks = [line.get_ydata()[0] for line in axes.lines[1:-1]]
    assert marks == pytest.approx([0.01, 0.001, 1.0])  # by size, and no loss as the least
    labels = [label.get_text() for label in axes.get_yticklabels()]
    named = dict(zip(labels, axes.get_yticks(), strict=True))
    assert named["≤ 1.001"] == pytest.approx(0.001)
    assert named["1.01"] == pytest.approx(0.01)
    assert named["2"] == 1


@settings(max_examples=20, deadline=None)  # figures take their time
@given(st.lists(st.floats(0.5, 1e6), min_size=1, max_size=6))
def test_ticks_of_methods_lie_on_the_axis_and_apart(ratios: list[float]) -> None:
    ways = found([(Candidate("mla:0.5"), result((500.0, ratio))) for ratio in ratios], methods=True)
    axes = figure(ways).axes[0]
    places = [math.log10(tick) for tick in axes.get_xticks()]
    low, high = map(math.log10, axes.get_xlim())
    assert all(low <= math.log10(ratio) <= high for ratio in (1.0, *ratios))
    assert 1.0 in axes.get_xticks()
    assert len(places) <= 15
    assert places == sorted(places)
    assert low <= places[0]
    assert places[-1] <= high
