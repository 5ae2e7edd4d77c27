"""The benchmark of long runs, on short ones; and that it sees a cache that keeps something else than it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.trust.long import main
from benchmarks.trust.threads import Kind
from benchmarks.trust.toys import growth

from benchmarks.trust import long
from headwise.runtime.hf import HeadwiseCache


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(long, "SLIDING", (Kind("mistral", "headwise", "int8"),))
    monkeypatch.setattr(long, "CROPPED", (Kind("llama", "optimize"), Kind("mistral", "headwise")))
    monkeypatch.setattr(long, "TARGETS", (("llama", {"to": "mqa"}),))
    monkeypatch.setattr(long, "LEAST", 20)
    monkeypatch.setattr(long, "MOST", 40)

    def of(tokens: int, conversions: int) -> Any:
        main(["--tokens", str(tokens), "--conversions", str(conversions), "--json", str(tmp_path / "kept.json")])
        return json.loads((tmp_path / "kept.json").read_text())

    return of


def test_what_is_left_is_what_a_fresh_cache_holds(report: Any) -> None:
    result = report(5000, 2)
    assert list(result["decode"]) == [
        "mistral headwise int8, sliding",
        "llama optimize, cropped",
        "mistral headwise, cropped",
    ]
    for row in result["decode"].values():
        assert row["as_fresh"]
        assert row["tokens"] >= 5000 // 3
        assert len(row["mib"]) > 50
    assert result["decode"]["mistral headwise int8, sliding"]["kept"] > long.MOST  # all that it was given
    assert result["convert"]["different"] == []
    assert len(result["convert"]["mib"]) == 3


def test_what_a_crop_leaves_behind_is_told(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = HeadwiseCache.crop
    monkeypatch.setattr(HeadwiseCache, "crop", lambda cache, count: own(cache, count - 1))
    rows = report(600, 0)["decode"]
    assert [row["as_fresh"] for row in rows.values()] == [True, False, False]


def test_growth_is_that_of_a_warm_process() -> None:
    assert growth([*[100] * 20, *[200] * 20, *[201] * 160]) == 1
    assert growth([7]) == 0
