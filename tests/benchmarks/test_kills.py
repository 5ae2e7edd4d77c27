"""The benchmark of kills, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.kills import main, phase

from tests.real_models import save_tiny


def test_every_output_is_the_undisturbed_one(tmp_path: Path) -> None:
    results, text = tmp_path / "kills.json", tmp_path / "text.txt"
    text.write_text("".join(f"{index} bottles stand on the wall, and {index * 7} more. " for index in range(60)))
    options = ["--source", save_tiny(tmp_path / "source"), "--calibrate", text, "--tokens", "512", "--kills", "2"]
    main([*map(str, options), "--folder", str(tmp_path), "--json", str(results)])
    report = json.loads(results.read_text())
    assert len(report["kills"]) == sum(report["phases"].values()) == 2
    assert report["identical"]
    assert report["run"].keys() == {"commit", "command", "machine", "versions"}
    assert not (tmp_path / "headwise-kills").exists()


def test_what_a_killed_run_was_doing(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / ".out.headwise-partial" / "work"
    assert phase(out) == "starting"
    (work / "sensitivities").mkdir(parents=True)
    assert phase(out) == "weighing"
    (work / "activations.json").write_text('{"layer": 1}')
    assert phase(out) == "spreading"
    (work / "spread.json").write_text("{}")
    (work / "layers").mkdir()
    for index, said in enumerate(("converting", "between a layer's result and its activations")):
        (work / "layers" / f"layer-{index}.safetensors").write_text("")
        assert phase(out) == said
    out.mkdir()
    assert phase(out) == "done"
