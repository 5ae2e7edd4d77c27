"""Text to study a model on: files, folders and Hugging Face datasets, mixed, as windows of tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import gcd
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError, MissingExtraError
from headwise.evaluation.text import cut_windows, read_text, token_ids

DATASET_PREFIX = "hf-dataset://"
DATASETS_PIP = "pip install 'headwise[datasets]'"
SPREAD = 128
"""Characters of a long text for each token asked for: what windows are spread over, to be about many things."""
_RESERVE = 8
"""One in so many tokens of a text, at its end, are left for an exam, and a few windows at least."""
_COLUMN = "text"
_KINDS = {"parquet": ("*.parquet",), "json": ("*.jsonl", "*.json"), "text": ("*.txt",)}


def calibration_windows(
    tokenizer: Any, sources: Sequence[str | Path], *, tokens: int, window: int, name: str = "calibrate"
) -> Tensor:
    """Windows ``[N, window]`` of a mixture of texts: an equal share of each, in turn.

    Those of a long text lie evenly apart, as windows next to each other are about one thing; its end is left for
    `windows_beyond`. Where a text is shorter than its share, what there is is taken: ``numel()`` of the result is the
    number of tokens. The same arguments give the same windows.

    Args:
        tokenizer: transformers'.
        sources: see `read_source`.
        tokens: how many in all; a few more where each source would not get a window.
        window: tokens in each at most: they are shorter where that uses all the tokens asked for, or where a single
            text has no more.
        name: of the sources, for errors.

    Raises:
        ArgumentError: a source cannot be read, or has fewer tokens than a window.
        MissingExtraError: a dataset is named and ``datasets`` is not installed.
    """
    if not sources:
        raise ArgumentError(name, list(sources), "must name at least one text")
    for field, value in (("tokens", tokens), ("window", window)):
        if value < 2:
            raise ArgumentError(field, value, "must be at least 2")
    ids = [_beginning(tokenizer, source, _enough(tokens, window, len(sources)), name) for source in sources]
    counts, window = _shares([len(own) for own in ids], tokens, window)
    cut = []
    for own, count, source in zip(ids, counts, sources, strict=True):
        whole = cut_windows(own, window=window, windows=count, name=f"{name} {source}")
        apart = window + (_span(len(own), len(whole), window) - whole.numel()) // len(whole)
        cut.append([torch.tensor(own[at * apart : at * apart + window]) for at in range(len(whole))])
    in_turn = [row for rows in zip_longest(*cut) for row in rows if row is not None]
    return torch.stack(in_turn)


def windows_beyond(
    tokenizer: Any,
    sources: Sequence[str | Path],
    *,
    tokens: int,
    window: int,
    width: int,
    windows: int,
    name: str = "calibrate",
) -> list[tuple[str, Tensor]]:
    """Windows ``[n, width]`` of each text that `calibration_windows` takes none of, and what to call them.

    Args:
        tokenizer: transformers'.
        sources: as they are given to `calibration_windows`.
        tokens: likewise.
        window: likewise.
        width: tokens in each window given back; a text with fewer left is left out.
        windows: how many of each text at most.
        name: of the sources, for errors.
    """
    enough = _enough(tokens, window, len(sources))
    ids = [_beginning(tokenizer, source, enough, name) for source in sources]
    counts, taken = _shares([len(own) for own in ids], tokens, window)
    found = []
    for own, count, source in zip(ids, counts, sources, strict=True):
        used = _span(len(own), min(count, len(own) // taken), taken)
        if len(own) - used >= width:
            left = cut_windows(own[used:], window=width, windows=windows)
            found.append((f"{source} after {used:,} tokens", left))
    return found


def hold_out(windows: Tensor, every: int, *, sources: int = 1) -> tuple[Tensor, Tensor]:
    """Set about every so many windows aside, at least one, of each source in turn: the rest, and those.

    Args:
        windows: ``[N, window]``, of `calibration_windows`.
        every: one in so many; one or a few more where each source would otherwise not have its turn.
        sources: how many texts are mixed in them.

    Raises:
        ArgumentError: there are fewer than two windows, or ``every`` is less than 2.
    """
    if every < 2:
        raise ArgumentError("every", every, "must be at least 2: some windows have to stay")
    if len(windows) < 2:
        raise ArgumentError("windows", len(windows), "must be at least 2, to hold one out")
    while gcd(every, sources) > 1:
        every += 1
    held = torch.arange(len(windows)) % every == min(every, len(windows)) // 2
    return windows[~held], windows[held]


def read_source(source: str | Path, *, characters: int | None = None, name: str = "calibrate") -> str:
    """The text of a source, or at least the first ``characters`` of it.

    Args:
        source: a UTF-8 file; a ``.parquet`` or ``.jsonl`` file, or a folder of one of those or of ``.txt``; or a
            dataset of the Hugging Face hub, ``hf-dataset://owner/name:config:split#column``, where the split is
            ``train`` and the column is ``text`` unless named (``hf-dataset://owner/name::test`` has a split and no
            config). All but the first are read by the ``datasets`` library, and ``#column`` goes with each.
        characters: enough; what is beyond is not read where it need not be.
        name: what an error calls it.

    Raises:
        ArgumentError: it cannot be read, or has no such column.
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
    """Refuse texts of which two are the same, wherever they are: it would count twice.

    Args:
        sources: see `read_source`.
        name: what an error calls them.

    Raises:
        ArgumentError: two are, or one cannot be read.
    """
    known: dict[str, str | Path] = {}
    for source in sources:
        identity = text_identity(source, name=name)
        if identity in known:
            raise ArgumentError(name, str(source), f"is the same text as {known[identity]}; name it once")
        known[identity] = source


