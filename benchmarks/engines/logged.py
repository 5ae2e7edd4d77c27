"""What an engine's C++ writes to stderr: llama.cpp tells of its cache there alone."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What C++ writes to stderr meanwhile, as one string in a list."""
    said: list[str] = []
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
            sys.stderr.write(said[0])
