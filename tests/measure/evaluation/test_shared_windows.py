"""Two processes that share the windows of a text measure what one measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headwise
from tests.cli.test_torchrun import TEXT
from tests.real_models import save_tiny
from tests.warm import run


def test_two_processes_measure_what_one_measures(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(TEXT if name == "one" else TEXT[::-1])
    # With a cache in codes, whose bytes are counted by the process that reads the first window.
    how = {"to": "mla", "kv_bytes": 0.4, "calibrate": tmp_path / "one.txt", "calibration_tokens": 512}
    headwise.convert(source, tmp_path / "half", **how, calibration_window=64, evaluate=False)
    texts = ("--text", tmp_path / "one.txt", "--text", tmp_path / "two.txt", "--windows", 3, "--window", 64)
    documents = []
    for ranks in (1, 2):
        page = tmp_path / f"page{ranks}.html"
        options = ("--against", source, *texts, "--json", "--html", page)
        done = run("-m", "headwise", "evaluate", tmp_path / "half", *options, ranks=ranks)
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout))  # printed once
        assert page.exists()
    one, two = documents
    for field in ("perplexity", "perplexity_ratio", "kl", "top1_agreement", "cache_bytes_per_token", "windows"):
        assert two[field] == pytest.approx(one[field], rel=1e-9), field
    assert [score["kl"] for score in two["texts"]] == pytest.approx([score["kl"] for score in one["texts"]], rel=1e-9)
    assert two["decode_ms"] > 0
