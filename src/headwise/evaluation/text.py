"""Text as windows of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import tokenize
from headwise.errors import ArgumentError


def read_text(path: str | Path, *, characters: int | None = None, name: str = "text") -> str:
    """The text of a UTF-8 file.

    Args:
        path: of the file.
        characters: how many at most, from the beginning; what is beyond is not read. All when None.
        name: what an error calls it.

    Raises:
        ArgumentError: there is no such file, or what is read is not UTF-8 text.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(characters)
    except OSError as error:
        raise ArgumentError(name, str(path), f"could not be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentError(name, str(path), "must be UTF-8 text") from None


def language_reference(topics: slice = slice(None)) -> str:
    """Python's own language reference: English prose that is on every machine that runs this.

    Args:
        topics: which of its topics, in order of their names.

    Raises:
        ArgumentError: this Python came without it.
    """
    try:
        from pydoc_data.topics import topics as known
    except ImportError:
        raise ArgumentError("pydoc_data.topics", None, "is missing from this Python; name another text") from None
    return "\n\n".join(known[name] for name in sorted(known)[topics])


def token_windows(
    tokenizer: Any, text: str, *, window: int, windows: int | None = None, name: str = "text"
) -> Tensor:
    """Token ids ``[windows, window]``: consecutive windows without overlap, and without added special tokens.

    Args:
        tokenizer: transformers'.
        text: what to cut up; a last part shorter than a window is left out.
        window: tokens in each.
        windows: at most this many; all there are when None.
        name: of the text, for the error.

    Raises:
        ArgumentError: window or windows is not positive, or the text is shorter than one window.
    """
    if window < 2:
        raise ArgumentError("window", window, "must be at least 2 tokens")
    if windows is not None and windows < 1:
        raise ArgumentError("windows", windows, "must be at least 1")
    ids = token_ids(tokenizer, text, at_most=None if windows is None else window * windows)
    return cut_windows(ids, window=window, windows=windows, name=name)


def token_ids(tokenizer: Any, text: str, *, at_most: int | None = None) -> list[int]:
    """The text's tokens, none added; of a long text no more than about ``at_most`` needs is read."""
    # No tokenizer in use averages over 16 characters a token for long.
    some = text if at_most is None else text[: at_most * 32]
    ids: list[int] = tokenize(tokenizer, some, add_special_tokens=False)["input_ids"]
    return ids


def cut_windows(ids: list[int], *, window: int, windows: int | None = None, name: str = "text") -> Tensor:
    """Ids as ``[windows, window]``; see `token_windows`.

    Raises:
        ArgumentError: there are fewer than one window of them.
    """
    if len(ids) < window:
        raise ArgumentError(
            name,
            f"{len(ids)} tokens",
            f"must be at least one window of {window} tokens; a longer text, or a smaller window",
        )
    count = len(ids) // window if windows is None else min(windows, len(ids) // window)
    return torch.tensor(ids[: count * window]).view(count, window)


def read_jsonl(path: str | Path, *, name: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The objects of a ``.jsonl`` file, one a line; empty lines are skipped.

    Args:
        path: a UTF-8 file.
        name: what an error calls it.
        limit: at most this many, from the beginning; all when None.

    Raises:
        ArgumentError: the file cannot be read, a line is no JSON object, there is none, or the limit is not positive.
    """
    if limit is not None and limit < 1:
        raise ArgumentError("limit", limit, "must be at least 1")
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


def first_ids(tokenizer: Any) -> list[int]:
    """The token a tokenizer puts before any text by itself, if it does."""
    ids: list[int] = tokenize(tokenizer, "")["input_ids"]
    return [token for token in ids[:1] if token == tokenizer.bos_token_id]


def wrapping_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens a tokenizer puts before and behind any text by itself: an encoder's ``[CLS]`` and ``[SEP]``."""
    alone = token_ids(tokenizer, "a")
    whole: list[int] = tokenize(tokenizer, "a")["input_ids"]
    for at in range(len(whole) - len(alone) + 1):
        if alone and whole[at : at + len(alone)] == alone:
            return whole[:at], whole[at + len(alone) :]
    return [], []


def ending_ids(tokenizer: Any, prompt: str, ending: str) -> tuple[list[int], list[int]]:
    """A prompt's tokens and its ending's, read as one text: a token that spans both is the ending's."""
    alone = token_ids(tokenizer, prompt)
    whole = token_ids(tokenizer, prompt + ending)
    shared = 0
    while shared < min(len(alone), len(whole)) and alone[shared] == whole[shared]:
        shared += 1
    return whole[:shared], whole[shared:]
