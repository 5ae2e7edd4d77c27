"""What tells one run from another: everything that decides the bytes of its output."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version

from headwise.checkpoints.checkpoint import Checkpoint, dtype_name
from headwise.checkpoints.disk import clearly

_STRIDE, _PAGE = 1 << 20, 4096
_SAID_BY_THE_WRITER = ("transformers_version", "_name_or_path")
_LIBRARIES = ("headwise", "torch", "transformers", "safetensors")


def run_identity(checkpoint: Checkpoint, **decides: object) -> str:
    """A digest of the source, of what is done to it and of the libraries that do it, for `FolderWriter`'s ``run``.

    Of the source's files names, sizes and times of change count, and not their content: reading gigabytes to find
    out whether to read them would take as long as the copying.

    Args:
        checkpoint: the source.
        decides: all else that the output depends on, as JSON-able values: target, stages, texts' digests, ….
    """
    path = checkpoint.path
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    known = {
        "path": os.path.realpath(path),
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "config": checkpoint.config,
        "tensors": [
            [name, list(info.shape), dtype_name(info.dtype)] for name, info in sorted(checkpoint.tensors.items())
        ],
        "versions": versions(),
        "decides": decides,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def model_identity(checkpoint: Checkpoint) -> str:
    """A digest of a model itself, the same wherever its files are: of its config, and of its weights by a sample.

    Of each file of weights its size, its first megabyte and a page of every further one count: a model trained
    further differs nearly everywhere, and reading all of it would take as long as what the digest is to spare.

    Args:
        checkpoint: the model.
    """
    path = checkpoint.path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    config = {key: value for key, value in checkpoint.config.items() if key not in _SAID_BY_THE_WRITER}
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        with clearly("file", file, "read"), file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            total.update(f"{size} ".encode())
            total.update(opened.read(_STRIDE))
            for start in range(_STRIDE, size, _STRIDE):
                opened.seek(start)
                total.update(opened.read(_PAGE))
    return total.hexdigest()


def versions() -> dict[str, str]:
    """The versions of headwise and of the libraries a conversion's numbers come from."""
    return {library: version(library) for library in _LIBRARIES}
