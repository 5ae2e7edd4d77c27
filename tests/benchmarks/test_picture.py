"""The README's picture shows the results in the repository."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.picture import COLOURS, points, svg
from benchmarks.tables import RESULTS

DOCS = Path(__file__).parents[2] / "docs"


def test_it_is_what_the_results_give() -> None:
    by_method = points(json.loads((RESULTS / "conversion.json").read_text()))
    assert all(len(own) >= 3 for own in by_method.values())
    drawn = svg(by_method)
    assert drawn == (DOCS / "frontier.svg").read_text()
    circles = ElementTree.fromstring(drawn).findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == sum(map(len, by_method.values()))
    assert {circle.get("fill") for circle in circles} == {*COLOURS.values()}


def test_less_perplexity_lies_lower() -> None:
    drawn = ElementTree.fromstring(svg({name: [(0.25, 3.0), (0.5, 1.5)] for name in COLOURS}))
    first, second, *_ = drawn.findall("{http://www.w3.org/2000/svg}circle")
    assert float(second.get("cy") or 0) > float(first.get("cy") or 0)
    assert float(second.get("cx") or 0) > float(first.get("cx") or 0)
