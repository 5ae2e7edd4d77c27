"""Rows of a results file are written at once and read again, and all have the same settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.kept import Kept, OtherSettingsError


def test_a_row_is_kept_at_once_with_what_it_was_run_on_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.json"
    kept = Kept(path, {"tokens": 4, "texts": ("x", "y")})
    assert not path.exists()
    kept.add("one", {"value": 1.5})
    assert json.loads(path.read_text())["rows"]["one"]["value"] == 1.5
    again = Kept(path, {"tokens": 4, "texts": ("x", "y")})
    assert again.rows["one"]["value"] == 1.5
    assert {"commit", "command", "machine", "versions"} == set(again.rows["one"]["run"])
    again.add("two", {"value": 2})
    again.add("one", {"value": 3})
    assert {name: row["value"] for name, row in Kept(path, {"tokens": 4}).rows.items()} == {"one": 3, "two": 2}
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_runs_at_the_same_time_keep_each_others_rows(tmp_path: Path) -> None:
    one, other = (Kept(tmp_path / "a.json", {"tokens": 4}) for _ in range(2))
    one.add("one", {"value": 1})
    other.add("two", {"value": 2})
    one.add("three", {"value": 3})
    assert list(Kept(tmp_path / "a.json", {"tokens": 4}).rows) == ["one", "two", "three"]


def test_rows_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    Kept(path, {"tokens": 4}).add("one", {})
    before = path.read_bytes()
    with pytest.raises(OtherSettingsError, match="tokens = 4, not 5"):
        Kept(path, {"tokens": 5})
    assert path.read_bytes() == before
