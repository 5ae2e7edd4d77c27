"""Two processes on one frontier find the points that one finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_torchrun import TEXT
from tests.real_models import save_tiny
from tests.warm import run


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    (tmp_path / "study.txt").write_text(TEXT)
    (tmp_path / "exam.txt").write_text(TEXT[::-1])
    texts = ("--calibrate", tmp_path / "study.txt", "--evaluate", tmp_path / "exam.txt", "--calibration-tokens", 512)
    sizes = ("--target", "int8", "--target", "mla:0.5", "--target", "mqa", "--window", 48, "--windows", 3)
    documents = []
    for name, ranks in (("one", 1), ("two", 2)):
        options = ("--output", tmp_path / name, *texts, *sizes, "--continuations", 2, "--no-plot", "--json")
        done = run("-m", "headwise", "frontier", source, *options, ranks=ranks)
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout))  # printed once
        assert (tmp_path / name / "frontier.json").exists()
        assert not (tmp_path / name / ".headwise-work").exists()
    one, two = (document["points"] for document in documents)
    assert two[0]["evaluation"]["continuations"] == one[0]["evaluation"]["continuations"]
    assert [point["target"] for point in two] == [point["target"] for point in one]
    for mine, theirs in zip(two, one, strict=True):
        assert mine["cache_bytes_per_token"] == theirs["cache_bytes_per_token"]
        # Adam makes much of the rounding of sums over two processes.
        assert mine["kl"] == pytest.approx(theirs["kl"], rel=1e-6 if mine["target"] == "int8" else 0.05)
