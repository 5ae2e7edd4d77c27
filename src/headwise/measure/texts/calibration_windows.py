"""A mixture of texts as windows of tokens: some to calibrate on, some held out, some left for an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.measure.texts.sources import read_source
from headwise.measure.texts.windows import cut_windows, token_ids

SPREAD = 128
"""Characters of a long text for each calibration token; windows are spread over them, so that subjects differ."""

_RESERVE = 8
"""One in this many tokens of a text, at its end, is left for an evaluation, but at least a few windows."""


def calibration_windows(
    tokenizer: Any, sources: Sequence[str | Path], *, tokens: int, window: int, name: str = "calibrate"
) -> Tensor:
    """Cut windows ``[N, window]`` of nothing but text from a mixture of texts: an equal share of each, in turn.

    For example ``calibration_windows(tokenizer, ["text.txt", "other.txt"], tokens=4096, window=512)``.

    Windows are spread evenly over a long text, because neighbouring ones are about the same subject; its end is left
    for `windows_beyond`. A text shorter than its share gives all its tokens, so that the result may have fewer than
    ``tokens``. Equal arguments give equal windows.

    Args:
        tokenizer: of transformers.
        sources: the texts; see `read_source`.
        tokens: the number of tokens from all sources; a few more are used if a source would get no window.
        window: the most tokens in each window; fewer if that uses all tokens, or if a single text is shorter.
        name: of the sources in errors.

    Raises:
        ArgumentError: a source cannot be read, or has fewer tokens than a window.
        MissingExtraError: a dataset is named and ``datasets`` is not installed.
    """
    if not sources:
        raise ArgumentError(name, list(sources), "must name at least one text")
    for field, value in (("tokens", tokens), ("window", window)):
        if value < 2:
            raise ArgumentError(field, value, "must be at least 2")
    texts = [_beginning(tokenizer, source, _enough(tokens, window, len(sources)), name) for source in sources]
    counts, window = _shares([len(ids) for ids in texts], tokens, window)
    cut = []
    for ids, count, source in zip(texts, counts, sources, strict=True):
        whole = cut_windows(ids, window=window, windows=count, name=f"{name} {source}")
        stride = window + (_span(len(ids), len(whole), window) - whole.numel()) // len(whole)
        cut.append([torch.tensor(ids[at * stride : at * stride + window]) for at in range(len(whole))])
    in_turn = [row for rows in zip_longest(*cut) for row in rows if row is not None]
    return torch.stack(in_turn)


def windows_beyond(
    tokenizer: Any,
    sources: Sequence[str | Path],
    *,
    tokens: int,
    window: int,
    width: int,
    windows: int | None,
    name: str = "calibrate",
) -> list[tuple[str, Tensor]]:
    """Cut windows ``[n, width]`` from the end of each text, after the windows of `calibration_windows`.

    For example ``windows_beyond(tokenizer, ["text.txt"], tokens=4096, window=512, width=512, windows=2)``.

    Args:
        tokenizer: of transformers.
        sources: as for `calibration_windows`.
        tokens: as for `calibration_windows`.
        window: as for `calibration_windows`.
        width: tokens in each of the new windows; texts with fewer tokens left are left out.
        windows: the most windows from each text; all when None.
        name: of the sources in errors.

    Returns:
        A name and the windows for each text that has tokens left.
    """
    enough = _enough(tokens, window, len(sources))
    texts = [_beginning(tokenizer, source, enough, name) for source in sources]
    counts, taken = _shares([len(ids) for ids in texts], tokens, window)
    beyond = []
    for ids, count, source in zip(texts, counts, sources, strict=True):
        used = _span(len(ids), min(count, len(ids) // taken), taken)
        if len(ids) - used >= width:
            left = cut_windows(ids[used:], window=width, windows=windows)
            beyond.append((f"{source} after {used:,} tokens", left))
    return beyond


def hold_out(windows: Tensor, every: int, *, sources: int = 1) -> tuple[Tensor, Tensor]:
    """Hold out one in ``every`` windows, at least one, from each source in turn.

    For example ``studied, held_out = hold_out(windows, 8)``.

    Args:
        windows: ``[N, window]``, of `calibration_windows`.
        every: one window in this many; increased if some source would never have its turn.
        sources: the number of texts that are mixed in the windows.

    Returns:
        The windows to calibrate on, and the held-out ones.

    Raises:
        ArgumentError: there are fewer than two windows, or ``every`` is less than 2.
    """
    if every < 2:
        raise ArgumentError("every", every, "must be at least 2: some windows have to stay")
    if len(windows) < 2:
        raise ArgumentError("windows", len(windows), "must be at least 2, to hold one out")
    while gcd(every, sources) > 1:
        every += 1
    is_held_out = torch.arange(len(windows)) % every == min(every, len(windows)) // 2
    return windows[~is_held_out], windows[is_held_out]


def _enough(tokens: int, window: int, sources: int) -> int:
    """The number of characters to read of each source, for calibration and evaluation together."""
    return SPREAD * (-(-tokens // sources) + window)


def _span(length: int, count: int, window: int) -> int:
    """The number of a text's tokens that its windows are spread over."""
    return max(count * window, length - max(length // _RESERVE, 4 * window))


def _beginning(tokenizer: Any, source: str | Path, characters: int, name: str) -> list[int]:
    """The tokens of the first characters of a source, of which not much more is read."""
    return token_ids(tokenizer, read_source(source, characters=characters, name=name)[:characters])


def _shares(lengths: Sequence[int], tokens: int, window: int) -> tuple[list[int], int]:
    """The number of windows from each source, and the number of tokens in a window.

    Where windows do not divide evenly, the first sources have one more.
    """
    if len(lengths) == 1:
        tokens = max(min(tokens, lengths[0]), 2)
    sources = len(lengths)
    count = max(-(-tokens // window), sources)
    window = min(window, max(tokens // count, 2))
    return [count // sources + (index < count % sources) for index in range(sources)], window
