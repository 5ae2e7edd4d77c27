"""The benchmark of planted facts on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recall, tables
from headwise.base.options.evaluate import DEPTHS
from tests.real_models import save_tiny


def test_each_cache_and_depth_is_a_row_and_a_killed_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("wikitext-2.train", "wikitext-2.test"):
        (cache / f"{name}.txt").write_text("".join(f"Sentence {place} of {name} ends here. " for place in range(60)))
    kept = tmp_path / "recall.json"
    command = ["--source", str(save_tiny(tmp_path / "source")), "--cache", str(cache), "--work", str(tmp_path / "w")]
    command += ["--json", str(kept), "--tokens", "256", "--context", "200", "--trials", "2"]
    recall.main([*command, "--caches", "own", "int8"])
    names = ("own", "int8", "same@0.3", "mla:0.5 without recall", "mla:0.5 on 300")
    recall.main([*command, "--caches", *names])
    document = json.loads(kept.read_text())
    assert list(document["rows"]) == [f"{name}/{depth}" for name in names for depth in DEPTHS]
    assert [row["cache"] for row in document["rows"].values()][:: len(DEPTHS)] == [None, "int8", None, None, None]
    converted = sorted(folder.parent.name for folder in (tmp_path / "w").glob("*/config.json"))
    assert converted == [
        *("source-mla-values-0.5-300", "source-mla-values-0.5-without-recall-256", "source-same-0.3-256"),
    ]
    shown = tables.recall(document).splitlines()
    assert [line.split(" | ")[0] for line in shown[2:]] == [
        "| the model's own",
        *(f"| `{name}`" for name in names[1:]),
    ]
    assert all(line.count(" | ") == len(DEPTHS) for line in shown)
    capsys.readouterr()
    recall.main([*command, "--caches", *names])
    assert capsys.readouterr().out == ""
    recall.main(
        [*command[:-6], "--json", str(tmp_path / "keys.json"), *command[-6:], "--caches", "own", "--keys", "2"]
    )
    keyed = json.loads((tmp_path / "keys.json").read_text())
    assert {row["keys"] for row in keyed["rows"].values()} == {2}
    more = ("--caches", "own", "--strings", "8", "--together")
    recall.main([*command[:-6], "--json", str(tmp_path / "strings.json"), *command[-6:], *more])
    strings = json.loads((tmp_path / "strings.json").read_text())
    assert list(strings["rows"]) == [f"own/{depth}" for depth in DEPTHS]
    for row in strings["rows"].values():
        assert (row["strings"], row["together"], len(row["depths"])) == (8, True, 1)
