"""The README's picture shows the results in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.picture import FAINT, RATIOS, Series, series, svg
from benchmarks.tables import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def spots(drawn: str) -> list[tuple[float, float]]:
    circles = ElementTree.fromstring(drawn).findall(f"{SVG}circle")
    return [(float(circle.get("cx") or 0), float(circle.get("cy") or 0)) for circle in circles]


def one(*points: tuple[float, float], ranges: tuple[tuple[float, float], ...] = ()) -> Series:
    return Series(label="one", colour="#112233", points=points, ranges=ranges)


def test_it_is_what_the_results_give() -> None:
    found = series(RESULTS)
    drawn = svg(found)
    assert drawn == (DOCS / "frontier.svg").read_text(encoding="utf-8")
    assert len(spots(drawn)) == sum(ratio <= RATIOS[-1] for own in found for _, ratio in own.points)
    for own in found:
        assert f">{own.label}</text>" in drawn


def test_less_perplexity_lies_lower_and_less_cache_further_left() -> None:
    (small, large, tiny_loss) = spots(svg([one((0.25, 2.0), (0.5, 1.01), (0.6, 1.0))]))
    assert small[0] < large[0] < tiny_loss[0]
    assert small[1] < large[1] < tiny_loss[1]
    assert large[1] - small[1] > 100  # pixels between 1.01 and 2


def test_what_is_beyond_the_axis_has_no_point() -> None:
    drawn = svg([one((0.25, 4.0), (0.5, 1.5))])
    assert len(spots(drawn)) == 1
    (line,) = ElementTree.fromstring(drawn).findall(f"{SVG}g/{SVG}polyline")
    assert len((line.get("points") or "").split()) == 2  # and is cut off where the plot ends


def test_a_point_that_a_smaller_cache_is_as_good_as_is_faint_and_off_the_line() -> None:
    drawn = svg([one((0.2, 1.3), (0.25, 1.4), (0.5, 1.1))])
    assert re.findall(r"<circle[^>]*>", drawn)[1].endswith(f"{FAINT}/>")
    assert drawn.count(FAINT) == 1
    (line,) = ElementTree.fromstring(drawn).findall(f"{SVG}g/{SVG}polyline")
    assert len((line.get("points") or "").split()) == 2


def test_the_range_of_samples_is_a_line_through_the_point() -> None:
    drawn = svg([one((0.25, 1.2), (0.5, 1.1), ranges=((1.15, 1.3), (1.1, 1.1)))])
    (line,) = ElementTree.fromstring(drawn).findall(f"{SVG}g/{SVG}line")
    place = spots(drawn)[0]
    assert float(line.get("x1") or 0) == place[0]
    assert float(line.get("y2") or 0) < place[1] < float(line.get("y1") or 0)
