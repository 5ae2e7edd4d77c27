"""Digests that identify a run, or a model, so that kept results are used again for the same one only."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version

from headwise.base.disk import storage_errors
from headwise.models.checkpoints.checkpoint import Checkpoint, dtype_name

_STRIDE, _PAGE = 1 << 20, 4096
_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path")
"""Fields of a config that say who wrote it, and not what the model is."""
_LIBRARIES = ("headwise", "torch", "transformers", "safetensors")


def run_identity(checkpoint: Checkpoint, **decides: object) -> str:
    """Make a digest of everything that the output of a run depends on, for `FolderWriter`'s ``run``.

    For example ``run_identity(open_checkpoint("./model"), to="mqa", method="mean")``.

    The source's files count by name, size and time of change, not by content: reading gigabytes to find out whether
    they have to be read would take as long as reading them.

    Args:
        checkpoint: the source.
        decides: everything else that the output depends on, as JSON-able values: target, stages, digests of texts, ….
    """
    path = checkpoint.path
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else checkpoint.files
    stats = [(file.name, file.stat()) for file in files]
    inputs = {
        "path": os.path.realpath(path),
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "config": checkpoint.config,
        "tensors": [
            [name, list(info.shape), dtype_name(info.dtype)] for name, info in sorted(checkpoint.tensors.items())
        ],
        "versions": versions(),
        "decides": decides,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def model_identity(checkpoint: Checkpoint) -> str:
    """Make a digest of a model, wherever its files are, from its config and a sample of its weights.

    For example ``model_identity(open_checkpoint("./model"))``.

    The sample is the size of each file, its first megabyte, and 4096 bytes of every further megabyte: more training
    changes nearly all weights, and reading all of them would take as long as the work that the digest saves.

    Args:
        checkpoint: the model.

    Raises:
        StorageError: a file of it cannot be read.
    """
    config = {key: value for key, value in checkpoint.config.items() if key not in _NOT_OF_THE_MODEL}
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in checkpoint.files:
        with storage_errors("file", file, "read"), file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            total.update(f"{size} ".encode())
            total.update(opened.read(_STRIDE))
            for start in range(_STRIDE, size, _STRIDE):
                opened.seek(start)
                total.update(opened.read(_PAGE))
    return total.hexdigest()


def versions() -> dict[str, str]:
    """The versions of headwise and of the libraries that a conversion's numbers depend on.

    For example ``versions()["torch"]``.
    """
    return {library: version(library) for library in _LIBRARIES}
