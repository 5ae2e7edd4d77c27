"""The training loop of healing, and the gradients of a step's windows.

A step is a function of its number: windows are drawn from the seed and the step, and nothing in the model is random.
So a run on a CPU that was killed anywhere goes on to the same bits. On a CPU two windows are differentiated at a
time, each thread with gradients of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.base.options.heal import HealOptions
from headwise.base.processes import all_sum, my_windows, process_count
from headwise.base.progress import Progress, TrainingProgress
from headwise.base.threads import WORKERS, map_in_threads
from headwise.conversion.calibration.windows import CalibrationWindows, plain_windows
from headwise.conversion.healing.objective import (
    StoredTeacher,
    cross_entropy,
    divergence,
    divergence_from_top,
    hidden_error,
)
from headwise.conversion.healing.optimizer import Progressed, TrainingState, gathered_tensor, is_alone_on_cpu, reshard
from headwise.conversion.healing.windows import HealingWindows
from headwise.errors import CheckpointError
from headwise.runtime.attention.rope import rotaries_by_length

Part = TypeVar("Part")


def add_gradients(
    loss_of: Callable[[Part], Tensor], parts: Sequence[Part], parameters: Sequence[nn.Parameter], *, apart: bool
) -> float:
    """Add the gradients of several parts of a loss to those of the parameters, and return the sum of the parts.

    For example ``add_gradients(lambda window: loss(model(window)), windows, [*model.parameters()], apart=True)``.

    Args:
        loss_of: the function that computes a part of the loss.
        parts: the arguments that the function is called with, one for each part.
        parameters: the parameters that are trained.
        apart: whether parts are computed side by side, each thread a fixed share of them with gradients of its own,
            so that sums do not depend on which thread is finished first.
    """
    if not apart or len(parts) < 2 or torch.get_num_threads() < WORKERS:
        losses = []
        for part in parts:
            loss = loss_of(part)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return sum(float(loss) for loss in losses)

    def summed(share: Sequence[Part]) -> tuple[float, list[Tensor | None]]:
        total, sums = 0.0, list[Tensor | None]([None] * len(parameters))
        for part in share:
            loss = loss_of(part)
            _add(sums, torch.autograd.grad(loss, parameters, allow_unused=True), parameters)
            total += float(loss.detach())
        return total, sums

    shares = [parts[first::WORKERS] for first in range(WORKERS)]
    gradients, total = [parameter.grad for parameter in parameters], 0.0
    for part_of_loss, sums in map_in_threads(summed, shares):
        total += part_of_loss
        _add(gradients, sums, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return total


def _add(sums: list[Tensor | None], more: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> None:
    """Add gradients in place. The first of each is copied: one tensor may be the gradient of two parameters."""
    for index, (own, gradient, parameter) in enumerate(zip(sums, more, parameters, strict=True)):
        if gradient is not None:
            sums[index] = torch.empty_like(parameter).copy_(gradient) if own is None else own.add_(gradient)


HEALING = "healing"
"""The name of the stage, for progress."""

CLIP = 1.0
"""The norm that gradients are cut to."""
RATE = 1e-4
"""The learning rate where it cannot follow from the loss."""

RATE_OF_LOSS = 1.8e-4
"""The learning rate of a divergence of 1 nat. A divergence is quadratic in how far weights are from the best ones."""

SHOWN = 10
"""The number of steps whose mean loss is shown beside the progress."""
ROLLBACKS = 3
"""The number of times that a loss may be not finite before a run is given up."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A model, its teacher and what they are trained with.

    Attributes:
        model: the transformers model that is trained, its weights float32.
        teacher: the transformers model that it learns from, or the teacher's likeliest tokens on disk; None for
            cross-entropy alone.
        parameters: the parameters that are trained, by name.
        windows: the windows of text.
        options: the options of the run.
        dtype: the dtype that matrix products are computed in.
    """

    model: Any
    teacher: Any | StoredTeacher | None
    parameters: Mapping[str, nn.Parameter]
    windows: HealingWindows
    options: HealOptions
    dtype: torch.dtype

    def run(self, state: TrainingState, optimizer: torch.optim.Optimizer, progress: Progress) -> Progressed:
        """Train to the end, from where an earlier run was stopped.

        Args:
            state: the state of this run, with what an earlier one saved.
            optimizer: the optimizer of the parameters.
            progress: the callback that is told of each step.

        Raises:
            CheckpointError: the loss stays not finite.
        """
        done = state.load()
        if done is None:
            done = Progressed()
            untrained = self.measure()
            if not math.isfinite(untrained):
                raise CheckpointError("loss", f"{untrained}", "must be finite before any step; check both models")
            done.held_out.append((0, untrained))
            state.save(done)
        first, seconds, begun = done.step, done.seconds, time.perf_counter()
        every = -(-self.windows.steps // self.options.measurements)
        while done.step < self.windows.steps and not done.stopped:
            progress(HEALING, done.step, self.windows.steps)
            start = time.perf_counter()
            loss = self._step(optimizer, done)
            if not math.isfinite(loss):
                done = self._roll_back(state, done)
                continue
            done.step += 1
            done.losses.append(loss)
            done.seconds += time.perf_counter() - start
            if isinstance(progress, TrainingProgress):
                count = done.step - first
                took = time.perf_counter() - begun  # with measurements and saves
                self._report(progress, done, pace=count / (done.seconds - seconds), step_seconds=took / count)
            if done.step % every == 0 or done.step == self.windows.steps:
                held_out = self.measure()
                if not math.isfinite(held_out):  # nothing may be saved that later steps cannot leave
                    done = self._roll_back(state, done)
                    continue
                done.held_out.append((done.step, held_out))
                done.stopped = self._is_flat(done)
                state.save(done)
        progress(HEALING, self.windows.steps, self.windows.steps)
        state.load_best(done)
        return done

    def _report(self, progress: TrainingProgress, done: Progressed, *, pace: float, step_seconds: float) -> None:
        """Say how the training goes.

        Args:
            progress: the callback that is told of the loss, the pace and the time that is left.
            done: the progress of the run so far.
            pace: the steps in a second of training.
            step_seconds: the seconds a step, with all that is done between steps.
        """
        shown = done.losses[-SHOWN:]
        progress.report_training(
            HEALING,
            loss=sum(shown) / len(shown),
            tokens_per_second=self.windows.batch * self.windows.width * pace,
            seconds_left=step_seconds * (self.windows.steps - done.step),
        )

    def _step(self, optimizer: torch.optim.Optimizer, done: Progressed) -> float:
        """Do one step, and return its loss over all processes; where it is not finite, no parameter changes."""
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.options, done.held_out[0][1]) * done.rate * self._schedule(done.step)
        optimizer.zero_grad(set_to_none=True)
        batch = self.windows.step(done.step)
        mine = my_windows(len(batch))
        total = self._differentiate(batch[mine.start : mine.stop])
        norm = gathered_tensor(torch.nn.utils.clip_grad_norm_([*self.parameters.values()], CLIP))
        total = float(all_sum(torch.tensor(total, dtype=torch.float64))) / process_count()
        if not math.isfinite(total + float(norm)):
            return math.nan
        optimizer.step()
        return total

    def _differentiate(self, windows: CalibrationWindows) -> float:
        """Set the gradients of this process's windows, and return their mean loss."""
        together = self._together(len(windows))
        parts = [windows[start : start + together] for start in range(0, len(windows), together)]

        def loss_of(part: CalibrationWindows) -> Tensor:
            return self._loss(part, self.options.text_weight) * (len(part) / len(windows))

        return add_gradients(loss_of, parts, [*self.parameters.values()], apart=self._is_apart)

    @cached_property
    def _is_apart(self) -> bool:
        """Whether windows of a step are computed side by side."""
        models = [model for model in (self.model, self.teacher) if isinstance(model, nn.Module)]
        return is_alone_on_cpu(self.model.device) and not any(map(rotaries_by_length, models))

    def _schedule(self, step: int) -> float:
        """The part of the learning rate at a step: a linear warm-up, and then a cosine to 0."""
        warm = round(self.options.warmup * self.windows.steps)
        if step < warm:
            return (step + 1) / (warm + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(self.windows.steps - warm, 1)))

    def _together(self, count: int) -> int:
        """The number of this process's windows that are computed at once."""
        if self.options.micro_batch is not None:
            return self.options.micro_batch
        return 1 if self.model.device.type == "cpu" else count

    def _loss(self, windows: CalibrationWindows, text_weight: float = 0.0) -> Tensor:
        """The objective on some windows ``[B, W]``, with the cost of the text's own tokens by its weight."""
        own = self._forward(self.model, windows)
        loss, is_text = self._distance(own, windows), ~windows.repeats
        if text_weight and is_text.any():  # windows that repeat passages have tokens that nobody wrote
            part = text_weight * float(is_text.float().mean())
            loss = loss + part * _text_cost(own.logits[is_text.to(own.logits.device)], windows[is_text])
        return loss

    def _distance(self, own: Any, windows: CalibrationWindows) -> Tensor:
        """The objective on some windows ``[B, W]``, of what the model returned for them."""
        logits, device = own.logits, own.logits.device
        if isinstance(self.teacher, StoredTeacher):
            known = (tensor.to(device) for tensor in self.teacher.top(windows))
            return divergence_from_top(logits.flatten(0, 1), *known)
        other = None
        if self.teacher is not None:
            with torch.no_grad():
                other = self._forward(self.teacher, windows)
        if self.options.objective == "distill" and other is not None:
            loss = divergence(logits.flatten(0, 1), other.logits.flatten(0, 1), self.options.temperature)
        else:
            loss = _text_cost(logits, windows)
        if self.options.hidden and other is not None:
            loss = loss + self.options.hidden * hidden_error(own.hidden_states[1:], other.hidden_states[1:])
        return loss

    def _forward(self, model: Any, windows: CalibrationWindows) -> Any:
        return run_model(model, windows, self.dtype, with_states=self.options.hidden > 0)

    @torch.no_grad()
    def measure(self) -> float:
        """The mean loss on held-out windows, without ``text_weight``: with it a run is as good as its divergence."""
        each = map_in_threads if self._is_apart else map
        windows = (plain_windows(row[None]) for row in self.windows.held_out)
        costs = [float(cost) for cost in each(self._loss, windows)]
        reshard(self.model)
        # The mean over processes: all of them stop or go on by the same number, however their sums are rounded.
        return float(all_sum(torch.tensor(sum(costs) / len(costs), dtype=torch.float64))) / process_count()

    def _is_flat(self, done: Progressed) -> bool:
        """Whether the last measurements have not found a lower loss.

        Those of the first half of the steps do not count: the rate is high there, and a loss that it raises falls
        again with it.
        """
        patience = self.options.patience
        later = [step for step, _ in done.held_out if 2 * step > self.windows.steps]
        losses = [loss for _, loss in done.held_out]
        return (
            0 < patience <= len(later)
            and patience < len(losses)
            and min(losses[-patience:]) >= min(losses[:-patience])
        )

    def _roll_back(self, state: TrainingState, done: Progressed) -> Progressed:
        """Return to the newest save, with half the learning rate.

        Raises:
            CheckpointError: this was done too often.
        """
        if done.rollbacks == ROLLBACKS:
            rule = f"is not finite, also at {done.rate:g} of the learning rate; use a lower learning_rate"
            raise CheckpointError("loss", f"step {done.step}", rule)
        saved = state.load()
        assert saved is not None  # the first save is before the first step
        saved.rate, saved.rollbacks = done.rate / 2, done.rollbacks + 1
        return saved


