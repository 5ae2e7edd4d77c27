"""From texts to a conversion that can begin: windows of tokens, some held out, and the two streams at layer 0."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint, load_tokenizer
from headwise.conversion.sequential import STAGES, Sequential
from headwise.errors import ArgumentError
from headwise.evaluation import (
    calibration_windows,
    hold_out,
    max_length,
    read_source,
    refuse_twice,
    usual_window,
    wrapping_ids,
)
from headwise.hf import LayerwiseModel
from headwise.progress import Progress

TOKENS = 16_384
"""Calibrated on where nobody says how many."""

WINDOW = 1024
"""Shorter ones begin more often: how a text begins is what an attention rests on, and a conversion is only as good as
the beginnings it has seen. Longer ones show more of what lies far apart."""
HELD_EVERY = 8


def refuse_stages(without: Collection[str]) -> None:
    """Refuse to leave out what is not a stage.

    Raises:
        ArgumentError: it is none.
    """
    for name in without:
        if name not in STAGES:
            raise ArgumentError("without", name, f"must be one of {', '.join(STAGES)}")


def begin(
    checkpoint: Checkpoint,
    texts: Sequence[str | Path],
    folder: Path,
    *,
    tokens: int,
    stages: Collection[str] = STAGES,
    run: str = "",
    make: type[Sequential] = Sequential,
    progress: Progress,
) -> Sequential:
    """A conversion that is about to convert layer 0.

    Args:
        checkpoint: the source.
        texts: see `calibration_windows`.
        folder: for activations.
        tokens: how many to look at, in windows of 1024 (shorter where the model or the text is); an encoder's are as
            long as the sentences it reads, with the tokens that its tokenizer puts around them.
        stages: of `STAGES`, those that are done.
        run: what tells this conversion from another; one that was killed goes on.
        make: the kind of conversion.
        progress: told of windows and layers.

    Raises:
        ArgumentError: a text cannot be read or is too short, or has tokens the model does not know.
    """
    windows, held = open_windows(checkpoint, texts, tokens)
    # In float32 whatever the weights are stored in: a layer is solved for what it should be given.
    model = LayerwiseModel(checkpoint, torch.float32)
    return make(model, windows, held=held, folder=folder, stages=stages, run=run, progress=progress)


def open_windows(checkpoint: Checkpoint, texts: Sequence[str | Path], tokens: int) -> tuple[Tensor, int]:
    """Windows to calibrate on and, last, those held out; and how many those are.

    Raises:
        ArgumentError: a text cannot be read or is too short, or has tokens the model does not know.
    """
    tokenizer = load_tokenizer(checkpoint.path)
    before, after, most = list[int](), list[int](), WINDOW
    if not checkpoint.spec.is_causal:
        # An encoder never reads text without the tokens around it, and attends to them more than to most words.
        before, after = wrapping_ids(tokenizer)
        most = min(WINDOW, max_length(checkpoint.path) or WINDOW)
    window = usual_window(checkpoint.spec.max_position_embeddings, most, around=len(before) + len(after))
    windows = calibration_windows(tokenizer, texts, tokens=tokens, window=window)
    if len(windows) == 1:
        half = windows.shape[1] // 2
        if half < 2:
            raise ArgumentError("calibrate", f"{windows.numel()} tokens", "must be at least 4 tokens")
        windows = windows[:, : 2 * half].reshape(2, half)
    first, last = (torch.tensor(ids, dtype=windows.dtype).expand(len(windows), -1) for ids in (before, after))
    windows = torch.cat((first, windows, last), dim=1)
    rest, held = hold_out(windows, HELD_EVERY, sources=len(texts))
    windows = torch.cat((rest, held))
    refuse_unknown_tokens(checkpoint, windows)
    return windows, len(held)


def check_texts(calibrate: str | Path | Sequence[str | Path] | None, tokens: int) -> list[str | Path]:
    """The texts that were named, every one of which can be read, and none of which is another.

    Raises:
        ArgumentError: one cannot or is, or too few tokens are asked for.
        MissingExtraError: a dataset is named and ``datasets`` is not installed.
    """
    if tokens < 2:
        raise ArgumentError("calibration_tokens", tokens, "must be at least 2")
    texts = [calibrate] if isinstance(calibrate, str | Path) else list(calibrate or ())
    for text in texts:
        read_source(text, characters=1)
    refuse_twice(texts, name="calibrate")
    return texts


def refuse_unknown_tokens(checkpoint: Checkpoint, *windows: Tensor) -> None:
    """Refuse tokens that the model has no embedding for.

    Raises:
        ArgumentError: there are some.
    """
    vocabulary, largest = checkpoint.config.get("vocab_size"), max(int(batch.max()) for batch in windows)
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise ArgumentError("token", largest, f"is outside the model's vocabulary of {vocabulary}")


def refuse_cross_layers(checkpoint: Checkpoint, texts: Sequence[str | Path]) -> None:
    """Refuse a text where a model decodes what its encoder heard.

    Raises:
        ArgumentError: it does.
    """
    if texts and checkpoint.spec.cross_layers:
        rule = f"is text, and a {checkpoint.spec.model_type} model decodes what its encoder heard"
        raise ArgumentError("calibrate", ", ".join(str(text) for text in texts), rule)
