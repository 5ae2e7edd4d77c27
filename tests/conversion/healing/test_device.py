"""Healing on a device: every tensor where it should be, and the CPU's losses."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from tests.pretended_device import DEVICE, placed, pretended_device
from tests.real_models import save_tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 60
CASES: dict[str, dict[str, Any]] = {
    "all windows of a step at once": {"batch": 4},
    "hidden states": {"hidden": 0.1},
    "low-rank changes": {"train": "lora"},
    "a teacher on disk": {"teacher_top": 8, "batch": 2},
    "codes": {"bits": 4.0},
}


@pytest.mark.parametrize("case", CASES)
def test_a_device_heals_as_the_cpu_does(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, text, converted = save_tiny(tmp_path / "source"), tmp_path / "text.txt", tmp_path / "converted"
    text.write_text(TEXT)
    more = dict(CASES[case])
    calibration = {"calibrate": text, "calibration_tokens": 256, "calibration_window": 32}
    coded = {"bits": more.pop("bits"), **calibration} if "bits" in more else {}
    headwise.convert(source, converted, to="mla", kv_budget=0.5, evaluate=False, **coded)
    options = {"teacher": source, "text": text, "steps": 4, "window": 16, "dtype": "float32", "evaluate": False}
    expected = headwise.heal(converted, tmp_path / "of cpu", **options, **{"micro_batch": 1, **more})
    heal = sys.modules["headwise.conversion.healing.heal"]
    load, optimizers = heal.load, sys.modules["torch.optim.optimizer"]  # which torch.optim hides
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["cpu", str(DEVICE)])
    monkeypatch.setattr(heal, "own_device", lambda _: DEVICE)
    monkeypatch.setattr(heal, "load", lambda path, dtype, device: placed(load(path, dtype=dtype)))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with pretended_device():
        report = headwise.heal(converted, tmp_path / "of device", **options, **more)
    assert report.losses == pytest.approx(expected.losses, rel=1e-3)
    assert [loss for _, loss in report.held_out] == pytest.approx([loss for _, loss in expected.held_out], rel=1e-3)
