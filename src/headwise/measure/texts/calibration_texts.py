"""Calibration texts as windows of tokens, some of which are held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.base.options import CalibrationOptions
from headwise.errors import ArgumentError
from headwise.measure.texts.calibration_windows import calibration_windows, hold_out
from headwise.measure.texts.identity import refuse_twice, text_identity
from headwise.measure.texts.sources import named_texts, read_source
from headwise.measure.texts.windows import begun, usual_window, wrapping_ids
from headwise.models.checkpoints import Checkpoint, load_tokenizer, max_length

TOKENS = 16_384
"""The default number of calibration tokens."""

NARROWEST, WIDEST = 512, 2048
"""The least and the most tokens in a window, where the user says nothing."""

ENOUGH = 32
"""Windows from which on more text makes them wider. Of shorter windows, as many tokens treat more subjects; longer
ones have what a model looks up far back, without which contexts of thousands of tokens lose more and more."""

STEP = 128
"""Windows have a multiple of so many tokens."""

WINDOWS = 4
"""The kind of windows that conversions make of a text, which a killed run goes on with: 4, they begin as the model's
tokenizer begins a text, some repeat passages, and one is of tokens that begin a text."""

HELD_EVERY = 8
"""One window in so many is held out."""


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
    tokens: int = TOKENS
    window: int | None = None

    def __bool__(self) -> bool:
        return bool(self.sources)

    @property
    def widest(self) -> int:
        """The most tokens that a window has."""
        return self.window or min(max(self.tokens // ENOUGH // STEP * STEP, NARROWEST), WIDEST)

    def text_tokens(self, window: int, begin: int) -> int:
        """How many of the tokens are text, of windows of ``window`` tokens of text behind ``begin`` others."""
        return self.tokens * window // (window + begin)

    def identity(self) -> dict[str, Any]:
        """JSON-able values that tell these texts from others, whatever their files are called.

        They have the names of the options that they stand for in a run's identity (`Options.identity`).
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
        ids: ``[N, W]``, token ids.
        held_out: the number of held-out windows at the end.
        begin: how many of the first tokens of each window are those that a decoder's tokenizer puts before any text.
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
    # Models always read text with these tokens around it, and attend to them more than to most words.
    (before, after), most = wrapping_ids(tokenizer), texts.widest
    if checkpoint.spec.is_causal:
        after = []  # a text goes on behind a window
    else:
        most = min(most, max_length(checkpoint.path) or most)
    window = usual_window(positions, most, around=len(before) + len(after))
    begin = len(before) if checkpoint.spec.is_causal else 0
    tokens = texts.text_tokens(window, begin)
    windows = calibration_windows(tokenizer, texts.sources, tokens=tokens, window=window)
    if len(windows) == 1:
        half = windows.shape[1] // 2
        if half < 2:
            raise ArgumentError("calibrate", f"{windows.numel()} tokens", "must be at least 4 tokens")
        windows = windows[:, : 2 * half].reshape(2, half)
    last = torch.tensor(after, dtype=windows.dtype).expand(len(windows), -1)
    windows = torch.cat((begun(windows, before), last), dim=1)
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
        tokens: the number of tokens from all of them; `TOKENS` when None.
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
    return CalibrationTexts(sources, TOKENS if tokens is None else tokens, window)


def refuse_unknown_tokens(checkpoint: Checkpoint, *windows: Tensor) -> None:
    """Refuse tokens that the model has no embedding for.

    For example ``refuse_unknown_tokens(open_checkpoint("./model"), torch.tensor([1, 2, 3]))``.

    Args:
        checkpoint: the model.
        windows: token ids, of any shape.

    Raises:
        ArgumentError: one is outside the vocabulary.
    """
    vocabulary, largest = checkpoint.config.get("vocab_size"), max(int(batch.max()) for batch in windows)
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise ArgumentError("token", largest, f"is outside the model's vocabulary of {vocabulary}")


def refuse_cross_layers(checkpoint: Checkpoint, texts: CalibrationTexts) -> None:
    """Refuse to calibrate a model with cross-attention, such as Whisper's decoder, on text.

    For example ``refuse_cross_layers(open_checkpoint("./model"), CalibrationTexts(("text.txt",)))``.

    Raises:
        ArgumentError: there is a text and the model has cross-attention.
    """
    if texts and checkpoint.spec.cross_layers:
        rule = f"is text, and a {checkpoint.spec.model_type} model decodes what its encoder heard"
        raise ArgumentError("calibrate", ", ".join(map(str, texts.sources)), rule)
