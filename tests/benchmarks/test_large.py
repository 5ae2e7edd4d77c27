"""The benchmark of a large model, on a small one."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.large import WINDOW, WINDOWS, main


def test_both_conversions_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    kept = tmp_path / "large.json"
    given = ["--folder", str(tmp_path), "--layers", "2", "--hidden-size", "256", "--json", str(kept)]
    main([*given, "--rows", "statistics"])
    main(given)
    assert list(tmp_path.iterdir()) == [kept]
    found = json.loads(kept.read_text())
    assert list(found["rows"]) == ["statistics", "text"]
    for row in found["rows"].values():
        assert row["calibration_tokens"] == WINDOWS * WINDOW
        assert row["peak_rss_gb"] > 0
        assert all(seconds > 0 for seconds in row["seconds_a_layer"].values())
    assert found["settings"]["source"]["num_hidden_layers"] == 2
