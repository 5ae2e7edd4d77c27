"""Text from files: UTF-8 text, ``.jsonl`` rows, and the language reference that comes with Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headwise.base.options import at_least
from headwise.errors import ArgumentError


def read_text(path: str | Path, *, characters: int | None = None, name: str = "text") -> str:
    """Read a UTF-8 file.

    For example ``read_text("text.txt", characters=10_000)``.

    Args:
        path: of the file.
        characters: the most characters to read, from the beginning; all when None.
        name: of the text in errors.

    Raises:
        ArgumentError: there is no such file, or the part that is read is not UTF-8.
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as file:  # a byte order mark is no part of the text
            return file.read(characters)
    except UnicodeDecodeError:
        raise ArgumentError(name, str(path), "must be UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(name, str(path), f"could not be read: {reason}") from None


def language_reference(topics: slice = slice(None)) -> str:
    """Python's language reference as one text; see `reference_topics`.

    For example ``language_reference(slice(10))`` joins the first ten topics.
    """
    return "\n\n".join(reference_topics(topics))


def reference_topics(topics: slice = slice(None)) -> list[str]:
    """The topics of Python's language reference, English prose that is installed with Python.

    For example ``reference_topics(slice(10))`` is a list of the first ten.

    Args:
        topics: the selected ones, in order of their names.

    Raises:
        ArgumentError: this Python was installed without it.
    """
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        raise ArgumentError("pydoc_data.topics", None, "is missing from this Python; name another text") from None
    return [texts[name] for name in sorted(texts)[topics]]


def read_jsonl(path: str | Path, *, name: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the objects of a ``.jsonl`` file, one a line; empty lines are skipped.

    For example ``read_jsonl("piqa.jsonl", name="file", limit=100)``.

    Args:
        path: a UTF-8 file.
        name: of the file in errors.
        limit: the most objects to read, from the beginning; all when None.

    Raises:
        ArgumentError: the file cannot be read or is empty, a line is no JSON object, or the limit is not positive.
    """
    at_least(1).check("limit", limit)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path, name=name).split("\n"), 1):
        if len(rows) == limit:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ArgumentError(name, f"{path}, line {number}", "must be a JSON object")
        rows.append(row)
    if not rows:
        raise ArgumentError(name, str(path), "must hold at least one JSON object, each on a line")
    return rows
