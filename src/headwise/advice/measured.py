"""Quality that was measured: the points of a frontier, by the target of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError, StorageError

_FILE = "frontier.json"
_LARGEST = 64 * 2**20
"""The largest file that is read, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a frontier measured of one target.

    Attributes:
        target: as the frontier spells it, such as ``mla:0.5``.
        cache_fraction: of the source's cache in bfloat16.
        loss: the perplexity over the source's, less one.
        kl: KL(source ‖ conversion) in nats a token; None where it was not measured.
        file: where it was read.
        is_format: whether the source's cache was stored in a format, and nothing converted.
    """

    target: str
    cache_fraction: float
    loss: float
    kl: float | None
    file: str
    is_format: bool = False


def read_measured(sources: Iterable[str | Path]) -> dict[str, Measured]:
    """The measurements of frontiers, by target; of one target measured twice, the last.

    For example ``read_measured(["./out"])["mla:0.5"].loss``.

    Args:
        sources: folders that ``headwise frontier`` wrote, or their ``frontier.json``.

    Raises:
        StorageError: a file cannot be read.
        CheckpointError: it is no frontier.
    """
    return {point.target: point for source in sources for point in _points(Path(source))}


def _points(source: Path) -> list[Measured]:
    file = source / _FILE if source.is_dir() else source
    try:
        if file.stat().st_size > _LARGEST:
            raise CheckpointError("measured", str(file), f"must be at most {_LARGEST >> 20} MiB")
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError("measured", str(file), f"cannot be read: {error}") from None
    listed = document.get("points") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise CheckpointError(
            "measured", str(file), "must be the frontier.json of headwise frontier: it has no points"
        )
    return [_point(entry, str(file)) for entry in listed if not _is_variant(entry)]


def _is_variant(entry: Any) -> bool:
    """Whether a point is of a method other than headwise's own, which `headwise convert` does not take by itself."""
    return isinstance(entry, Mapping) and entry.get("way") not in ("headwise", "plain quantisation", None)


def _point(entry: Any, file: str) -> Measured:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("target"), str):
        raise CheckpointError("measured", file, "has a point without a target")
    numbers = {name: entry.get(name) for name in ("cache_fraction", "perplexity_ratio", "kl")}
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (is_number or (name == "kl" and value is None)):
            raise CheckpointError("measured", file, f"{name} of {entry['target']} must be a number, not {value!r}")
    return Measured(
        target=entry["target"],
        cache_fraction=float(numbers["cache_fraction"]),  # type: ignore[arg-type]  # checked above
        loss=float(numbers["perplexity_ratio"]) - 1,  # type: ignore[arg-type]
        kl=None if numbers["kl"] is None else float(numbers["kl"]),
        file=file,
        is_format=entry.get("way") == "plain quantisation",
    )
