"""The benchmark of a large model, on a small one."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
from benchmarks.large import main

from benchmarks import large
from tests.warm import Warm, popen


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(large.SHAPE, "vocab_size", 128)
    monkeypatch.setattr(large, "WINDOWS", 2)
    monkeypatch.setattr(large, "WINDOW", 128)


def test_all_conversions_are_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "SPREAD", 2)
    monkeypatch.setattr(large, "Popen", popen)
    results = tmp_path / "large.json"
    options = ["--folder", str(tmp_path), "--layers", "3", "--hidden-size", "256", "--json", str(results)]
    main([*options, "--rows", "statistics"])
    main(options)
    assert list(tmp_path.iterdir()) == [results]
    report = json.loads(results.read_text())
    assert list(report["rows"]) == ["statistics", "text", "spread"]
    for row in report["rows"].values():
        assert row["calibration_tokens"] == 2 * 128
        assert row["peak_rss_gb"] > 0
        assert all(seconds > 0 for seconds in row["seconds_a_layer"].values())
    assert report["settings"]["source"]["num_hidden_layers"] == 3
    assert [row["layers"] for row in report["rows"].values()] == [3, 3, 2]


class KilledError(Exception):
    pass


def test_a_killed_conversion_goes_on_and_what_it_took_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "large.json"
    options = ["--layers", "6", "--hidden-size", "256", "--rows", "text", "--json", str(results)]
    place = tmp_path / "headwise-large" / "text"
    layers = place / ".out.headwise-partial" / "work" / "layers"
    running: list[Warm] = []

    def start(command: list[str], stdout: IO[str]) -> Warm:
        running.append(popen(command, stdout))
        return running[-1]

    def sleep(seconds: float) -> None:
        """Of the benchmark while it waits: kill both when two layers are done and it is noted what was spent."""
        time.sleep(seconds / 10)
        if len(running) == 1 and len(list(layers.glob("*.safetensors"))) >= 2 and (place / "spent.json").exists():
            running[0].send_signal(signal.SIGKILL)
            raise KilledError

    monkeypatch.setattr(large, "Popen", start)
    monkeypatch.setattr(large, "time", SimpleNamespace(sleep=sleep, perf_counter=time.perf_counter))
    with pytest.raises(KilledError):
        main(["--folder", str(tmp_path), *options])
    spent = json.loads((place / "spent.json").read_text())
    main(["--folder", str(tmp_path), *options])
    row = json.loads(results.read_text())["rows"]["text"]
    assert (spent["runs"], row["runs"]) == (1, 2)
    assert row["seconds"] > spent["seconds"] > 0
    assert row["peak_rss_gb"] >= spent["peak_rss_gb"] > 0
    assert list(tmp_path.iterdir()) == [results]
