"""benchmarks.speed on tiny shapes: what it counts and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import speed
from tests.threads import one_thread

__all__ = ["one_thread"]

TINY = {"hidden_size": 256, "intermediate_size": 96, "num_key_value_heads": 4}


def test_layers_count_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed.MODELS, "tiny", TINY)
    row = speed.layers("tiny", 40, 2)
    projections = 256 * 256 * 2 + 2 * 256 * 32
    assert row["weights_bytes"] == 4 * 2 * (projections + 3 * 256 * 96)
    assert row["cache_bytes"] == 4 * torch.zeros(2, 4, 40, 8, dtype=torch.bfloat16).nbytes
    assert row["attention_of_limit"] == pytest.approx(
        row["attention_ms"] / 1e3 * row["read_bytes_per_second"] / row["cache_bytes"]
    )


def test_a_prompts_memory_is_counted_beyond_its_inputs() -> None:
    row = speed.memory("headwise", 300, 8, "float32")
    out = torch.zeros(1, 32, 300, 128).nbytes
    assert row["peak_bytes_beyond_inputs"] - row["peak_bytes_beyond_inputs_and_output"] == out
    assert row["peak_bytes_beyond_inputs"] > out // 2


def test_rows_are_kept_and_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(speed, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(speed, "memory", lambda *row: asked.append(row) or {"seconds": 1.0})
    monkeypatch.setattr(speed, "greedy", lambda *row: asked.append(row) or {"same_tokens": 256})
    path = tmp_path / "speed.json"
    monkeypatch.setattr("sys.argv", ["speed", "--json", str(path), "--context", "20", "--rounds", "1"])
    speed.main()
    speed.main()
    assert len(asked) == 12 + 2
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 1 + 12 + 2
    assert all("machine" in row["run"] for row in rows.values())
