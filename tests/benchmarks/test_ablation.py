"""The ablation, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import ablation, tables
from headwise.conversion import STAGES
from tests.real_models import save_tiny

TEXT = "Whatever is worth measuring is worth measuring twice, side by side; and saying how. "


def test_every_stage_is_left_out_in_turn(tmp_path: Path) -> None:
    cache, results = tmp_path / "cache", tmp_path / "ablation.json"
    cache.mkdir()
    for place, name in enumerate(("wikitext-2.train", "wikitext-2.test", "brown")):
        (cache / f"{name}.txt").write_text((TEXT[place:] + TEXT[:place]) * 40)
    options = [
        "--source",
        save_tiny(tmp_path / "source"),
        "--cache",
        cache,
        "--json",
        results,
        "--work",
        tmp_path / "work",
    ]
    options += ["--target", "mla:0.25"]  # below the size at which the cache is spread
    ablation.main([*map(str, options), "--tokens", "512", "--window", "64", "--windows", "2"])
    report = json.loads(results.read_text())
    ways = {point["way"] for point in report["points"]}
    assert {"headwise", "headwise without any stage", "mha2mla"} < ways
    assert all(any(f"without {stage}" in way for way in ways) for stage in STAGES)
    assert report["run"]["command"]
    assert tables.ablation(report).splitlines()[0].startswith("|  | wikitext-2.test | brown | KL")
