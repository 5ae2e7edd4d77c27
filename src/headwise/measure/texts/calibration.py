"""Calibration texts as windows of tokens, some of which are held out.

A mixture of texts gives windows to calibrate on, windows that are held out, and some that are left for an evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.base.options import CALIBRATION_TOKENS, ENOUGH, NARROWEST, STEP, WIDEST, CalibrationOptions
from headwise.errors import ArgumentError
from headwise.measure.texts.sources import named_texts, read_source, refuse_twice, text_identity
from headwise.measure.texts.windows import cut_windows, default_window, put_begin_before, token_ids, wrapping_ids
from headwise.models.checkpoints import Checkpoint, load_tokenizer, max_length

SPREAD = 128
"""The number of characters that are read of a long text for each calibration token; windows are spread over them, so
that subjects differ."""

_RESERVE = 8
"""One in this many tokens of a text, all at its end, is left for an evaluation, which gets at least a few windows."""


def calibration_windows(
    tokenizer: Any, sources: Sequence[str | Path], *, tokens: int, window: int, name: str = "calibrate"
) -> Tensor:
    """Cut windows ``[N, window]`` from a mixture of texts: an equal share of each, in turn, without special tokens.

    For example ``calibration_windows(tokenizer, ["text.txt", "other.txt"], tokens=4096, window=512)``.

    Windows are spread evenly over a long text, because neighbouring ones are about the same subject; its end is left
    for `windows_beyond`. A text shorter than its share gives all its tokens, so that the result may have fewer than
    ``tokens``. Equal arguments give equal windows.

    Args:
        tokenizer: a tokenizer of transformers.
        sources: the texts; see `read_source`.
        tokens: the number of tokens from all sources; a few more are used if a source would get no window.
        window: the most tokens in each window; fewer if that uses all tokens, or if a single text is shorter.
        name: the name of the sources in errors.

    Raises:
        ArgumentError: a source cannot be read, or has fewer tokens than a window.
        MissingExtraError: a dataset is named and ``datasets`` is not installed.
    """
    if not sources:
        raise ArgumentError(name, list(sources), "must name at least one text")
    for field, value in (("tokens", tokens), ("window", window)):
        if value < 2:
            raise ArgumentError(field, value, "must be at least 2")
    texts = [
        _first_tokens(tokenizer, source, _needed_characters(tokens, window, len(sources)), name) for source in sources
    ]
    counts, window = _share_windows([len(ids) for ids in texts], tokens, window)
    cut = []
    for ids, count, source in zip(texts, counts, sources, strict=True):
        whole = cut_windows(ids, window=window, windows=count, name=f"{name} {source}")
        stride = window + (_spanned_tokens(len(ids), len(whole), window) - whole.numel()) // len(whole)
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
        tokenizer: a tokenizer of transformers.
        sources: the texts, see `calibration_windows`.
        tokens: the number of calibration tokens, see `calibration_windows`.
        window: tokens in each calibration window, see `calibration_windows`.
        width: tokens in each of the new windows; texts with fewer tokens left are left out.
        windows: the most windows from each text; all when None.
        name: the name of the sources in errors.

    Returns:
        A name and the windows for each text that has tokens left.
    """
    enough = _needed_characters(tokens, window, len(sources))
    texts = [_first_tokens(tokenizer, source, enough, name) for source in sources]
    counts, taken = _share_windows([len(ids) for ids in texts], tokens, window)
    beyond = []
    for ids, count, source in zip(texts, counts, sources, strict=True):
        used = _spanned_tokens(len(ids), min(count, len(ids) // taken), taken)
        if len(ids) - used >= width:
            left = cut_windows(ids[used:], window=width, windows=windows)
            beyond.append((f"{source} after {used:,} tokens", left))
    return beyond


def hold_out(windows: Tensor, every: int, *, sources: int = 1) -> tuple[Tensor, Tensor]:
    """Hold out one in ``every`` windows, at least one, from each source in turn.

    For example ``studied, held_out = hold_out(windows, 8)``.

    Args:
        windows: the windows of `calibration_windows`, ``[N, window]``.
        every: the number of windows of which one is held out; increased if some source would never have its turn.
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


def _needed_characters(tokens: int, window: int, sources: int) -> int:
    """The number of characters to read of each source, for calibration and evaluation together."""
    return SPREAD * (-(-tokens // sources) + window)


def _spanned_tokens(length: int, count: int, window: int) -> int:
    """The number of a text's tokens that its windows are spread over."""
    return max(count * window, length - max(length // _RESERVE, 4 * window))


def _first_tokens(tokenizer: Any, source: str | Path, characters: int, name: str) -> list[int]:
    """The tokens of the first characters of a source, of which not much more is read."""
    return token_ids(tokenizer, read_source(source, characters=characters, name=name)[:characters])


def _share_windows(lengths: Sequence[int], tokens: int, window: int) -> tuple[list[int], int]:
    """The number of windows from each source, and the number of tokens in a window.

    Where windows do not divide evenly, the first sources have one more.
    """
    if len(lengths) == 1:
        tokens = max(min(tokens, lengths[0]), 2)
    sources = len(lengths)
    count = max(-(-tokens // window), sources)
    window = min(window, max(tokens // count, 2))
    return [count // sources + (index < count % sources) for index in range(sources)], window


WINDOWS = 4
"""The version of the way in which conversions make windows of a text, part of a run's identity. In version 4 they
begin as the model's tokenizer begins a text, some repeat passages, and one is of tokens that begin a text."""

HELD_EVERY = 8
"""One in this many windows is held out."""


@dataclass(frozen=True)
class CalibrationTexts:
    """The calibration texts, and the number of their tokens to use; false if there are no texts.

    For example ``CalibrationTexts(("text.txt", "other.txt"), tokens=65_536)``.

    Attributes:
        sources: the texts; see `headwise.measure.texts.read_source`.
        tokens: the number of tokens from all of them.
        window: tokens in each window; when None, as many as make `ENOUGH` windows of all tokens, from `NARROWEST`
            to `WIDEST`. It is at most the model's positions and the text's length, and for an encoder at most the
            length of its sentences.
    """

    sources: tuple[str | Path, ...] = ()
    tokens: int = CALIBRATION_TOKENS
    window: int | None = None

    def __bool__(self) -> bool:
        return bool(self.sources)

    @property
    def widest(self) -> int:
        """The most tokens that a window has."""
        return self.window or min(max(self.tokens // ENOUGH // STEP * STEP, NARROWEST), WIDEST)

    def text_tokens(self, window: int, begin: int) -> int:
        """The number of tokens of text, where windows have ``window`` tokens of text behind ``begin`` special
        ones."""
        return self.tokens * window // (window + begin)

    def identity(self) -> dict[str, Any]:
        """JSON-able values that identify these texts, whatever their files are called.

        The keys are the names of the options that the values stand for in a run's identity (`Options.identity`).
        """
        return {
            "calibrate": [text_identity(source) for source in self.sources],
            "calibration_tokens": self.tokens,
            "calibration_window": self.widest,
            "calibration_windows": WINDOWS,
        }


NO_TEXTS = CalibrationTexts()


class TextWindows(NamedTuple):
    """Windows of calibration texts.

    For example ``TextWindows(torch.arange(8).view(2, 4), held_out=1)``.

    Attributes:
        ids: token ids of the windows, ``[N, W]``.
        held_out: the number of windows at the end that are held out.
        begin: the number of first tokens of each window that a decoder's tokenizer puts before any text.
    """

    ids: Tensor
    held_out: int
    begin: int = 0


def open_windows(checkpoint: Checkpoint, texts: CalibrationTexts) -> TextWindows:
    """Cut the calibration windows from texts; the held-out windows are the last ones.

    For example ``open_windows(open_checkpoint("./model"), CalibrationTexts(("text.txt",))).ids``.

    Windows begin as the model's tokenizer begins a text; an encoder's also end so.

    Args:
        checkpoint: the model to calibrate.
        texts: the calibration texts.

    Raises:
        ArgumentError: a text cannot be read or is too short, or has tokens outside the model's vocabulary; or the
            windows are longer than the model's positions.
    """
    positions = checkpoint.spec.max_position_embeddings
    if texts.window is not None and positions is not None and texts.window > positions:
        raise ArgumentError("calibration_window", texts.window, f"must be at most {positions}, the model's positions")
    tokenizer = load_tokenizer(checkpoint.path)
    # Models always read text with these tokens around it, and attend to them more than to most others.
    (before, after), most = wrapping_ids(tokenizer), texts.widest
    if checkpoint.spec.is_causal:
        after = []  # the text goes on behind a window, so that nothing ends it
    else:
        most = min(most, max_length(checkpoint.path) or most)
    window = default_window(positions, most, around=len(before) + len(after))
    begin = len(before) if checkpoint.spec.is_causal else 0
    tokens = texts.text_tokens(window, begin)
    windows = calibration_windows(tokenizer, texts.sources, tokens=tokens, window=window)
    if len(windows) == 1:
        half = windows.shape[1] // 2
        if half < 2:
            raise ArgumentError("calibrate", f"{windows.numel()} tokens", "must be at least 4 tokens")
        windows = windows[:, : 2 * half].reshape(2, half)
    last = torch.tensor(after, dtype=windows.dtype).expand(len(windows), -1)
    windows = torch.cat((put_begin_before(windows, before), last), dim=1)
    rest, held_out = hold_out(windows, HELD_EVERY, sources=len(texts.sources))
    windows = torch.cat((rest, held_out))
    refuse_unknown_tokens(checkpoint, windows)
    return TextWindows(windows, len(held_out), begin)


def check_texts(
    calibrate: str | Path | Sequence[str | Path] | None, tokens: int | None, window: int | None
) -> CalibrationTexts:
    """Check the texts that the user named: each can be read, and no two are the same.

    For example ``check_texts("text.txt", tokens=4096, window=None)``.

    Args:
        calibrate: a text, or several, or none.
        tokens: the number of tokens from all of them; `CALIBRATION_TOKENS` when None.
        window: tokens in each window; see `CalibrationTexts`.

    Raises:
        ArgumentError: a text cannot be read or is named twice; ``tokens`` is below 2, or set without a text.
        MissingExtraError: a dataset is named and ``datasets`` is not installed.
    """
    sources = named_texts(calibrate)
    amounts = CalibrationOptions(calibration_tokens=tokens, calibration_window=window).identity()
    for name, value in amounts.items():
        if value is not None and not sources:
            raise ArgumentError(name, value, "goes with calibrate")
    for source in sources:
        read_source(source, characters=1)
    refuse_twice(sources, name="calibrate")
    return CalibrationTexts(sources, CALIBRATION_TOKENS if tokens is None else tokens, window)


def refuse_unknown_tokens(checkpoint: Checkpoint, *windows: Tensor) -> None:
    """Refuse tokens that the model has no embedding for.

    For example ``refuse_unknown_tokens(open_checkpoint("./model"), torch.tensor([1, 2, 3]))``.

    Args:
        checkpoint: the model.
        windows: token ids, of any shape.

    Raises:
        ArgumentError: one is outside the vocabulary.
    """
    vocabulary, largest = checkpoint.spec.vocab_size, max(int(batch.max()) for batch in windows)
    if vocabulary is not None and largest >= vocabulary:
        raise ArgumentError("token", largest, f"is outside the model's vocabulary of {vocabulary}")


def refuse_cross_layers(checkpoint: Checkpoint, texts: CalibrationTexts) -> None:
    """Refuse to calibrate a model with cross-attention, such as Whisper's decoder, on text.

    For example ``refuse_cross_layers(open_checkpoint("./model"), CalibrationTexts(("text.txt",)))``.

    Raises:
        ArgumentError: there is a text and the model has cross-attention.
    """
    if texts and checkpoint.spec.cross_layers:
        rule = f"is text, and a {checkpoint.spec.model_type} model attends to an encoder, which text gives no input"
        raise ArgumentError("calibrate", ", ".join(map(str, texts.sources)), rule)
