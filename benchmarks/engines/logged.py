"""What an engine's C++ writes to stderr: llama.cpp tells of its cache there alone."""

from __future__ import annotations

import contextlib
import os
import re
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


def cache_bytes(said: str) -> float:
    """Bytes of cache a token that llama.cpp's log says it allocated, for all texts together."""
    found = re.search(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, +\d+ layers, +\d+/(\d+) seqs", said)
    size, cells, texts = found.groups()  # type: ignore[union-attr]
    return float(size) * 2**20 / (int(cells) * int(texts))
