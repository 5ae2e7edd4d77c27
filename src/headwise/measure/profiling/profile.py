"""`profile`: measure a machine's limits and curves, as a device that predictions can be made for."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headwise.base.checksums import write_among_others
from headwise.base.disk import storage_errors
from headwise.base.progress import Progress, silent
from headwise.costs.prediction import Device, to_table
from headwise.measure.profiling.decoder import grids_of
from headwise.measure.profiling.measure import measure_curves
from headwise.measure.profiling.pace import HERE, on_device
from headwise.measure.timing.machine import Probes, describe_machine, doctor
from headwise.measure.timing.timing import spread_interleaved
from headwise.models.checkpoints import dtype_name

NAME, GPU_NAME = "this-machine", "this-gpu"
"""The names of a profiled processor and GPU in their files."""

GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes whose matrix products are timed on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profile of a machine.

    Attributes:
        device: the machine as a device, with its limits and curves.
        seconds: the seconds that measuring took.
        threads: the number of torch's threads.
    """

    device: Device
    seconds: float
    threads: int


def profile(device: torch.device = HERE, *, progress: Progress = silent) -> Profile:
    """Measure this machine's processor, or its GPU: its limits, and the times of operators over grids of sizes.

    For example ``write_profile(profile().device, Path("machine.toml"))``.

    Args:
        device: the device to measure; a call on a GPU is timed as a replayed CUDA graph.
        progress: the callback that reports each step.
    """
    start = time.perf_counter()
    limits = _measure_gpu(device) if device.type == "cuda" else _measure_processor(progress)
    grids = grids_of(device)
    curves = {
        dtype_name(dtype): measure_curves(dtype, limits, grids=grids, place=device, progress=progress)
        for dtype in grids.dtypes
    }
    return Profile(
        device=replace(limits, curves=curves), seconds=time.perf_counter() - start, threads=torch.get_num_threads()
    )


def _measure_processor(progress: Progress) -> Device:
    """The limits of this machine's processor."""
    health = doctor(progress=progress)
    facts = describe_machine()
    return Device(
        name=NAME,
        label=f"{facts['cpu']}, {torch.get_num_threads()} threads",
        kind="cpu",
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        bytes_per_second=health.read_bytes_per_second,
        peaks=health.matmul_flops_per_second,
        source=_source(),
    )


def _measure_gpu(device: torch.device) -> Device:
    """The limits of a CUDA GPU."""
    found = {}
    for dtype in GPU_DTYPES:
        probes = Probes(dtype, str(device))
        with on_device(device):
            timed = spread_interleaved(probes.calls(), budget=0.5)
        found[dtype] = probes.limits(timed["read"].median, timed["product"].median)
        del probes
    properties = torch.cuda.get_device_properties(device)
    return Device(
        name=GPU_NAME,
        label=str(properties.name),
        kind="gpu",
        memory_bytes=int(properties.total_memory),
        bytes_per_second=max(limits.bytes_per_second for limits in found.values()),
        peaks={dtype_name(dtype): limits.flops_per_second for dtype, limits in found.items()},
        source=_source(),
    )


def name_of(device: torch.device) -> str:
    """The name that a device's profile has.

    For example ``name_of(torch.device("cuda"))`` is ``"this-gpu"``.
    """
    return GPU_NAME if device.type == "cuda" else NAME


def _source() -> str:
    return f"headwise profile, {platform.system()}, torch {torch.__version__}"


def write_profile(device: Device, file: Path) -> None:
    """Write a device as a TOML file that `headwise.costs.prediction.devices` reads.

    For example ``write_profile(profile().device, Path("machine.toml"))``.

    Args:
        device: a device with curves.
        file: the file to write; an existing one is replaced.

    Raises:
        StorageError: it cannot be written.
    """
    entry = {
        "label": device.label,
        "kind": device.kind,
        "memory_gib": device.memory_bytes / 2**30,
        "bandwidth_gb": device.bytes_per_second / 1e9,
        "dense_tflops": {dtype: peak / 1e12 for dtype, peak in device.peaks.items()},
        "source": device.source,
        "curves": {dtype: to_table(curves) for dtype, curves in device.curves.items()},
    }
    text = "# Written by headwise profile: times in seconds.\n\n" + "\n".join(_toml((device.name,), entry)) + "\n"
    with storage_errors("output", file):
        write_among_others(file, text.encode())


def _toml(path: Sequence[str], table: Mapping[str, Any]) -> list[str]:
    """A table and the tables in it, as lines of TOML."""
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    lines = [
        f"[{'.'.join(_toml_string(part) for part in path)}]",
        *(f"{_toml_string(k)} = {_toml_value(v)}" for k, v in plain.items()),
    ]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", *_toml((*path, name), value)]
    return lines


def _toml_string(text: str) -> str:
    """A string of TOML."""
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in text)
    return f'"{escaped}"'


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(float(value))
