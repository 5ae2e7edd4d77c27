"""The state of a training run: on disk, so that a killed run goes on, and the same run exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.base.processes import on_main_process, process_index
from headwise.conversion.healing.optimizer import gathered_tensor, sharded_like
from headwise.conversion.storage import LOST, LayerFiles
from headwise.errors import CheckpointError

_BEST = 2, 3
"""The numbers of the files with the best parameters."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The names that torch gives AdamW's and Muon's moments."""


@dataclass
class Progressed:
    """The progress of a run.

    Attributes:
        step: the number of finished steps.
        rate: the factor of the learning rate, halved whenever a loss is not finite.
        rollbacks: the number of times that this happened.
        seconds: the seconds spent on training, in all runs together.
        losses: the loss of every finished step, by the objective.
        held_out: the step and the loss of every measurement on held-out windows.
        stopped: whether the run ended early, as the held-out loss fell no more.
    """

    step: int = 0
    rate: float = 1.0
    rollbacks: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    stopped: bool = False

    @property
    def best_step(self) -> int:
        """The step of the lowest measurement, the first of equal ones; 0 while there is none."""
        return min(self.held_out, key=lambda measured: measured[1], default=(0, 0.0))[0]


class TrainingState:
    """Parameters, the optimizer's moments and what has been done, saved and loaded together.

    Two files are written in turn, each completely or not at all, so that one is always there to go on from. The
    parameters of the lowest held-out loss are in one of two others. It stays until a save that names the next one is
    on disk, because a run that is killed between the two may find another loss when it goes on.

    Args:
        folder: the folder of the files.
        parameters: the parameters that are trained, by name.
        optimizer: the optimizer of these parameters.
    """

    def __init__(
        self, folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._files = LayerFiles(folder)
        self._parameters, self._optimizer = parameters, optimizer

    def save(self, progressed: Progressed) -> None:
        """Save everything; when this returns, it is on disk.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            own = self._optimizer.state.get(parameter, {})
            for kind in ("parameter", *(moment for moment in _MOMENTS if moment in own)):
                # One at a time, and kept by the first process alone: together they may not fit a device.
                tensor = gathered_tensor(parameter.detach() if kind == "parameter" else own[kind])
                if process_index() == 0:
                    tensors[f"{kind} {name}"] = tensor.cpu()
        on_main_process(partial(self._write, tensors, progressed))

    def _write(self, tensors: Mapping[str, Tensor], progressed: Progressed) -> None:
        about = asdict(progressed)
        if progressed.held_out and progressed.best_step == progressed.step:  # before the save that says so
            parameters = {name: tensor for name, tensor in tensors.items() if name.startswith("parameter ")}
            before = replace(progressed, held_out=progressed.held_out[:-1]).best_step
            slot = _BEST[1] if self._step_of(_BEST[0]) == before else _BEST[0]
            self._files.file(slot).unlink(missing_ok=True)  # no three of them at a time
            self._files.save(slot, parameters, about)
        newest = self._newest()
        self._files.save(0 if newest is None or newest[0] else 1, tensors, about)

    @torch.no_grad()
    def load_best(self, progressed: Progressed) -> None:
        """Set the parameters to those of the lowest held-out loss.

        Raises:
            CheckpointError: the best parameters are lost.
        """
        if progressed.best_step == progressed.step:
            return
        slots = (slot for slot in _BEST if self._step_of(slot) == progressed.best_step)
        saved = next(filter(None, map(self._files.load, slots)), None)
        if saved is None:
            raise CheckpointError("step", progressed.best_step, LOST)
        for name, parameter in self._parameters.items():
            parameter.copy_(sharded_like(saved[0][f"parameter {name}"], parameter))

    def load(self) -> Progressed | None:
        """Return to the newest save; None if there is none, and nothing is changed."""
        for slot in self._by_age():
            if (loaded := self._files.load(slot)) is not None:
                tensors, about = loaded
                self._set(tensors, about["step"])
                about["held_out"] = [tuple(pair) for pair in about["held_out"]]
                return Progressed(**about)
        return None

    @torch.no_grad()
    def _set(self, tensors: Mapping[str, Tensor], step: int) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(sharded_like(tensors[f"parameter {name}"], parameter))
            moments = {moment: tensors.get(f"{moment} {name}") for moment in _MOMENTS}
            own: dict[str, Any] = {
                moment: sharded_like(tensor, parameter) for moment, tensor in moments.items() if tensor is not None
            }
            if own:
                own["step"] = torch.tensor(float(step), device=parameter.device)
            self._optimizer.state[parameter] = own

    def _newest(self) -> tuple[int, int] | None:
        """The number of the newest file and its step."""
        steps = {slot: step for slot in (0, 1) if (step := self._step_of(slot)) is not None}
        return max(steps.items(), key=lambda item: item[1]) if steps else None

    def _step_of(self, slot: int) -> int | None:
        """The step of a file; None if there is none, or it is damaged."""
        about = self._files.about(slot)
        return None if about is None else int(about["step"])

    def _by_age(self) -> list[int]:
        newest = self._newest()
        return [] if newest is None else [newest[0], 1 - newest[0]]
