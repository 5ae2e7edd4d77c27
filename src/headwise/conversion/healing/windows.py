"""The windows of text that a model is healed on, in the order of its steps.

Shapes: N windows, W tokens in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from headwise.base.options.heal import HEALING_TOKENS, HealOptions
from headwise.conversion.calibration.windows import CalibrationWindows, plain_windows, recall_windows
from headwise.errors import ArgumentError
from headwise.measure.texts import named_texts, refuse_twice
from headwise.measure.texts.calibration import calibration_windows, hold_out, refuse_unknown_tokens
from headwise.measure.texts.windows import default_window, first_ids, put_begin_before
from headwise.models.checkpoints import Checkpoint, load_tokenizer
from headwise.models.specs import ModelSpec
from headwise.runtime.quantization.transform_code import FILE as CODES

WINDOW = 1024
"""The default number of tokens in a window."""

HELD = 4
"""The most windows that are held out, and measured while the model is trained."""


@dataclass(frozen=True, eq=False)
class HealingWindows:
    """The windows of one run.

    Attributes:
        train: the windows to train on, as a conversion has them: some may repeat passages.
        held_out: the held-out windows of plain text, ``[H, W]``; H is at most `HELD`.
        batch: the number of windows in each step.
        steps: the number of steps.
        seed: the seed of the order.
        read_tokens: the number of tokens that were read of the texts, from their beginning.
    """

    train: CalibrationWindows
    held_out: Tensor
    batch: int
    steps: int
    seed: int
    read_tokens: int

    @property
    def width(self) -> int:
        """W, the number of tokens in a window."""
        return self.held_out.shape[1]

    @property
    def tokens(self) -> int:
        """The number of tokens in all steps."""
        return self.steps * self.batch * self.width

    def step(self, index: int) -> CalibrationWindows:
        """The windows of a step, a function of its number alone; every pass over the text has another order.

        A killed run therefore goes on with the windows that it would have had, without a state of the draw.
        """
        places = torch.arange(index * self.batch, (index + 1) * self.batch)
        rounds = places // len(self.train)
        rows = [self._order(int(one))[int(at)] for one, at in zip(rounds, places % len(self.train), strict=True)]
        return self.train[torch.stack(rows)]

    def read_in_order(self) -> Iterator[CalibrationWindows]:
        """Every window that the run reads, ``[1, W]`` each: those of its steps, and the held-out ones."""
        for index in range(self.steps):
            batch = self.step(index)
            yield from (batch[row : row + 1] for row in range(len(batch)))
        yield from (plain_windows(row[None]) for row in self.held_out)

    def _order(self, index: int) -> Tensor:
        """The order of one pass over all windows."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return torch.randperm(len(self.train), generator=generator)


def open_windows(
    checkpoint: Checkpoint, options: HealOptions, source: ModelSpec, *, name: str = "text"
) -> HealingWindows:
    """Cut the windows of a run from its texts.

    Args:
        checkpoint: the converted model.
        options: the options of the run.
        source: the teacher, whose RoPE says how far behind passages can be.
        name: the name of the texts in errors.

    Raises:
        ArgumentError: a text cannot be read, is named twice or too short, or has tokens outside the vocabulary; or
            the window is longer than the model's or the teacher's positions.
    """
    sources = named_texts(options.text)
    refuse_twice(sources, name=name)
    known = [spec.max_position_embeddings for spec in (checkpoint.spec, source)]
    positions = min((count for count in known if count is not None), default=None)
    if options.window is not None and positions is not None and options.window > positions:
        whose = "model" if positions == known[0] else "teacher"
        raise ArgumentError("window", options.window, f"must be at most {positions}, the {whose}'s positions")
    tokenizer = load_tokenizer(checkpoint.path)
    begin = first_ids(tokenizer)
    width = default_window(positions, options.window or WINDOW, around=len(begin))  # of text alone
    wanted = step_count(options, width + len(begin)) * options.batch
    read = (wanted + HELD) * width
    ids = calibration_windows(tokenizer, sources, tokens=read, window=width, name=name)
    if len(ids) < 2:
        rule = f"must be more than {width}, for one window to train on and one that is held out"
        raise ArgumentError(name, f"{ids.numel()} tokens", rule)
    ids = put_begin_before(ids, begin)
    train, held_out = hold_out(ids, max(len(ids) // HELD, 2), sources=len(sources))
    train, held_out = torch.cat((train, held_out[HELD:])), held_out[:HELD]
    refuse_unknown_tokens(checkpoint, ids)
    width = ids.shape[1]
    plain = windows = plain_windows(train, begin=len(begin))
    if options.recall:  # a text's own tokens are no target where passages were made alike
        reached = replace(source, max_position_embeddings=positions)
        windows = recall_windows(train, 0, reached, alike=options.objective == "distill", begin=len(begin))
    if (checkpoint.path / CODES).is_file():  # keys in codes are rotated by their slots, which know no gaps
        windows = replace(windows, positions=plain.positions)
    return HealingWindows(windows, held_out, options.batch, step_count(options, width), options.seed, read)


def step_count(options: HealOptions, width: int) -> int:
    """The number of steps that a run's options amount to, in windows of ``width`` tokens."""
    if options.steps is not None:
        return options.steps
    tokens = options.tokens or HEALING_TOKENS
    if options.alpha is not None and options.pretraining_tokens is not None:
        tokens = ceil(options.alpha * options.pretraining_tokens)
    return max(ceil(tokens / (width * options.batch)), 1)
