"""How a conversion ends: the result beside its source, on text that it was not calibrated on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints import Checkpoint, load_tokenizer
from headwise.errors import ArgumentError, HeadwiseError, SpecError
from headwise.evaluation import WINDOW, Evaluation, evaluate_windows, open_pair
from headwise.measurement import available_bytes
from headwise.options import EVALUATION_WINDOWS
from headwise.progress import Progress, silent
from headwise.specs import ModelSpec
from headwise.texts import (
    cut_windows,
    language_reference,
    overlap_note,
    read_source,
    refuse_twice,
    text_identity,
    token_ids,
    token_windows,
    usual_window,
    windows_beyond,
)
from headwise.texts.calibration import NO_TEXTS, CalibrationTexts, open_windows, refuse_unknown_tokens

REFERENCE = "Python's language reference"
_PARTS = (slice(None), slice(0, None, 2), slice(1, None, 2))  # what `headwise demo` writes as texts are its halves

Exam = list[tuple[str, Tensor]]
"""What each text is called, and its windows ``[n, W]``."""


def refuse_unexamined(spec: ModelSpec) -> None:
    """Refuse what next tokens of a text do not measure.

    Raises:
        SpecError: it is an encoder, or attends to one.
    """
    if not spec.is_causal:
        rule = "is an encoder, which predicts no next token; headwise evaluate --retrieval measures one"
        raise SpecError("model_type", spec.model_type, rule)
    if spec.cross_layers:
        raise SpecError("model_type", spec.model_type, "decodes what its encoder heard, which text does not measure")


def choose_exam(
    checkpoint: Checkpoint,
    named: Sequence[str | Path] = (),
    *,
    calibrate: CalibrationTexts = NO_TEXTS,
    calibrated_on: Collection[str] = (),
    window: int | None = None,
    windows: int = EVALUATION_WINDOWS,
) -> Exam:
    """Windows to examine a conversion on.

    They are of the texts that are named; else what the calibration leaves of its own, where that is a window;
    else Python's language reference.

    Args:
        checkpoint: the source.
        named: see `headwise.evaluation.read_source`.
        calibrate: what is calibrated on.
        calibrated_on: the `text_identity` of others that the result is made from.
        window: tokens in each; when None 2048, or as many as the model has positions, or a text that is named alone
            has tokens.
        windows: how many of each text at most; fewer where it is shorter.

    Raises:
        ArgumentError: a text cannot be read, is calibrated on or is shorter than a window, or has tokens that the
            model does not know; or the window is longer than the model's positions.
        SpecError: next tokens of a text do not measure the model.
        CheckpointError: there is no tokenizer.
    """
    refuse_unexamined(checkpoint.spec)
    positions = checkpoint.spec.max_position_embeddings
    usual = usual_window(positions, WINDOW)
    if window is not None and not 2 <= window <= (positions or window):
        limit = "" if positions is None else f" and at most {positions}, by the model's positions"
        raise ArgumentError("window", window, f"must be at least 2{limit}")
    if windows < 1:
        raise ArgumentError("windows", windows, "must be at least 1")
    width = window or usual
    tokenizer = load_tokenizer(checkpoint.path)
    known = {*calibrated_on, *map(text_identity, calibrate.sources)}
    exam: Exam = []
    if named:
        characters = width * windows * 32  # no tokenizer in use averages more to a token for long
        texts = [read_source(text, characters=characters, name="evaluate") for text in named]
        refuse_twice(named, name="evaluate")
        for text in named:
            if text_identity(text, name="evaluate") in known:
                raise ArgumentError("evaluate", str(text), "is calibrated on; name another text, or none")
        ids = [token_ids(tokenizer, text, at_most=width * windows) for text in texts]
        if window is None and len(ids) == 1:
            width = max(min(width, len(ids[0])), 2)
        exam = [
            (str(text), cut_windows(own, window=width, windows=windows, name=f"evaluate {text}"))
            for text, own in zip(named, ids, strict=True)
        ]
    elif calibrate:
        exam = windows_beyond(
            tokenizer,
            calibrate.sources,
            tokens=calibrate.tokens,
            window=usual_window(positions, calibrate.widest),
            width=width,
            windows=windows,
        )
    if not exam:
        if known & {hashlib.sha256(language_reference(part).encode()).hexdigest() for part in _PARTS}:
            rule = "must be named: all texts are calibrated on, and Python's language reference is one of them"
            raise ArgumentError("evaluate", None, rule)
        exam = [(REFERENCE, token_windows(tokenizer, language_reference(), window=width, windows=windows))]
    refuse_unknown_tokens(checkpoint, *(batch for _, batch in exam))
    return exam


def overlap_notes(checkpoint: Checkpoint, exam: Exam, calibrate: CalibrationTexts) -> list[str]:
    """A note for the user where the exam repeats more than 1 % of what is calibrated on; see `overlap_note`."""
    if not (exam and calibrate):
        return []
    windows, _ = open_windows(checkpoint, calibrate)
    note = overlap_note([batch for _, batch in exam], [windows])
    return [] if note is None else [note]


def find_exam(
    checkpoint: Checkpoint,
    evaluate: bool | str | Path | Sequence[str | Path],
    **how: Any,
) -> tuple[Exam, str | None]:
    """`choose_exam`; where the user named no text and there is none, why not in its place.

    Raises:
        HeadwiseError: a text that the user named does not do.
    """
    named = [] if isinstance(evaluate, bool) else [evaluate] if isinstance(evaluate, str | Path) else list(evaluate)
    try:
        return choose_exam(checkpoint, named, **how), None
    except HeadwiseError as error:
        if named:
            raise
        return [], str(error)


def prove(output: Path, source: str | Path, exam: Exam, progress: Progress = silent) -> Evaluation | str:
    """Measure a folder that was just written beside its source; or say why that could not be done.

    Args:
        output: the folder.
        source: what it was converted from.
        exam: of `choose_exam`.
        progress: told of each window.
    """
    try:
        pair = open_pair(output, against=source, progress=progress)
        needed = sum(info.numel for one in pair.checkpoints.values() for info in one.tensors.values())
        needed *= pair.dtype.itemsize
        if (free := available_bytes()) is not None and free < needed:
            # Converting holds one layer; a machine that is just large enough for that must not be killed here.
            return f"not evaluated: both models take {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free"
        return evaluate_windows(pair, exam, progress=progress)
    except KeyboardInterrupt as stopped:
        stopped.add_note("it was being evaluated, which --no-evaluate leaves out")
        raise
    except Exception as error:  # whatever it is, the folder that took so long is there and is the user's
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return f"not evaluated: {kind}{' '.join(str(error).split())}"