def text_identity(source: str | Path, *, name: str = "calibrate") -> str:
    """What tells a text from another, wherever it is: of files a digest of their content and of the column read.

    A dataset of the hub is known by its name alone.

    Args:
        source: see `read_source`.
        name: what an error calls it.

    Raises:
        ArgumentError: it cannot be read.
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


def _enough(tokens: int, window: int, sources: int) -> int:
    """How many characters of each source windows are spread over, and an exam is taken from."""
    return SPREAD * (-(-tokens // sources) + window)


def _span(length: int, count: int, window: int) -> int:
    """How many of a text's tokens its windows are spread over."""
    return max(count * window, length - max(length // _RESERVE, 4 * window))


def _beginning(tokenizer: Any, source: str | Path, characters: int, name: str) -> list[int]:
    """The tokens of so many characters of a source; no more of it is read than that needs."""
    return token_ids(tokenizer, read_source(source, characters=characters, name=name)[:characters])


def _shares(lengths: Sequence[int], tokens: int, window: int) -> tuple[list[int], int]:
    """How many windows of each source are asked for, and of how many tokens they are.

    The first sources have one more where they do not divide.
    """
    if len(lengths) == 1:
        tokens = max(min(tokens, lengths[0]), 2)
    sources = len(lengths)
    count = max(-(-tokens // window), sources)
    window = min(window, max(tokens // count, 2))
    return [count // sources + (index < count % sources) for index in range(sources)], window


def _local(source: str | Path) -> tuple[Path, str]:
    """The file or folder of a source, and the column that is named with it."""
    where, _, column = str(source).partition("#")
    if Path(source).exists() or not Path(where).exists():
        return Path(source), ""  # the # is part of the path
    return Path(where), column


def _digest(file: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _local_files(path: Path, name: str) -> tuple[str, list[str]]:
    """What ``datasets`` calls the kind, and the files in order."""
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
        # Streamed: of a large dataset only the beginning is fetched.
        yield from datasets.load_dataset(*args, **kwargs, streaming=True)
    except Exception as error:  # it raises many kinds
        reason = shorten(str(error), 300, placeholder=" …") or type(error).__name__
        raise ArgumentError(name, str(source), f"could not be read: {reason}") from None


def _text(rows: Iterator[dict[str, Any]], column: str, characters: int | None, source: str | Path, name: str) -> str:
    """The rows' texts, each ending its line."""
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
