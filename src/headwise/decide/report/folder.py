"""The page of a folder: a model, a frontier, or any results that were saved there as JSON; or of a config alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.base.documents import FRONTIER, MEASURED, PREDICTED
from headwise.decide.advice import Measured, by_target, read_points
from headwise.decide.report.measured_steps import measured_steps
from headwise.decide.report.sections import Section, sections
from headwise.errors import ArgumentError, HeadwiseError, StorageError, naming
from headwise.models.specs import ModelSpec, read_spec

_LARGEST = 64 * 2**20
"""The largest file that is read, in bytes."""


@dataclass(frozen=True, kw_only=True)
class FolderResults:
    """What a folder holds.

    Attributes:
        source: the model's name.
        model: its spec; None where it cannot be read.
        measured: quality, measured or predicted, by target.
        sections: of every result.
        notes: what was left out, and why.
        steps: decode steps of the model that were timed.
        converted: what the conversion that made the model measured of it, in a sentence; empty where none did.
    """

    source: str
    model: ModelSpec | None
    measured: Mapping[str, Measured]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    converted: str = ""


def read_folder(folder: str | Path, *, source: str | None = None) -> FolderResults:
    """Read a model's folder or a frontier's, and every result in it that a command printed with ``--json``.

    For example ``read_folder("./out").measured["mla:0.5"].loss``.

    Args:
        folder: with ``config.json``, ``frontier.json``, or files of results; or the config of a model alone: a
            ``.gguf``, a ``config.json``, a catalog name or ``hf://owner/name``.
        source: the model that the results are of; the folder's or its frontier's own when None.

    Raises:
        ArgumentError: it is no folder and no model, or has none of these.
        HeadwiseError: a file cannot be read; or ``source`` cannot.
    """
    place = Path(folder)
    if not place.is_dir():
        return _of_config(str(folder), source)
    documents = {file.name: _document(file) for file in sorted(place.glob("*.json"))}
    found = {name: sections(document, name=str(place / name)) for name, document in documents.items()}
    has_model = (place / "config.json").is_file()
    if not has_model and not any(found.values()) and source is None:
        raise ArgumentError("folder", str(folder), "must have a config.json, a frontier.json or results of --json")
    frontiers = {name: documents[name] for name in (FRONTIER, PREDICTED) if name in documents}
    named = next((document.get("source") for document in frontiers.values()), None)
    name = source or (str(folder) if has_model else named if isinstance(named, str) else "")
    model, notes = None, []
    try:
        model = read_spec(name) if name else None
    except HeadwiseError as error:
        if source is not None:
            raise
        notes.append(f"the model is not shown: {error}")
    if model is not None and model.body is None:
        model, notes = None, [*notes, "the model is not shown: its body is not understood"]
    known = (read_points(document, model, name=str(place / name)) for name, document in frontiers.items())
    return FolderResults(
        source=name or str(folder),
        model=model,
        measured=by_target(point for points in known for point in points.values()),
        sections=tuple(section for made in found.values() for section in made),
        notes=tuple(notes),
        steps=tuple(measured_steps(documents.values(), name)),
        converted="" if FRONTIER in documents else _converted(documents.get(MEASURED, {})),
    )


def _of_config(name: str, source: str | None) -> FolderResults:
    """The model that a name or a file stands for, of which nothing is measured."""
    if source is not None:
        raise ArgumentError("source", source, f"goes with a folder of results, and {name} is none")
    with naming(source="folder"):
        model = read_spec(name)
    if model.body is None:
        raise ArgumentError("folder", name, "is a model whose body is not understood, so that nothing is predicted")
    return FolderResults(source=name, model=model, measured={}, sections=())


def _converted(document: Mapping[str, Any]) -> str:
    """What a conversion measured of itself, in a sentence; empty where there is no such file, or it says nothing."""
    points = document.get("points")
    if not isinstance(points, list) or len(points) != 1:
        return ""
    with suppress(HeadwiseError):
        (point,) = read_points({"points": [{**points[0], "way": "headwise"}]}).values()
        loss = f"×{1 + point.loss:.3f}" if math.isfinite(point.loss) else "infinitely many times"
        return (
            f"This model is a conversion, {point.target} ({point.label}): perplexity is {loss} its original's, at "
            f"{point.cache_fraction:.1%} of the cache, measured"
        )
    return ""


def _document(file: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where it is none, as a tokenizer's files may be."""
    try:
        if file.stat().st_size > _LARGEST:
            return {}
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError("report", str(file), f"cannot be read: {error}") from None
    return document if isinstance(document, dict) else {}
