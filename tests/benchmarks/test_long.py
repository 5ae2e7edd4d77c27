"""The benchmark of long contexts goes on with what is not kept yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.kept import Kept
from benchmarks.long import convert, measure

import headwise
from headwise.evaluation import open_pair
from tests.real_models import save_tiny


def test_each_text_and_depth_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, text = save_tiny(tmp_path / "source"), tmp_path / "text.txt"
    text.write_text("".join(f"{index} bottles stand on the wall, and {index * 7} more. " for index in range(60)))
    settings = {"context": 200, "windows": 2, "trials": 1, "seed": 0, "source": str(source), "kv_budget": 0.5}
    settings |= {"calibration_tokens": 256, "calibration_window": 128}
    for _ in range(2):
        convert(tmp_path / "out", text, Kept(tmp_path / "kept.json", settings))
        monkeypatch.setattr(headwise, "convert", None)
    pair = open_pair(tmp_path / "out", against=source)
    measure(pair, {"one": text}, Kept(tmp_path / "kept.json", settings), depths=(0.0, 1.0))
    kept = Kept(tmp_path / "kept.json", settings)
    assert set(kept.rows) == {"conversion", "text/one", "planted/0.0", "planted/1.0"}
    assert kept.rows["text/one"]["texts"][0]["by_position"][-1]["stop"] == 200
    assert kept.rows["planted/1.0"]["depths"][0]["depth"] == 1.0
    monkeypatch.setattr("benchmarks.long.evaluate", None)
    measure(pair, {"one": text}, kept, depths=(0.0, 1.0))
