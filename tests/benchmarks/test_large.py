"""The benchmark of a large model, on a small one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.large import WINDOW, WINDOWS, main

from benchmarks import large


def test_all_conversions_are_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "SPREAD", 2)
    results = tmp_path / "large.json"
    options = ["--folder", str(tmp_path), "--layers", "3", "--hidden-size", "256", "--json", str(results)]
    main([*options, "--rows", "statistics"])
    main(options)
    assert list(tmp_path.iterdir()) == [results]
    report = json.loads(results.read_text())
    assert list(report["rows"]) == ["statistics", "text", "spread"]
    for row in report["rows"].values():
        assert row["calibration_tokens"] == WINDOWS * WINDOW
        assert row["peak_rss_gb"] > 0
        assert all(seconds > 0 for seconds in row["seconds_a_layer"].values())
    assert report["settings"]["source"]["num_hidden_layers"] == 3
    assert [row["layers"] for row in report["rows"].values()] == [3, 3, 2]


def test_a_killed_conversion_goes_on_and_what_it_took_is_counted(tmp_path: Path) -> None:
    results = tmp_path / "large.json"
    sizes = ["--layers", "6", "--hidden-size", "256", "--rows", "text", "--json", str(results)]
    command = [sys.executable, "-m", "benchmarks.large", "--folder", str(tmp_path), *sizes]
    place = tmp_path / "headwise-large" / "text"
    layers = place / ".out.headwise-partial" / "work" / "layers"
    with subprocess.Popen(command, start_new_session=True) as running:
        while len(list(layers.glob("*.safetensors"))) < 2:
            assert running.poll() is None
            time.sleep(0.05)
        time.sleep(1)  # until it is noted what was spent
        os.killpg(running.pid, signal.SIGKILL)
    spent = json.loads((place / "spent.json").read_text())
    main(["--folder", str(tmp_path), *sizes])
    row = json.loads(results.read_text())["rows"]["text"]
    assert (spent["runs"], row["runs"]) == (1, 2)
    assert row["seconds"] > spent["seconds"] > 0
    assert row["peak_rss_gb"] >= spent["peak_rss_gb"] > 0
    assert list(tmp_path.iterdir()) == [results]
