"""Tokenise text, cut it into windows of tokens, and find the passages that two texts share.

A model must not be evaluated on what it was calibrated on. Shapes: N windows of W tokens; a run is L tokens in a row
within one window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from headwise.base.options import at_least
from headwise.errors import ArgumentError, SpecError
from headwise.models.checkpoints import tokenize


def token_windows(
    tokenizer: Any, text: str, *, window: int, windows: int | None = None, name: str = "text"
) -> Tensor:
    """Tokenise a text into consecutive windows ``[windows, window]`` without overlap.

    Each begins as the tokenizer begins a text, with a BOS token or without; other special tokens are not added. For
    example ``token_windows(tokenizer, read_text("text.txt"), window=512)``.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text to tokenise; a last part shorter than a window is left out.
        window: the number of tokens in each window, special tokens included.
        windows: the most windows; all when None.
        name: the name of the text in errors.

    Raises:
        ArgumentError: window or windows is not positive, or the text is shorter than one window.
    """
    begin = first_ids(tokenizer)
    if window < 2 + len(begin):
        raise ArgumentError("window", window, f"must be at least {2 + len(begin)} tokens")
    at_least(1).check("windows", windows)
    ids = token_ids(tokenizer, text, at_most=None if windows is None else window * windows)
    shorter = f"--window {len(ids) + len(begin)}" if len(ids) > 1 else "a smaller window"
    cut = cut_windows(ids, window=window - len(begin), windows=windows, name=name, shorter=shorter)
    return put_begin_before(cut, begin)


def token_ids(tokenizer: Any, text: str, *, at_most: int | None = None) -> list[int]:
    """Tokenise a text, adding no special tokens.

    For example ``token_ids(tokenizer, "Once upon a time")``.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text to tokenise.
        at_most: the number of tokens that is enough, so that only the beginning of a long text is read; all when
            None.
    """
    # No tokenizer in use averages over 16 characters a token for long.
    beginning = text if at_most is None else text[: at_most * 32]
    ids: list[int] = tokenize(tokenizer, beginning, add_special_tokens=False)["input_ids"]
    return ids


def cut_windows(
    ids: list[int], *, window: int, windows: int | None = None, name: str = "text", shorter: str = "a smaller window"
) -> Tensor:
    """Cut token ids into windows ``[windows, window]``; see `token_windows`.

    For example ``cut_windows([1, 2, 3, 4, 5], window=2).tolist()`` is ``[[1, 2], [3, 4]]``.

    Args:
        ids: the token ids of the text.
        window: tokens in each window.
        windows: the most windows; all when None.
        name: the name of the text in errors.
        shorter: the advice that an error gives besides a longer text.

    Raises:
        ArgumentError: there are fewer ids than in one window.
    """
    if len(ids) < window:
        raise ArgumentError(
            name, f"{len(ids)} tokens", f"must be at least one window of {window} tokens; a longer text, or {shorter}"
        )
    count = len(ids) // window if windows is None else min(windows, len(ids) // window)
    return torch.tensor(ids[: count * window]).view(count, window)


def put_begin_before(windows: Tensor, begin: Sequence[int]) -> Tensor:
    """Windows ``[n, W]`` of a text, each behind the tokens that begin a text.

    For example ``put_begin_before(torch.tensor([[5, 6], [7, 8]]), [1]).tolist()`` is ``[[1, 5, 6], [1, 7, 8]]``.

    Args:
        windows: token ids of the text in each window, ``[n, W]``.
        begin: the tokens that begin a text, see `first_ids`.
    """
    return torch.cat((torch.tensor(begin, dtype=windows.dtype).expand(len(windows), -1), windows), 1)


def default_window(positions: int | None, most: int, *, around: int = 0) -> int:
    """The default number of a text's tokens in a window: ``most``, or the model's positions if these are fewer.

    For example ``default_window(512, 2048)`` is 512.

    Args:
        positions: the number of the model's positions; None if it has no limit.
        most: the most tokens in a window, those around the text included.
        around: the number of tokens that the tokenizer puts around a text.

    Raises:
        SpecError: the model has no room for two tokens of text.
    """
    if positions is not None and positions < 2 + around:
        raise SpecError("max_position_embeddings", positions, f"must be at least {2 + around} for a text to be read")
    return min(most, positions or most) - around


def first_ids(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before any text, such as a BOS token; empty if it puts none.

    For example ``first_ids(tokenizer)``.
    """
    return wrapping_ids(tokenizer)[0]


