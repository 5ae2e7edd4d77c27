"""The benchmark of all ways on small models, with a tiny one in their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import small_models, tables, ways
from tests.real_models import save_tiny


def test_each_model_is_a_row_and_a_killed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(small_models.MODELS, "tiny", lambda folder, cache: save_tiny(folder))
    monkeypatch.setitem(ways.WINDOWS, "tiny", 64)
    cache, file = tmp_path / "cache", tmp_path / "ways.json"
    cache.mkdir()
    for name in ("wikitext-2.train", "wikitext-2.test", "brown"):
        (cache / f"{name}.txt").write_text("".join(f"Sentence {place} of {name} ends here. " for place in range(60)))
    command = ["tiny", "--cache", str(cache), "--work", str(tmp_path / "w"), "--json", str(file)]
    command += ["--tokens", "256", "--scored", "128", "--targets", "int2", "int8", "same@0.3"]
    ways.main(command)
    document = json.loads(file.read_text())
    assert list(document["rows"]) == ["tiny"]
    shown = tables.ways(document).splitlines()
    assert shown[0] == "| model | way | bytes | WikiText-2 | Brown |"
    assert [line.split(" | ")[1] for line in shown[2:]] == ["`int8`", "`int2`", "`same@0.3`"]  # the largest first
    fractions = [float(line.split(" | ")[2].removesuffix(" %")) for line in shown[2:]]
    assert fractions == sorted(fractions, reverse=True)
    capsys.readouterr()
    ways.main(command)
    assert capsys.readouterr().out == ""
