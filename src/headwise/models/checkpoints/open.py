"""Open the model that a source string names."""

from __future__ import annotations

from pathlib import Path

from headwise.base.hub import fetch_hub
from headwise.errors import ArgumentError
from headwise.models.checkpoints.checkpoint import Checkpoint
from headwise.models.checkpoints.folder import FolderCheckpoint
from headwise.models.checkpoints.gguf_reader import GgufCheckpoint
from headwise.models.checkpoints.quantised import QuantisedFolder, is_quantised
from headwise.models.specs import locate


def model_path(source: str | Path) -> Path:
    """The folder or ``.gguf`` file that holds the weights of a source; a model of the hub is downloaded.

    For example ``model_path("smollm2-135m").suffix`` is ``".gguf"``.

    Args:
        source: a model, as `open_checkpoint` takes it.

    Raises:
        ArgumentError: the source does not exist, or has no weights.
        CheckpointError: the source cannot be downloaded.
        MissingExtraError: the bundled model's package is not installed.
    """
    located = locate(source)
    if located.kind == "hub":
        return fetch_hub(located.name)
    if located.kind in ("catalog", "config") or located.path is None:
        raise ArgumentError("source", str(source), "has no weights: give a model folder, a .gguf or hf://…")
    return located.path


def open_checkpoint(source: str | Path, *, quantised: bool = False) -> Checkpoint:
    """Open a model for reading one tensor at a time.

    Args:
        source: a model folder, a ``.gguf`` file, ``smollm2-135m`` or ``hf://owner/name``.
        quantised: whether a folder whose weights are quantised is read too, through their scales.

    Raises:
        ArgumentError: the source does not exist, or has no weights.
        CheckpointError: a file is missing, damaged, a pickle or quantised, or the config asks to run code.
        MissingExtraError: the bundled model's package is not installed.
        SpecError: the metadata of a GGUF file are not understood.

    >>> checkpoint = open_checkpoint("smollm2-135m")
    >>> checkpoint.read("model.norm.weight").shape
    torch.Size([576])
    """
    path = model_path(source)
    checkpoint: Checkpoint
    if path.is_file():
        checkpoint = GgufCheckpoint(path)
    else:
        checkpoint = QuantisedFolder(path) if quantised and is_quantised(path) else FolderCheckpoint(path)
    checkpoint.watch_files()
    return checkpoint