def wrapping_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after any text: an encoder's ``[CLS]`` and ``[SEP]``.

    For example ``wrapping_ids(tokenizer)``.
    """
    alone = token_ids(tokenizer, "a")
    whole: list[int] = tokenize(tokenizer, "a")["input_ids"]
    for at in range(len(whole) - len(alone) + 1):
        if alone and whole[at : at + len(alone)] == alone:
            return whole[:at], whole[at + len(alone) :]
    return [], []


def ending_ids(tokenizer: Any, prompt: str, ending: str) -> tuple[list[int], list[int]]:
    """Tokenise a prompt and its ending as one text, and split them; a token that spans both is the ending's.

    For example ``ending_ids(tokenizer, "The sky is", " blue.")``.
    """
    alone = token_ids(tokenizer, prompt)
    whole = token_ids(tokenizer, prompt + ending)
    shared = 0
    while shared < min(len(alone), len(whole)) and alone[shared] == whole[shared]:
        shared += 1
    return whole[:shared], whole[shared:]


RUN = 20
"""Tokens in a row that make a passage: some twelve words, more than two texts have in common by chance."""
SHARED = "that the calibration text has too"
"""The words by which a note about shared passages is recognised."""
TOLERATED = 0.01
"""The fraction of an evaluation text's tokens that may lie in shared passages without a note."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def shared_tokens(evaluation: Sequence[Tensor], calibration: Sequence[Tensor], *, run: int = RUN) -> list[Tensor]:
    """Mark the tokens of an evaluation text that lie in a run of tokens which the calibration text has too.

    For example ``shared_tokens([torch.tensor([5, 1, 2])], [torch.tensor([1, 2])], run=2)[0].tolist()`` is
    ``[False, True, True]``.

    Runs are looked up by a hash and then compared token by token, so the result is exact.

    Args:
        evaluation: the evaluation's windows of token ids, each ``[W]`` or ``[N, W]``.
        calibration: the calibration's windows of token ids, each ``[W]`` or ``[N, W]``.
        run: the number of consecutive tokens that count as a passage.

    Returns:
        A mask for each tensor of ``evaluation``, True where a token lies in a shared run.
    """
    evaluation_rows = [_rows(windows) for windows in evaluation]
    calibration_rows = [_rows(windows) for windows in calibration]
    evaluation_hashes = [_hashes(rows, run) for rows in evaluation_rows]
    calibration_hashes = [_hashes(rows, run) for rows in calibration_rows]
    candidates = zip(calibration_rows, _are_among(calibration_hashes, evaluation_hashes), strict=True)
    runs = {passage.tobytes() for rows, starts in candidates for passage in _runs(rows, run)[starts]}
    shared = []
    matches = _are_among(evaluation_hashes, calibration_hashes)
    for windows, rows, starts in zip(evaluation, evaluation_rows, matches, strict=True):
        starts[starts] = [passage.tobytes() in runs for passage in _runs(rows, run)[starts]]
        covered = np.zeros(rows.shape, bool)
        for offset in range(run if starts.size else 0):
            covered[:, offset : offset + starts.shape[1]] |= starts
        shared.append(torch.from_numpy(covered).view(windows.shape))
    return shared


def shared_fraction(evaluation: Sequence[Tensor], calibration: Sequence[Tensor], *, run: int = RUN) -> float:
    """The fraction of an evaluation text's tokens that `shared_tokens` marks; 0 for an empty text.

    For example ``shared_fraction([torch.arange(100)], [torch.arange(50, 200)])`` is 0.5.
    """
    marks = shared_tokens(evaluation, calibration, run=run)
    total = sum(mark.numel() for mark in marks)
    return sum(int(mark.sum()) for mark in marks) / total if total else 0.0


def overlap_note(evaluation: Sequence[Tensor], calibration: Sequence[Tensor]) -> str | None:
    """A note for the user if more than `TOLERATED` of an evaluation text is in the calibration text; else None.

    For example ``overlap_note([evaluation_windows], [calibration_windows])``.
    """
    fraction = shared_fraction(evaluation, calibration)
    if fraction <= TOLERATED:
        return None
    tokens = sum(windows.numel() for windows in evaluation)
    return (
        f"{fraction:.1%} of the {tokens:,} tokens evaluated on lie in passages of {RUN} or more tokens {SHARED}:"
        " expect a worse result on other text"
    )


def passages_apart(tokenizer: Any, passages: Sequence[str], text: str) -> list[str]:
    """The passages that have no `RUN` tokens in a row in common with a text.

    For example ``passages_apart(tokenizer, reference_topics(slice(10, 20)), language_reference(slice(10)))``.

    Args:
        tokenizer: a tokenizer of transformers.
        passages: the passages to choose from.
        text: the text that passages must differ from.
    """
    ids = [torch.tensor(token_ids(tokenizer, passage), dtype=torch.long) for passage in passages]
    marks = shared_tokens(ids, [torch.tensor(token_ids(tokenizer, text), dtype=torch.long)])
    return [passage for passage, mark in zip(passages, marks, strict=True) if not mark.any()]


def _rows(windows: Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    rows = windows if windows.dim() == 2 else windows[None]
    return rows.cpu().numpy().astype(np.uint64)


def _hashes(rows: np.ndarray[Any, Any], run: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A hash of each run of tokens, ``[N, W - L + 1]``."""
    count = max(rows.shape[1] - run + 1, 0)
    hashed = np.zeros((len(rows), count), np.uint64)
    for offset in range(run if count else 0):
        hashed = (hashed ^ rows[:, offset : offset + count]) * _FACTOR
        hashed ^= hashed >> np.uint64(32)
    return hashed


def _runs(rows: np.ndarray[Any, Any], run: int) -> np.ndarray[Any, Any]:
    """A view ``[N, W - L + 1, L]`` of all runs."""
    if rows.shape[1] < run:
        return np.zeros((len(rows), 0, run), rows.dtype)
    return sliding_window_view(rows, run, axis=1)


def _are_among(hashes: Sequence[np.ndarray[Any, Any]], others: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
    """Masks of these hashes, True where a hash is among the others."""
    if not hashes or not others:
        return [np.zeros(hashed.shape, bool) for hashed in hashes]
    values, other_values = (np.concatenate([hashed.ravel() for hashed in each]) for each in (hashes, others))
    mask = np.isin(values, other_values)
    ends = np.cumsum([hashed.size for hashed in hashes])
    return [part.reshape(hashed.shape) for part, hashed in zip(np.split(mask, ends[:-1]), hashes, strict=True)]
