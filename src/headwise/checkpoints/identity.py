"""What tells one run from another: everything that decides the bytes of its output."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version

from headwise.checkpoints.checkpoint import Checkpoint, dtype_name

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


def versions() -> dict[str, str]:
    """The versions of headwise and of the libraries a conversion's numbers come from."""
    return {library: version(library) for library in _LIBRARIES}
