"""Measure how much of an evaluation text is in the calibration text, for the notes in tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from headwise.measure.texts import read_text, shared_fraction, token_windows
from headwise.measure.texts.calibration import CalibrationTexts, open_windows
from headwise.measure.texts.windows import TOLERATED
from headwise.models.checkpoints import Checkpoint, load_tokenizer


def shared_fractions(
    checkpoint: Checkpoint, texts: Mapping[str, Sequence[Tensor]], calibrate: CalibrationTexts
) -> dict[str, float]:
    """The fraction of each text's tokens that lie in passages of the calibration text; empty without calibration.

    Args:
        checkpoint: the source.
        texts: windows of tokens, by name.
        calibrate: the calibration texts of the conversion.
    """
    if not calibrate:
        return {}
    windows = open_windows(checkpoint, calibrate).ids
    return {name: round(shared_fraction(batches, [windows]), 4) for name, batches in texts.items()}


def exam_windows(
    checkpoint: Checkpoint, texts: Mapping[str, Path], *, window: int, windows: int
) -> dict[str, list[Tensor]]:
    """The windows of each text that `headwise.evaluate` scores, by the names of the texts."""
    tokenizer = load_tokenizer(checkpoint.path)
    return {
        name: [token_windows(tokenizer, read_text(path), window=window, windows=windows)]
        for name, path in texts.items()
    }


def shared_mark(fraction: float | None) -> str:
    """A note for a table's cell about a text that is calibrated on in part; empty up to `TOLERATED`."""
    return f", {fraction:.0%} shared" if fraction is not None and fraction > TOLERATED else ""
