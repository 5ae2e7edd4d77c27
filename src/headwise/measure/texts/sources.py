"""Texts by name: files, folders, Hugging Face datasets, and the language reference that every Python has.

Two names may mean the same text; what counts is the content (`text_identity`).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from headwise.base.checksums import digest, write_among_others
from headwise.base.disk import open_regular, refuse_input_within
from headwise.base.options import at_least
from headwise.errors import ArgumentError, MissingExtraError
from headwise.measure.texts.windows import passages_apart


def read_text(path: str | Path, *, characters: int | None = None, name: str = "text") -> str:
    """Read a UTF-8 file.

    For example ``read_text("text.txt", characters=10_000)``.

    Args:
        path: the path of the file.
        characters: the most characters to read, from the beginning; all when None.
        name: the name of the text in errors.

    Raises:
        ArgumentError: there is no such file, or the part that is read is not UTF-8.
    """
    try:
        # A byte order mark is no part of the text.
        with io.TextIOWrapper(open_regular(Path(path)), encoding="utf-8-sig") as file:
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
        topics: the slice of all topics, in the order of their names.

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
        name: the name of the file in errors.
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


def write_reference_texts(folder: Path, tokenizer: Any) -> tuple[Path, Path]:
    """Write ``study.txt`` to calibrate on and ``exam.txt`` to evaluate on, which share no passage.

    Every second topic is for calibration. Topics quote each other, so of the others only those that share no passage
    with the calibration text are for evaluation. For example
    ``write_reference_texts(Path("."), load_tokenizer(Path("./model")))``.

    Args:
        folder: the folder that the two files are written into.
        tokenizer: the transformers tokenizer whose tokens passages are counted in.

    Returns:
        The paths of the two files.
    """
    study, exam = folder / "study.txt", folder / "exam.txt"
    text = language_reference(slice(0, None, 2))
    others = passages_apart(tokenizer, reference_topics(slice(1, None, 2)), text)
    write_among_others(study, text.encode())
    write_among_others(exam, "\n\n".join(others).encode())
    return study, exam


DATASET_PREFIX = "hf-dataset://"
DATASETS_PIP = "pip install 'headwise[datasets]'"
COLUMN = "text"
"""The column that is read unless one is named."""
_KINDS = {"parquet": ("*.parquet",), "json": ("*.jsonl", "*.json"), "text": ("*.txt",)}


def named_texts(texts: bool | str | Path | Sequence[str | Path] | None) -> tuple[str | Path, ...]:
    """The texts that an option's value names: one, several or none; True, False and None name none.

    For example ``named_texts("text.txt")``.
    """
    if texts is None or isinstance(texts, bool):
        return ()
    return (texts,) if isinstance(texts, str | Path) else tuple(texts)


def read_source(source: str | Path, *, characters: int | None = None, name: str = "calibrate") -> str:
    """Read the text of a source, or at least the first ``characters`` of it.

    For example ``read_source("hf-dataset://owner/name::train#text", characters=10_000)``.

    Args:
        source: a UTF-8 file; a ``.parquet`` or ``.jsonl`` file, or a folder of one of those or of ``.txt``; or a
            dataset of the Hugging Face hub, ``hf-dataset://owner/name:config:split#column``, where the split is
            ``train`` and the column is ``text`` unless named (``hf-dataset://owner/name::test`` has a split and no
            config). All but the first are read by the ``datasets`` library, and may end with ``#column``.
        characters: the number that is enough; sources that are read row by row are read no further.
        name: the name of the source in errors.

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
        path, column = local_path(source)
        if not os.path.isdir(path) and path.suffix not in (".parquet", ".jsonl"):
            if column:
                raise ArgumentError(name, str(source), f"{path} has no columns; name it without #{column}")
            return read_text(path, characters=characters, name=name)
        kind, files = local_files(path, name)
        # A byte order mark is no part of a text; that of JSON lines is skipped anyway.
        encoding = {"encoding": "utf-8-sig"} if kind == "text" else {}
        rows = _dataset_rows(source, name, kind, data_files=files, split="train", **encoding)
    return _text(rows, column or COLUMN, characters, source, name)


def refuse_inputs_within(output: Path, inputs: Mapping[str, Path], **texts: Iterable[str | Path]) -> None:
    """Refuse a destination whose replacement would remove what the run reads.

    For example ``refuse_inputs_within(Path("./half"), {}, calibrate=["./half/text.txt"])`` raises an ArgumentError.

    Args:
        output: the folder that may be replaced.
        inputs: files and folders by what they are to the user, such as ``the source``.
        texts: see `read_source`, by the option that the user named them by.

    Raises:
        ArgumentError: the destination is one of these, or holds it; links are followed.
    """
    for kind, path in inputs.items():
        refuse_input_within(output, path, kind)
    for name, sources in texts.items():
        for source in sources:
            if not str(source).startswith(DATASET_PREFIX):
                refuse_input_within(output, local_path(source)[0], f"a text of {name}")


def local_path(source: str | Path) -> tuple[Path, str]:
    """The file or folder of a source, and the column after its ``#``."""
    where, _, column = str(source).partition("#")
    # `os.path` says False where `Path.exists` raises: for names too long, and folders that may not be searched.
    if os.path.exists(source) or not os.path.exists(where):
        return Path(source), ""  # the # is part of the path
    return Path(where), column


def local_files(path: Path, name: str) -> tuple[str, list[str]]:
    """The format of the files, as ``datasets`` calls it, and the files in order."""
    for kind, patterns in _KINDS.items():
        if os.path.isdir(path):
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


def refuse_twice(sources: Sequence[str | Path], *, name: str) -> None:
    """Refuse a text that is named twice, under whatever path, because it would count twice.

    For example ``refuse_twice(["text.txt", "./text.txt"], name="calibrate")`` raises an ArgumentError.

    Args:
        sources: the texts, see `read_source`.
        name: the name of the sources in errors.

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
        source: the text, see `read_source`.
        name: the name of the source in errors.

    Raises:
        ArgumentError: the source cannot be read.
    """
    if str(source).startswith(DATASET_PREFIX):
        return str(source)
    path, column = local_path(source)
    kind, files = local_files(path, name) if os.path.isdir(path) else ("", [str(path)])
    try:
        digests = [digest(Path(file)) for file in files]
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(name, str(source), f"could not be read: {reason}") from None
    if not os.path.isdir(path) and column in ("", COLUMN):
        return digests[0]
    return hashlib.sha256(json.dumps([kind, column or COLUMN, digests]).encode()).hexdigest()
