"""The page of a folder: a model, a frontier, or any results that were saved there as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.advice import Measured, read_points
from headwise.errors import ArgumentError, HeadwiseError, StorageError
from headwise.report.measured_steps import measured_steps
from headwise.report.sections import Section, sections
from headwise.specs import ModelSpec, read_spec

_FRONTIER = "frontier.json"
_LARGEST = 64 * 2**20
"""The largest file that is read, in bytes."""


@dataclass(frozen=True, kw_only=True)
class FolderResults:
    """What a folder holds.

    Attributes:
        source: the model's name.
        model: its spec; None where it cannot be read.
        measured: quality, by target.
        sections: of every result.
        notes: what was left out, and why.
        steps: decode steps of the model that were timed.
    """

    source: str
    model: ModelSpec | None
    measured: Mapping[str, Measured]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()


def read_folder(folder: str | Path, *, source: str | None = None) -> FolderResults:
    """Read a model's folder or a frontier's, and every result in it that a command printed with ``--json``.

    For example ``read_folder("./out").measured["mla:0.5"].loss``.

    Args:
        folder: with ``config.json``, ``frontier.json``, or files of results.
        source: the model that the results are of; the folder's or its frontier's own when None.

    Raises:
        ArgumentError: it is no folder, or has none of these.
        HeadwiseError: a file cannot be read; or ``source`` cannot.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ArgumentError("folder", str(folder), "must be a folder of a model, of a frontier or of results")
    documents = {file.name: _document(file) for file in sorted(place.glob("*.json"))}
    found = {name: sections(document, name=str(place / name)) for name, document in documents.items()}
    has_model = (place / "config.json").is_file()
    if not has_model and not any(found.values()) and source is None:
        raise ArgumentError("folder", str(folder), "must have a config.json, a frontier.json or results of --json")
    named = documents.get(_FRONTIER, {}).get("source")
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
    measured = {}
    if _FRONTIER in documents:
        measured = read_points(documents[_FRONTIER], model, name=str(place / _FRONTIER))
    return FolderResults(
        source=name or str(folder),
        model=model,
        measured=measured,
        sections=tuple(section for made in found.values() for section in made),
        notes=tuple(notes),
        steps=tuple(measured_steps(documents.values(), name)),
    )


def _document(file: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where it is none, as a tokenizer's files may be."""
    try:
        if file.stat().st_size > _LARGEST:
            return {}
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError("report", str(file), f"cannot be read: {error}") from None
    return document if isinstance(document, dict) else {}
