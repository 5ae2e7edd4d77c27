"""A mixture of texts as windows of tokens: some to calibrate on, some held out, some beyond both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.texts.sources import read_source
from headwise.texts.windows import cut_windows, token_ids

SPREAD = 128
"""Characters of a long text for each token asked for: what windows are spread over, to be about many things."""

_RESERVE = 8
"""One in so many tokens of a text, at its end, are left for an exam, and a few windows at least."""


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
