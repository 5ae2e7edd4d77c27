"""Devices that models run on: memory, bandwidth, and dense peaks by dtype."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from headwise.base.disk import open_regular
from headwise.costs.formulas import dtype_bytes
from headwise.costs.prediction.curves import Curves, curves_of
from headwise.errors import ArgumentError, SpecError, StorageError

_KINDS = ("gpu", "cpu")
_NEEDED = ("label", "kind", "memory_gib", "bandwidth_gb", "dense_tflops")
_MAY_HAVE = ("link_gb", "sparse_tflops", "source", "curves")
_PEAKS = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8", "int8", "float4")
_LEAST = 1e-6
"""The least number of any unit here; its inverse is the largest."""
DTYPE_NAMES = {"float8_e4m3fn": "float8", "float8_e5m2": "float8"}
"""The names under which the peaks of dtypes stand, where they are others."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, by its vendor's or its own measured numbers.

    For example ``device("h100").bytes_per_second`` is 3.352e12.

    Attributes:
        name: the name of the device in the catalog.
        label: the name of the device for people.
        kind: ``gpu`` or ``cpu``.
        memory_bytes: the bytes of the device's memory.
        bytes_per_second: the bytes of its memory that the device reads in a second.
        peaks: FLOPs a second of dense matrix products, by the dtype of the factors.
        link_bytes_per_second: the bytes that one device can send to others in a second; None where several are not
            joined.
        source: the source of the numbers.
        curves: times that were measured on it, by dtype (``headwise profile``); empty for the rest.
    """

    name: str
    label: str
    kind: str
    memory_bytes: int
    bytes_per_second: float
    peaks: Mapping[str, float] = field(hash=False)
    link_bytes_per_second: float | None = None
    source: str = ""
    curves: Mapping[str, Curves] = field(default_factory=dict, hash=False)

    def peak(self, dtype: str) -> float:
        """FLOPs a second of products of a dtype; of the next wider one where the device has none of its own.

        Raises:
            ArgumentError: the dtype is not known, or wider than all of the device's.
        """
        width = dtype_bytes(dtype)
        name = DTYPE_NAMES.get(dtype.removeprefix("torch."), dtype.removeprefix("torch."))
        for candidate in (name, "bfloat16", "float16", "float32"):
            if candidate in self.peaks and (candidate == name or dtype_bytes(candidate) > width):
                return self.peaks[candidate]
        raise ArgumentError("dtype", dtype, f"has no peak on {self.label}: {', '.join(self.peaks)}")


def device(name: str, file: Path | None = None) -> Device:
    """A device by its name.

    For example ``device("h100")``.

    Args:
        name: the name of the device in the catalog, or in ``file``.
        file: a TOML file with devices of one's own.

    Raises:
        ArgumentError: no device has this name.
        SpecError: the file does not describe devices.
        StorageError: ``file`` cannot be read.
    """
    found = devices(file)
    if name not in found:
        raise ArgumentError("hardware", name, f"must be one of {', '.join(found)}")
    return found[name]


def devices(file: Path | None = None) -> dict[str, Device]:
    """All devices by name, with those of a TOML file of one's own, which replace others of their names.

    For example ``list(devices())``.

    Args:
        file: a TOML file with a table for each device, as in headwise's ``prediction/hardware.toml``.

    Raises:
        SpecError: the file does not describe devices.
        StorageError: ``file`` cannot be read.
    """
    return {**_catalog(), **({} if file is None else _read(file))}


@cache
def _catalog() -> dict[str, Device]:
    text = (files("headwise.costs.prediction") / "hardware.toml").read_text(encoding="utf-8")
    return {name: _device(name, entry) for name, entry in tomllib.loads(text).items()}


def _read(file: Path) -> dict[str, Device]:
    try:
        with open_regular(file) as opened:
            entries = tomllib.loads(opened.read().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise StorageError("hardware file", str(file), f"cannot be read: {error}") from None
    return {name: _device(name, entry) for name, entry in entries.items()}


def _device(name: str, entry: Any) -> Device:
    """A device of a table.

    Raises:
        SpecError: the table does not describe one; with the field, its value and the rule.
    """
    if not isinstance(entry, Mapping):
        raise SpecError(name, entry, "must be a table that describes a device")
    for key in entry:
        if key not in (*_NEEDED, *_MAY_HAVE):
            raise SpecError(f"{name}.{key}", entry[key], f"must be one of {', '.join((*_NEEDED, *_MAY_HAVE))}")
    for key in _NEEDED:
        if key not in entry:
            raise SpecError(f"{name}.{key}", None, "is required")
    for key in ("label", "source"):
        text = entry.get(key, "")
        if not isinstance(text, str) or not text.isprintable():
            raise SpecError(f"{name}.{key}", text, "must be one line of text")
    if entry["kind"] not in _KINDS:
        raise SpecError(f"{name}.kind", entry["kind"], f"must be one of {', '.join(_KINDS)}")
    peaks = entry["dense_tflops"]
    if not isinstance(peaks, Mapping) or not peaks:
        raise SpecError(f"{name}.dense_tflops", peaks, "must have a peak for at least one dtype")
    for dtype in peaks:
        if dtype not in _PEAKS:
            raise SpecError(f"{name}.dense_tflops", dtype, f"must be one of {', '.join(_PEAKS)}")
    return Device(
        name=name,
        label=entry["label"],
        kind=entry["kind"],
        memory_bytes=int(_number(f"{name}.memory_gib", entry["memory_gib"]) * 2**30),
        bytes_per_second=_number(f"{name}.bandwidth_gb", entry["bandwidth_gb"]) * 1e9,
        peaks={dtype: _number(f"{name}.dense_tflops", peak) * 1e12 for dtype, peak in peaks.items()},
        link_bytes_per_second=_number(f"{name}.link_gb", entry["link_gb"]) * 1e9 if "link_gb" in entry else None,
        source=entry.get("source", ""),
        curves=_curves(f"{name}.curves", entry.get("curves", {})),
    )


def _curves(name: str, entry: Any) -> dict[str, Curves]:
    if not isinstance(entry, Mapping):
        raise SpecError(name, entry, "must be a table of dtypes, as headwise profile writes it")
    return {dtype: curves_of(curves) for dtype, curves in entry.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= 1 / _LEAST:
        raise SpecError(name, value, f"must be a number from {_LEAST:g} to {1 / _LEAST:g}")
    return float(value)
