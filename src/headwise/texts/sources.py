"""Texts by name: files, folders and Hugging Face datasets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from headwise.errors import ArgumentError, MissingExtraError
from headwise.texts.files import read_text

DATASET_PREFIX = "hf-dataset://"
DATASETS_PIP = "pip install 'headwise[datasets]'"
_COLUMN = "text"
_KINDS = {"parquet": ("*.parquet",), "json": ("*.jsonl", "*.json"), "text": ("*.txt",)}


def read_source(source: str | Path, *, characters: int | None = None, name: str = "calibrate") -> str:
    """Read the text of a source, or at least the first ``characters`` of it.

    For example ``read_source("hf-dataset://owner/name::train#text", characters=10_000)``.

    Args:
        source: a UTF-8 file; a ``.parquet`` or ``.jsonl`` file, or a folder of one of those or of ``.txt``; or a
            dataset of the Hugging Face hub, ``hf-dataset://owner/name:config:split#column``, where the split is
            ``train`` and the column is ``text`` unless named (``hf-dataset://owner/name::test`` has a split and no
            config). All but the first are read by the ``datasets`` library, and may end with ``#column``.
        characters: the number that is enough; sources that are read row by row are read no further.
        name: of the source in errors.

    Raises:
        ArgumentError: the source cannot be read, or has no such column.
        MissingExtraError: ``datasets`` is needed and not installed.
    """
    if not str(source):
        raise ArgumentError(name, "", "is empty; it must name a text")
    if str(source).startswith(DATASET_PREFIX):
        where, _, column = str(source).partition("#")
        repository, *parts = where.removeprefix(DATASET_PREFIX).split(":")
        if not repository or len(parts) > 2:
            raise ArgumentError(name, str(source), f"must be {DATASET_PREFIX}owner/name:config:split#column")
        config, split = (*parts, "", "")[:2]
        rows = _dataset_rows(source, name, repository, config or None, split=split or "train")
    else:
        path, column = _local(source)
        if not path.is_dir() and path.suffix not in (".parquet", ".jsonl"):
            if column:
                raise ArgumentError(name, str(source), f"{path} has no columns; name it without #{column}")
            return read_text(path, characters=characters, name=name)
        kind, files = _local_files(path, name)
        rows = _dataset_rows(source, name, kind, data_files=files, split="train")
    return _text(rows, column or _COLUMN, characters, source, name)


def refuse_twice(sources: Sequence[str | Path], *, name: str) -> None:
    """Refuse a text that is named twice, under whatever path, because it would count twice.

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

    A dataset of the hub is identified by its name alone.

    Args:
        source: see `read_source`.
        name: of the source in errors.

    Raises:
        ArgumentError: the source cannot be read.
    """
    if str(source).startswith(DATASET_PREFIX):
        return str(source)
    path, column = _local(source)
    kind, files = _local_files(path, name) if path.is_dir() else ("", [str(path)])
    try:
        digests = [_digest(file) for file in files]
    except OSError as error:
        raise ArgumentError(name, str(source), f"could not be read: {error.strerror}") from None
    if not path.is_dir() and column in ("", _COLUMN):
        return digests[0]
    return hashlib.sha256(json.dumps([kind, column or _COLUMN, digests]).encode()).hexdigest()


def _local(source: str | Path) -> tuple[Path, str]:
    """The file or folder of a source, and the column after its ``#``."""
    where, _, column = str(source).partition("#")
    if Path(source).exists() or not Path(where).exists():
        return Path(source), ""  # the # is part of the path
    return Path(where), column


def _digest(file: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _local_files(path: Path, name: str) -> tuple[str, list[str]]:
    """The format of the files, as ``datasets`` calls it, and the files in order."""
    for kind, patterns in _KINDS.items():
        if path.is_dir():
            files = sorted(str(file) for pattern in patterns for file in path.rglob(pattern))
        else:
            files = [str(path)] if any(path.match(pattern) for pattern in patterns) else []
        if files:
            return kind, files
    raise ArgumentError(name, str(path), "has no .parquet, .jsonl, .json or .txt files")


def _dataset_rows(source: str | Path, name: str, *args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(name, str(source), f"needs the datasets package: {DATASETS_PIP}") from None
    try:
        # Streaming fetches no more of a large dataset than is read.
        yield from datasets.load_dataset(*args, **kwargs, streaming=True)
    except Exception as error:  # datasets raises many kinds
        reason = shorten(str(error), 300, placeholder=" …") or type(error).__name__
        raise ArgumentError(name, str(source), f"could not be read: {reason}") from None


def _text(rows: Iterator[dict[str, Any]], column: str, characters: int | None, source: str | Path, name: str) -> str:
    """The texts of the rows, one a line."""
    texts: list[str] = []
    length = 0
    for row in rows:
        if column not in row:
            raise ArgumentError(
                name, str(source), f"has no column {column}; it has {', '.join(row)}: name it #column"
            )
        text = row[column]
        if not isinstance(text, str):
            raise ArgumentError(name, str(source), f"has no text in column {column}")
        texts.append(text if text.endswith("\n") else f"{text}\n")
        length += len(texts[-1])
        if characters is not None and length >= characters:
            break
    return "".join(texts)