def _text_cost(logits: Tensor, windows: CalibrationWindows) -> Tensor:
    """The mean cost of the windows' own tokens."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), windows.ids[:, 1:].flatten().to(logits.device))


def learning_rate(options: HealOptions, before: float) -> float:
    """The learning rate after warm-up: the user's, or so much that the steps reach about as far as the loss is away.

    A rate that suits a conversion that has lost much undoes what one of little loss has.

    Args:
        options: the options of the run.
        before: the loss on held-out windows before training, in nats a token.
    """
    if options.learning_rate is not None:
        return options.learning_rate
    if options.objective != "distill" or options.hidden > 0:
        return RATE
    return RATE_OF_LOSS * math.sqrt(max(before, 0.0))


def run_model(model: Any, window: CalibrationWindows, dtype: torch.dtype, *, with_states: bool = False) -> Any:
    """Run a transformers model on some windows ``[B, W]``, and return what it returns.

    Args:
        model: the transformers model.
        window: the token ids and positions of the windows.
        dtype: the dtype that matrix products are computed in.
        with_states: whether every layer's output is returned too.
    """
    device = model.device
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        return model(
            window.ids.to(device),
            position_ids=window.positions.to(device),
            attention_mask=torch.ones_like(window.ids, device=device),  # without it, gaps begin another text
            use_cache=False,
            output_hidden_states=with_states,
        )
