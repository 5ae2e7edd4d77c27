"""The benchmark of requests in vLLM, with an interpreter that answers by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.trust.served_vllm import WAYS, main

from benchmarks.trust import served_vllm

ANSWER = {"requests": 9, "given_up": 2, "without_a_token": 1, "found": 64, "preempted": 3, "in_use": 0.0}


def test_every_model_and_way_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, python = {**ANSWER, "different": {"4": 7}, "mib": [1.0, 2.0, 5.0]}, tmp_path / "python"
    python.write_text(f"#!/bin/sh\nshift 2; echo \"$1\" >> {tmp_path}/asked; echo '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(served_vllm, "first_layers", lambda folder: folder)
    monkeypatch.setattr(served_vllm, "convert_toy", lambda source, folder, **target: folder)
    for _ in range(2):
        main(["--python", str(python), "--requests", "9", "--json", str(tmp_path / "kept.json")])
    rows = json.loads((tmp_path / "kept.json").read_text())["rows"]
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert len(asked) == len(rows) == 3 * len(WAYS) - 1  # the plugin does not serve the stock model
    assert {Path(one["model"]).name for one in asked} == {"stock", "heads", "latents"}
    assert rows["heads, exact"]["different"] == {"4": 7}
    assert rows["heads, exact"]["growth_mib"] == 3
    assert "heads, exact: 1 of 9 differ" in capsys.readouterr().out


def test_an_engine_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho 'KeyError: 7' >&2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(RuntimeError, match="status 3: KeyError: 7"):
        served_vllm.serve(str(tmp_path / "python"), tmp_path, "exact", 1)
