"""The benchmark of kills, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.trust.kills import main, phase

import headwise
from benchmarks.trust import kills
from tests import warm
from tests.real_models import save_tiny


@pytest.mark.parametrize("is_healed", [False, True])
def test_every_output_is_the_undisturbed_one(
    is_healed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "Popen", warm.popen)
    warm.run("-c", "")  # what is timed is then a run, and not the start of the process that it is forked from
    results, text = tmp_path / "kills.json", tmp_path / "text.txt"
    text.write_text("".join(f"{index} bottles stand on the wall, and {index * 7} more. " for index in range(60)))
    options = ["--source", save_tiny(tmp_path / "source"), "--calibrate", text, "--tokens", "512", "--kills", "2"]
    if is_healed:
        headwise.convert(tmp_path / "source", tmp_path / "half", to="mla", kv_budget=0.5, evaluate=False)
        options += ["--heal", tmp_path / "half"]
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


def test_what_a_killed_healing_was_doing(tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.headwise-partial"
    for said, file in (("training", "work/layer-00000.safetensors"), ("writing", "model/model.safetensors")):
        (partial / file).parent.mkdir(parents=True)
        (partial / file).write_text("")
        assert phase(out) == said
