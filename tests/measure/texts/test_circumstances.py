"""Every report says alike what its numbers depend on, and one seed on one machine gives the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headwise
from headwise.measure.texts.circumstances import circumstances
from headwise.measure.timing.machine import describe_machine

CALIBRATED: dict[str, Any] = {"calibration_tokens": 256, "calibration_window": 32}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(tmp_path)
    for name, words in (("a.txt", "the quick brown fox jumps over the lazy dog. "), ("b.txt", "pack my box. ")):
        Path(name).write_text(words * 60)
    return "a.txt", "b.txt"


def test_what_is_said(tiny_llama: Path) -> None:
    said = circumstances(tiny_llama, dtype=torch.bfloat16, texts=[Path("a.txt")], seed=3)
    assert {name: said[name] for name in ("dtype", "texts", "begin", "seed")} == {
        "dtype": "bfloat16",
        "texts": ["a.txt"],
        "begin": [],
        "seed": 3,
    }
    assert said["machine"] == describe_machine()
    assert said["versions"]["transformers"] == transformers.__version__
    assert said["versions"].keys() == {"headwise", "torch", "transformers", "safetensors", "python"}
    path = tiny_llama / "tokenizer.json"
    begins = [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {
        "type": "TemplateProcessing",
        "single": begins,
        "pair": [*begins, {"Sequence": {"id": "B", "type_id": 1}}],
    }
    processor["special_tokens"] = {"<eos>": {"id": "<eos>", "ids": [0], "tokens": ["<eos>"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": processor}))
    assert circumstances(tiny_llama, dtype=None, texts=["a.txt"])["begin"] == ["<eos>"]
    (tiny_llama / "tokenizer.json").unlink()
    (tiny_llama / "tokenizer_config.json").unlink()
    assert circumstances(tiny_llama, dtype=None, texts=["a.txt"])["begin"] == []


def test_every_report_says_it(tiny_llama: Path, texts: tuple[str, str]) -> None:
    study, exam = texts
    evaluated: dict[str, Any] = {"evaluate": exam, "evaluation_windows": 2}
    conversion = headwise.convert(tiny_llama, "mqa", to="mqa", calibrate=study, **CALIBRATED, **evaluated)
    trained = {"text": study, "tokens": 128, "window": 32, "batch": 2, "seed": 5, "dtype": "float32"}
    reports = [
        conversion.to_dict(),
        json.loads(Path("mqa/measured.json").read_text()),
        headwise.prepare(tiny_llama, "prepared", cache="vllm:fp8", calibrate=study, **evaluated).to_dict(),
        headwise.heal("mqa", "healed", teacher=str(tiny_llama), **trained, evaluate=False).to_dict(),
        headwise.quick_frontier(tiny_llama, calibrate=study, targets=["int4"], **CALIBRATED).to_dict(),
    ]
    same = circumstances(tiny_llama, dtype="float32", texts=[study, exam])
    for report, read, seed in zip(
        reports, ([*texts], [*texts], [*texts], [study], [study]), (0, 0, 0, 5, 0), strict=True
    ):
        assert report["made_with"] == same | {"texts": read, "seed": seed}
    assert json.loads(Path("healed/healing.json").read_text())["made_with"] == reports[3]["made_with"]


PROGRAM = """
import headwise
text = {"calibrate": "a.txt", "calibration_tokens": 256}
windows = {"calibration_window": 32}
headwise.convert("tiny", f"{out}/mla", to="mla", kv_budget=0.5, bits=4, evaluate=False, **text, **windows)
headwise.prepare("tiny", f"{out}/prepared", cache="vllm:fp8", **text)
headwise.calibrate("tiny", f"{out}/statistics", **text, **windows)
healed = {"teacher": "tiny", "text": "a.txt", "tokens": 128, "window": 32, "batch": 2, "evaluate": False}
headwise.heal(f"{out}/mla", f"{out}/healed", **healed)
"""


def test_two_processes_write_the_same_bytes(tiny_llama: Path, texts: tuple[str, str]) -> None:
    """Where hashes of strings, and so the order of sets, differ."""
    exec(PROGRAM, {"out": "here"})
    there = [sys.executable, "-c", f"out = 'there'{PROGRAM}"]
    subprocess.run(there, env=os.environ | {"PYTHONHASHSEED": "1"}, check=True, capture_output=True)
    files = [file.relative_to("here") for file in Path("here").rglob("*") if file.is_file()]
    assert {file.parts[0] for file in files} == {"mla", "prepared", "statistics", "healed"}
    differing = {str(file) for file in files if Path("here", file).read_bytes() != Path("there", file).read_bytes()}
    assert differing <= {"healed/healing.json", "healed/README.md", "healed/SHA256SUMS"}  # say how long it took
