"""Conversions on a device: the CPU's results, and every tensor where it should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.conversion.solvers.device import own_device
from headwise.errors import ArgumentError
from tests.conversion.test_resumed import TEXT, StoppedError
from tests.pretended_device import DEVICE, pretended_device

KEYWORDS: dict[str, Any] = {"calibration_tokens": 256, "calibration_window": 32}
CONVERSIONS: dict[str, dict[str, Any]] = {
    "mla": {"to": "mla", "kv_budget": 0.5},
    "codes": {"to": "mla", "kv_bytes": 0.15},
    "same": {"to": "same", "bits": 3.0},
    "gqa": {"to": "mqa"},
    "deepseek": {"to": "mla", "kv_budget": 0.5, "format": "deepseek"},
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.conversion.solvers.device.QUICK", False)
    monkeypatch.setattr("headwise.conversion.codes.RATIOS", (1.0, 1.6))  # each takes seconds here
    optimizers = sys.modules["torch.optim.optimizer"]  # which torch.optim hides
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["cpu", str(DEVICE)])
    for name in ("convert", "calibrate"):  # the device is refused, as torch knows it as one without numbers
        module = sys.modules[f"headwise.conversion.{name}"]
        monkeypatch.setattr(module, "own_device", lambda name: DEVICE if name == str(DEVICE) else own_device(name))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_device_converts_as_the_cpu_does(name: str, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    options = {**CONVERSIONS[name], **KEYWORDS, "calibrate": text, "evaluate": False}
    headwise.convert(tiny_llama, tmp_path / "cpu", **options)
    with pretended_device():
        headwise.convert(tiny_llama, tmp_path / "device", **options, device=str(DEVICE))
    refuse_difference(tiny_llama, tmp_path / "cpu", tmp_path / "device")


def test_statistics_of_a_device_are_the_cpus(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    options = {**KEYWORDS, "calibrate": text}
    target: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "evaluate": False}
    headwise.calibrate(tiny_llama, tmp_path / "of cpu", **options)
    headwise.convert(tiny_llama, tmp_path / "cpu", statistics=tmp_path / "of cpu", **target)
    with pretended_device():
        headwise.calibrate(tiny_llama, tmp_path / "of device", **options, device=str(DEVICE))
        statistics = tmp_path / "of device"
        headwise.convert(tiny_llama, tmp_path / "device", statistics=statistics, device=str(DEVICE), **target)
    refuse_difference(tiny_llama, tmp_path / "cpu", tmp_path / "device")


def test_a_dry_run_times_the_device(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    options = {**CONVERSIONS["mla"], **KEYWORDS, "calibrate": text}
    with pretended_device():
        report = headwise.convert(tiny_llama, tmp_path / "out", **options, dry_run=True, device=str(DEVICE))
    assert report.seconds > 0
    assert not (tmp_path / "out").exists()


def test_a_stock_folder_that_was_killed_is_finished_on_the_device(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    """The channels that all layers share are read from a file by then."""
    options = {**CONVERSIONS["deepseek"], **KEYWORDS, "calibrate": text, "evaluate": False}
    headwise.convert(tiny_llama, tmp_path / "cpu", **options)

    def stopping(stage: str, done: int, _: int) -> None:
        if (stage, done) == ("converting", 1):
            raise StoppedError

    with pytest.raises(StoppedError):
        headwise.convert(tiny_llama, tmp_path / "device", **options, progress=stopping)
    with pretended_device():
        headwise.convert(tiny_llama, tmp_path / "device", **options, device=str(DEVICE))
    refuse_difference(tiny_llama, tmp_path / "cpu", tmp_path / "device")


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def empty(*_: Any, device: torch.device) -> None:
        asked.append(str(device))

    monkeypatch.setattr(sys.modules["headwise.runtime.hf.load"], "process_count", lambda: 6)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.empty", empty)  # how a device is tried
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        own_device("cuda")
    own_device("cuda:1")
    own_device(None)
    assert asked == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cpu"]
    with pytest.raises(ArgumentError, match="device = 'mps': must be cpu or cuda"):
        own_device("mps")


@pytest.mark.parametrize("command", [headwise.convert, headwise.calibrate, headwise.frontier])
def test_a_device_that_is_not_here_is_refused(command: Any, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    target = {"to": "mqa"} if command is headwise.convert else {}
    with pytest.raises(ArgumentError, match=r"device = 'nowhere'.*such as cpu or cuda"):
        command(tiny_llama, tmp_path / "out", calibrate=text, device="nowhere", **target)
    assert not (tmp_path / "out").exists()


def refuse_difference(source: Path, cpu: Path, device: Path) -> None:
    """Two conversions of a source differ by far less than either does from the source.

    They do at nearly every token: a cached value on the edge between two codes may take either.
    """
    ids = torch.randint(2, 30, (2, 60), generator=torch.Generator().manual_seed(0))
    its, expected, found = (logits(folder, ids) for folder in (source, cpu, device))
    lost, differing = (expected - its).norm(dim=-1), (found - expected).norm(dim=-1)
    assert float(lost.norm()) > 1e-3 * float(its.norm())
    assert float(differing.median()) < 1e-3 * float(lost.median())  # at most 4e-5 measured
    assert float(differing.norm()) < 1e-2 * float(lost.norm())  # 1.2e-3 measured where a few codes differed


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = headwise.load(folder)(ids).logits
    return out


def test_products_are_in_bfloat16_only_where_onednn_computes_them() -> None:
    """Held to AVX2, torch would multiply bfloat16 by plain loops, whatever the processor has."""
    code = "from headwise.conversion.solvers.device import QUICK; print(QUICK)"
    held = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=held, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
