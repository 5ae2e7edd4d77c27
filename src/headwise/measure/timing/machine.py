"""Describe a machine, and which of headwise's kernels run on it (`doctor`)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from headwise.base.progress import Progress, silent
from headwise.measure.timing.machine_limits import Probes
from headwise.measure.timing.timing import spread_interleaved
from headwise.models.checkpoints import dtype_name
from headwise.runtime.kernels.native import built

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flashinfer-python")
"""Packages that headwise needs or runs faster with."""

PEERS = ("x-transformers", "llama-cpp-python", "ctranslate2")
"""Packages that `headwise bench` can compare headwise with."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes whose matrix products are timed."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The result of `doctor`.

    Attributes:
        machine: processor, cores, threads and GPU.
        versions: of headwise, Python, `PACKAGES` and `PEERS`; None for one that is not installed.
        kernels: the compiled kernels: ``built``, ``reason``, ``path``, ``has_pairs``.
        read_bytes_per_second: measured.
        matmul_flops_per_second: measured, by dtype.
        advice: what would make headwise faster here, one line each; empty where there is nothing to say.
    """

    machine: dict[str, Any]
    versions: dict[str, str | None]
    kernels: dict[str, Any]
    read_bytes_per_second: float
    matmul_flops_per_second: dict[str, float]
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        return asdict(self)


def doctor(*, progress: Progress = silent) -> Health:
    """Measure this machine's limits, and report which of headwise's kernels run on it; compiles them if necessary.

    For example ``doctor().read_bytes_per_second``.

    Args:
        progress: called at each step.
    """
    progress("looking", 0, 2)
    build = built()
    progress("looking", 1, 2)
    probes = {dtype: Probes(dtype) for dtype in DTYPES}
    timed = {dtype: spread_interleaved(probe.calls(), budget=0.5) for dtype, probe in probes.items()}
    limits = {dtype: probes[dtype].limits(t["read"].median, t["product"].median) for dtype, t in timed.items()}
    progress("looking", 2, 2)
    packages = {name: _version(name) for name in (*PACKAGES, *PEERS)}
    return Health(
        machine=machine(),
        versions={"headwise": _version("headwise"), "python": platform.python_version(), **packages},
        kernels={
            "built": build.library is not None,
            "reason": build.reason,
            "path": None if build.path is None else str(build.path),
            "has_pairs": build.has_pairs,
        },
        read_bytes_per_second=max(limit.bytes_per_second for limit in limits.values()),
        matmul_flops_per_second={dtype_name(dtype): limit.flops_per_second for dtype, limit in limits.items()},
        advice=tuple(_advice(has_kernels=build.library is not None, reason=build.reason)),
    )


def _advice(*, has_kernels: bool, reason: str) -> list[str]:
    advice = []
    if not has_kernels:
        advice.append(f"decoding falls back on torch's own ways ({reason}): install a C++ compiler, such as g++")
    cores, threads = _cores(), torch.get_num_threads()
    if threads > cores:
        advice.append(f"{threads} threads wait for each other on {cores} cores: set OMP_NUM_THREADS={cores}")
    if torch.cuda.is_available() and _version("triton") is None:
        advice.append("there is a CUDA GPU, and no triton: headwise's own kernels for it cannot run")
    return advice


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores, threads and GPU, for a report of measurements."""
    facts: dict[str, Any] = {"cpu": _processor(), "cores": _cores(), "threads": torch.get_num_threads()}
    if device != "cpu" or torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def versions() -> dict[str, str | None]:
    """Versions of headwise, torch and Python, for a report of measurements."""
    return {"headwise": _version("headwise"), "torch": torch.__version__, "python": platform.python_version()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
