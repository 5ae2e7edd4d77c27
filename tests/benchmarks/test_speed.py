"""benchmarks.speed on tiny shapes: what it counts and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import speed
from tests import warm
from tests.threads import one_thread

__all__ = ["one_thread"]

TINY = {"hidden_size": 256, "intermediate_size": 96, "num_key_value_heads": 4}


def test_layers_count_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed.MODELS, "tiny", TINY)
    row = speed.layers("tiny", 40, 2)
    projections = 256 * 256 * 2 + 2 * 256 * 32
    assert row["weights_bytes"] == 4 * 2 * (projections + 3 * 256 * 96) + 2 * 64 * 256
    assert row["cache_bytes"] == 4 * torch.zeros(2, 4, 40, 8, dtype=torch.bfloat16).nbytes
    assert row["attention_of_limit"] == pytest.approx(
        row["attention_ms"] / 1e3 * row["read_bytes_per_second"] / row["cache_bytes"]
    )


def test_a_prompts_memory_is_counted_beyond_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    context = warm.context()
    monkeypatch.setattr("multiprocessing.get_context", lambda _: context)
    row = speed.memory("headwise", 300, 8, "float32")
    out = torch.zeros(1, 32, 300, 128).nbytes
    assert row["peak_bytes_beyond_inputs"] - row["peak_bytes_beyond_inputs_and_output"] == out
    assert row["peak_bytes_beyond_inputs"] > out // 2


def test_rows_are_kept_and_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(speed, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(speed, "memory", lambda *row: calls.append(row) or {"seconds": 1.0})
    monkeypatch.setattr(speed, "small", lambda *row: calls.append(row) or {"token_ms": 1.0})
    monkeypatch.setattr(speed, "greedy", lambda *row: calls.append(row) or {"same_tokens": 256})
    for name in ("int8", "dispatch", "unequal"):
        monkeypatch.setattr(speed, name, lambda *row: calls.append(row) or {"ms": 1.0})
    path = tmp_path / "speed.json"
    monkeypatch.setattr("sys.argv", ["speed", "--json", str(path), "--context", "20", "--rounds", "1"])
    speed.main()
    speed.main()
    assert len(calls) == 2 + 12 + 2 + 3
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 1 + 2 + 12 + 2 + 3
    assert all("machine" in row["run"] for row in rows.values())


def test_unequal_rows_have_the_requested_lengths() -> None:
    row = speed.unequal(64, 8, 3)
    assert row.pop("lengths") == [64, 8, 8]
    assert set(row) == {"unequal, ms", "one row of as many tokens, ms", "all as long as the longest, ms"}
    assert all(ms > 0 for ms in row.values())
