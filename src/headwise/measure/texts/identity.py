"""Whether two sources are the same text, whatever their paths."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from headwise.errors import ArgumentError
from headwise.measure.texts.sources import COLUMN, DATASET_PREFIX, local_files, local_path


def refuse_twice(sources: Sequence[str | Path], *, name: str) -> None:
    """Refuse a text that is named twice, under whatever path, because it would count twice.

    For example ``refuse_twice(["text.txt", "./text.txt"], name="calibrate")`` raises an ArgumentError.

    Args:
        sources: see `read_source`.
        name: of the sources in errors.

    Raises:
        ArgumentError: two sources are the same text, or one cannot be read.
    """
    by_identity: dict[str, str | Path] = {}
    for source in sources:
        identity = text_identity(source, name=name)
        if identity in by_identity:
            raise ArgumentError(name, str(source), f"is the same text as {by_identity[identity]}; name it once")
        by_identity[identity] = source


def text_identity(source: str | Path, *, name: str = "calibrate") -> str:
    """A digest of a text's content and column, which is the same wherever the text is stored.

    For example ``text_identity("text.txt")``.

    A dataset of the hub is identified by its name alone.

    Args:
        source: see `read_source`.
        name: of the source in errors.

    Raises:
        ArgumentError: the source cannot be read.
    """
    if str(source).startswith(DATASET_PREFIX):
        return str(source)
    path, column = local_path(source)
    kind, files = local_files(path, name) if os.path.isdir(path) else ("", [str(path)])
    try:
        digests = [_digest(file) for file in files]
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(name, str(source), f"could not be read: {reason}") from None
    if not os.path.isdir(path) and column in ("", COLUMN):
        return digests[0]
    return hashlib.sha256(json.dumps([kind, column or COLUMN, digests]).encode()).hexdigest()


def _digest(file: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
