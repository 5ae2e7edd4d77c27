"""`profile`: a machine's limits and curves, as a device that predictions take."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headwise.disk import clearly, write_among_others
from headwise.measurement.machine import doctor, machine
from headwise.prediction import Device, to_table
from headwise.profiling.measure import measure_curves
from headwise.progress import Progress, silent

NAME = "this-machine"
"""The device's name in the file."""

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A machine, measured.

    Attributes:
        device: with its limits and curves.
        seconds: that measuring took.
        threads: torch's.
    """

    device: Device
    seconds: float
    threads: int


def profile(*, progress: Progress = silent) -> Profile:
    """Measure this machine's processor: its limits, and the times of operators over grids of sizes.

    For example ``write_profile(profile().device, Path("machine.toml"))``.

    Args:
        progress: told of each step.
    """
    start = time.perf_counter()
    health = doctor(progress=progress)
    facts = machine("cpu")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    threads = torch.get_num_threads()
    limits = Device(
        name=NAME,
        label=f"{facts['cpu']}, {threads} threads",
        kind="cpu",
        memory_bytes=pages,
        bytes_per_second=health.read_bytes_per_second,
        peaks=health.matmul_flops_per_second,
        source=f"headwise profile, {platform.system()}, torch {torch.__version__}",
    )
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    curves = {
        name: measure_curves(dtype, limits, progress=progress) for name, dtype in zip(names, DTYPES, strict=True)
    }
    return Profile(device=replace(limits, curves=curves), seconds=time.perf_counter() - start, threads=threads)


def write_profile(device: Device, file: Path) -> None:
    """Write a device as a TOML file that `headwise.prediction.devices` reads.

    For example ``write_profile(profile().device, Path("machine.toml"))``.

    Args:
        device: with curves.
        file: to write; it is replaced whole.

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
    with clearly("output", file):
        write_among_others(file, text.encode())


def _toml(path: Sequence[str], table: Mapping[str, Any]) -> list[str]:
    """A table and those in it, as lines of TOML."""
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    lines = [
        f"[{'.'.join(_quoted(part) for part in path)}]",
        *(f"{_quoted(k)} = {_value(v)}" for k, v in plain.items()),
    ]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", *_toml((*path, name), value)]
    return lines


def _quoted(text: str) -> str:
    """A string of TOML."""
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in text)
    return f'"{escaped}"'


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(float(value))
