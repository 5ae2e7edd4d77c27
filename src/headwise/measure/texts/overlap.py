"""Passages that two texts share: a model must not be evaluated on what it was calibrated on.

Shapes: N windows of W tokens; a run is L tokens in a row within one window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from headwise.measure.texts.windows import token_ids

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
