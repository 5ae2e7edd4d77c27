"""Open whatever a source string names."""

from __future__ import annotations

from pathlib import Path

from headwise.checkpoints.checkpoint import Checkpoint
from headwise.checkpoints.folder import FolderCheckpoint
from headwise.checkpoints.gguf import GgufCheckpoint
from headwise.errors import ArgumentError
from headwise.hub import fetch_hub
from headwise.specs import locate


def model_path(source: str | Path) -> Path:
    """The folder or ``.gguf`` that holds a source's weights; a hub model the user named is fetched.

    Raises:
        ArgumentError: the source has no weights.
    """
    located = locate(source)
    if located.kind == "hub":
        return fetch_hub(located.name)
    if located.kind in ("catalog", "config") or located.path is None:
        raise ArgumentError("source", str(source), "has no weights: give a model folder, a .gguf or hf://…")
    return located.path


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a model folder, a ``.gguf``, ``smollm2-135m`` or ``hf://owner/name`` for reading."""
    path = model_path(source)
    return GgufCheckpoint(path) if path.is_file() else FolderCheckpoint(path)
