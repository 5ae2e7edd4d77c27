"""Devices that models run on: memory, bandwidth, and dense peaks by dtype."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from headwise.cost import dtype_bytes
from headwise.errors import ArgumentError, StorageError

_KINDS = ("gpu", "cpu")
_ALIASES = {"float8_e4m3fn": "float8", "float8_e5m2": "float8"}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, by its vendor's or its own measured numbers.

    For example ``device("h100").bytes_per_second`` is 3.352e12.

    Attributes:
        name: in the catalog.
        label: for people.
        kind: ``gpu`` or ``cpu``.
        memory_bytes: of the device.
        bytes_per_second: of reading its memory.
        peaks: FLOPs a second of dense matrix products, by the dtype of the factors.
        link_bytes_per_second: between two devices; None where several are not joined.
        source: where the numbers are from.
    """

    name: str
    label: str
    kind: str
    memory_bytes: int
    bytes_per_second: float
    peaks: Mapping[str, float] = field(hash=False)
    link_bytes_per_second: float | None = None
    source: str = ""

    def peak(self, dtype: str) -> float:
        """FLOPs a second of products of a dtype; of the next wider one where the device has none of its own.

        Raises:
            ArgumentError: the dtype is not known, or wider than all of the device's.
        """
        width = dtype_bytes(dtype)
        name = _ALIASES.get(dtype.removeprefix("torch."), dtype.removeprefix("torch."))
        for candidate in (name, "bfloat16", "float16", "float32"):
            if candidate in self.peaks and (candidate == name or dtype_bytes(candidate) >= width):
                return self.peaks[candidate]
        raise ArgumentError("dtype", dtype, f"has no peak on {self.label}: {', '.join(self.peaks)}")


def device(name: str, file: Path | None = None) -> Device:
    """A device by its name.

    For example ``device("h100")``.

    Args:
        name: in the catalog, or in ``file``.
        file: a TOML file with devices of one's own.

    Raises:
        ArgumentError: there is no such device.
        StorageError: the file cannot be read, or does not describe devices.
    """
    found = devices(file)
    if name not in found:
        raise ArgumentError("hardware", name, f"must be one of {', '.join(found)}")
    return found[name]


def devices(file: Path | None = None) -> dict[str, Device]:
    """All devices by name, with those of a TOML file of one's own, which replace others of their names.

    For example ``list(devices())``.

    Args:
        file: with a table for each device, as in headwise's ``prediction/hardware.toml``.

    Raises:
        StorageError: the file cannot be read, or does not describe devices.
    """
    return _catalog() if file is None else {**_catalog(), **_read(file)}


@cache
def _catalog() -> dict[str, Device]:
    text = (files("headwise.prediction") / "hardware.toml").read_text(encoding="utf-8")
    return {name: _device(name, entry) for name, entry in tomllib.loads(text).items()}


def _read(file: Path) -> dict[str, Device]:
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
        return {name: _device(name, entry) for name, entry in entries.items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StorageError("hardware file", str(file), f"cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        rule = f"must have label, kind, memory_gib, bandwidth_gb and dense_tflops for each device: {error}"
        raise StorageError("hardware file", str(file), rule) from None


def _device(name: str, entry: Mapping[str, Any]) -> Device:
    numbers = [entry["memory_gib"], entry["bandwidth_gb"], *entry["dense_tflops"].values()]
    if entry["kind"] not in _KINDS or any(not isinstance(number, int | float) or number <= 0 for number in numbers):
        raise ValueError(f"{name}: kind must be gpu or cpu, and every number above 0")
    link = entry.get("link_gb")
    return Device(
        name=name,
        label=entry["label"],
        kind=entry["kind"],
        memory_bytes=int(entry["memory_gib"] * 2**30),
        bytes_per_second=entry["bandwidth_gb"] * 1e9,
        peaks={dtype: number * 1e12 for dtype, number in entry["dense_tflops"].items()},
        link_bytes_per_second=None if link is None else link * 1e9,
        source=entry.get("source", ""),
    )
