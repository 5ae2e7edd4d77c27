"""The machine: its memory, its measured limits, and which of headwise's kernels run on it (`doctor`).

The limits are the bytes that are read a second, and the FLOPs a second of a matrix product.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.base.progress import Progress, silent
from headwise.measure.timing.timing import Timeable, spread_interleaved
from headwise.models.checkpoints import dtype_name
from headwise.runtime.kernels.native import built


def peak_rss_bytes() -> int:
    """The most resident memory the process has had so far, in bytes, mapped files included.

    For example ``peak_rss_bytes()``.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int | None:
    """Bytes of memory that Linux can give without swapping; None on other systems.

    For example ``available_bytes()``.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return int(fields["MemAvailable"][0]) * 1024 if "MemAvailable" in fields else None


def cache_nbytes(value: Any) -> int:
    """Bytes of every tensor a cache holds, headwise's or transformers'; 0 for anything else.

    For example ``cache_nbytes(AttentionCache(1, [(3, 64), (3, 64)], 100, dtype=torch.float32))`` is 153,600.
    """
    layers = getattr(value, "layers", None)
    if isinstance(layers, list):
        usual = ("keys", "values")
        names = ((layer, name) for layer in layers for name in getattr(layer, "tensor_names", usual))
        tensors = (getattr(layer, name, None) for layer, name in names)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
    buffers = getattr(value, "buffers", None)
    return sum(tensor.nbytes for tensor in buffers) if isinstance(buffers, list) else 0


ATTAINABLE = 0.7
"""The share of a square product's FLOPs a second that products of other shapes are expected to reach."""

_READ_BYTES = 256 * 1024**2
"""Bytes that are read to measure a rate: more than a processor's caches hold."""
_SIZE = {"cpu": 1024, "cuda": 8192}
"""Width of the square product, by device."""


@dataclass(frozen=True)
class Limits:
    """Measured limits of one dtype on one device."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least time for reading ``nbytes`` and computing ``flops``: the longer of the two."""
        return max(nbytes / self.bytes_per_second, flops / (ATTAINABLE * self.flops_per_second))


class Probes:
    """The calls that measure limits, to be timed in turn with the calls that the limits are for.

    Reading is a sum of 256 MB (on a GPU a copy, which reads and writes); the product is square, 1024 wide (8192 on a
    GPU).
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.device = torch.device(device)
        size = _SIZE[self.device.type]
        self._is_copied = self.device.type != "cpu"
        self._read = torch.ones(_READ_BYTES // 4, device=device)
        self._into = torch.empty_like(self._read) if self._is_copied else None
        self._a, self._b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))

    def calls(self) -> dict[str, Timeable]:
        """The two calls, ``read`` and ``product``, for the functions of `headwise.measure.timing.timing`."""
        into = self._into
        read = self._read.sum if into is None else (lambda: into.copy_(self._read))
        return {"read": read, "product": lambda: self._a @ self._b}

    def limits(self, read: float, product: float) -> Limits:
        """The limits, from the seconds that the two calls took."""
        moved = self._read.nbytes * (2 if self._is_copied else 1)
        return Limits(moved / read, 2 * self._a.shape[0] ** 3 / product)


PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flashinfer-python")
"""Packages that headwise needs or runs faster with."""

PEERS = ("x-transformers", "llama-cpp-python", "ctranslate2")
"""Packages that `headwise bench` can compare headwise with."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes whose matrix products are timed."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The machine, its limits and its kernels, as `doctor` found them.

    Attributes:
        machine: the processor, its cores, torch's threads and the GPU.
        versions: the versions of headwise, Python, `PACKAGES` and `PEERS`; None for a package that is not installed.
        kernels: the state of the compiled kernels: ``built``, ``reason``, ``path``, ``has_pairs``.
        read_bytes_per_second: the measured bytes that are read a second.
        matmul_flops_per_second: the measured FLOPs a second of a square matrix product, by dtype.
        advice: the changes that would make headwise faster here, one line each; empty where there are none.
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
        progress: the callback that reports each step.
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
        machine=describe_machine(),
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


def describe_machine() -> dict[str, Any]:
    """Processor, cores, threads and GPU, for a report of measurements."""
    facts: dict[str, Any] = {"cpu": _processor(), "cores": _cores(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def installed_versions() -> dict[str, str | None]:
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
