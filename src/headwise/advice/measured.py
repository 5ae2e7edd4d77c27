"""Quality that was measured: by a frontier, or by a conversion of itself; by the target of each."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.documents import MEASURED
from headwise.errors import CheckpointError, StorageError
from headwise.specs import ModelSpec

_FILES = ("frontier.json", MEASURED)
"""What `headwise frontier` and `headwise convert` write of measurements into their folders."""

_LARGEST = 64 * 2**20
"""The largest file that is read, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a frontier measured of one target.

    Attributes:
        target: as the frontier spells it, such as ``mla:0.5``.
        cache_fraction: of the source's cache in bfloat16.
        loss: the perplexity over the source's, less one; infinite where the model diverged.
        kl: KL(source ‖ conversion) in nats a token; None where it was not measured.
        file: where it was read.
        is_format: whether the source's cache was stored in a format, and nothing converted.
        label: the mechanism and sizes that were measured.
    """

    target: str
    cache_fraction: float
    loss: float
    kl: float | None
    file: str
    is_format: bool = False
    label: str = ""


def read_measured(sources: Iterable[str | Path], model: ModelSpec | None = None) -> dict[str, Measured]:
    """The measurements of frontiers, by target; of one target measured twice, the last.

    For example ``read_measured(["./out"])["mla:0.5"].loss``.

    Args:
        sources: folders that ``headwise frontier`` wrote, or ``headwise convert`` with an evaluation; or their files.
        model: whose frontiers they must be, as far as the label of its attention tells.

    Raises:
        StorageError: a file cannot be read.
        CheckpointError: it is no frontier, or another model's.
    """
    return {point.target: point for source in sources for point in _points(Path(source), model)}


def _points(source: Path, model: ModelSpec | None) -> list[Measured]:
    file = source
    if source.is_dir():
        file = next((source / name for name in _FILES if (source / name).is_file()), source / _FILES[0])
    try:
        if file.stat().st_size > _LARGEST:
            raise CheckpointError("measured", str(file), f"must be at most {_LARGEST >> 20} MiB")
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError("measured", str(file), f"cannot be read: {error}") from None
    return list(read_points(document if isinstance(document, dict) else {}, model, name=str(file)).values())


def read_points(
    document: Mapping[str, Any], model: ModelSpec | None = None, *, name: str = "frontier"
) -> dict[str, Measured]:
    """The measurements of one frontier's JSON, by target.

    For example ``read_points(headwise.frontier("smollm2-135m", "out", ...).to_dict())["mla:0.5"].loss``.

    Args:
        document: the JSON.
        model: whose frontier it must be, as far as the label of its attention tells.
        name: of the file that it was read from.

    Raises:
        CheckpointError: it is no frontier, or another model's.
    """
    listed = document.get("points")
    if not isinstance(listed, list):
        raise CheckpointError("measured", name, "must be the frontier.json of headwise frontier: it has no points")
    label = document.get("label")
    if model is not None and isinstance(label, str) and label and label != model.label:
        rule = f"must be this model's frontier: it measured {reprlib.repr(label)}, and the model has {model.label}"
        raise CheckpointError("measured", name, rule)
    points = (_point(entry, name) for entry in listed if not _is_variant(entry))
    return {point.target: point for point in points}


def _is_variant(entry: Any) -> bool:
    """Whether a point is of a method other than headwise's own, which `headwise convert` does not take by itself."""
    return isinstance(entry, Mapping) and entry.get("way") not in ("headwise", "plain quantisation", None)


def _point(entry: Any, file: str) -> Measured:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("target"), str):
        raise CheckpointError("measured", file, "has a point without a target")
    target, ratio = entry["target"], entry.get("perplexity_ratio", 0)
    if not target.isprintable() or " " in target:
        raise CheckpointError("measured", file, f"has no target of the name {reprlib.repr(target)}")
    fraction = _number(entry, "cache_fraction", file)
    if not 0 < fraction <= 4:
        raise CheckpointError(
            "measured", file, f"cache_fraction of {target} must be above 0 and at most 4, not {fraction!r}"
        )
    return Measured(
        target=target,
        cache_fraction=fraction,
        loss=math.inf if ratio is None else _number(entry, "perplexity_ratio", file) - 1,  # JSON has no infinities
        kl=None if entry.get("kl") is None else _number(entry, "kl", file),
        file=file,
        is_format=entry.get("way") == "plain quantisation",
        label=str(entry.get("label", "")),
    )


def _number(entry: Mapping[str, Any], name: str, file: str) -> float:
    value = entry.get(name)
    with suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    shown = reprlib.repr(value)
    raise CheckpointError("measured", file, f"{name} of {entry['target']} must be a number, not {shown}")
