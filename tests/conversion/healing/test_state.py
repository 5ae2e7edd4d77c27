"""What a training run saves: a run that is killed between two files goes on, whatever it then finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwise.conversion.healing.optimizer import Progressed, TrainingState
from headwise.conversion.storage import LayerFiles
from tests.conversion.test_resumed import StoppedError, stop_at


class Run:
    """A run of one parameter, which has the number of the step in it."""

    def __init__(self, folder: Path) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.state = TrainingState(folder, {"weight": self.weight}, torch.optim.AdamW([self.weight]))
        self.done = self.state.load() or Progressed()

    def measure(self, step: int, loss: float, value: float | None = None) -> None:
        with torch.no_grad():
            self.weight.fill_(step if value is None else value)
        self.done.step = step
        self.done.held_out.append((step, loss))
        self.state.save(self.done)

    def best(self) -> float:
        self.state.load_best(self.done)
        return self.weight.tolist()[0]


@pytest.mark.parametrize("again", [0.6, 0.3])
def test_the_best_weights_outlive_a_better_step_whose_save_was_killed(
    again: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a step that is done again may find another loss, and then not be the best any more."""
    run = Run(tmp_path)
    run.measure(0, 1.0)
    run.measure(1, 0.5)
    with monkeypatch.context() as patch:
        stop_at(patch, LayerFiles, "save", 1, after=True)
        with pytest.raises(StoppedError):
            run.measure(2, 0.4)
    run = Run(tmp_path)
    assert run.done.step == 1
    run.measure(2, again, value=7.0)
    run.measure(3, 0.8)
    assert run.best() == (1.0 if again > 0.5 else 7.0)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_run_that_was_killed_in_its_first_save_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, LayerFiles, "save", 1, after=True)
        with pytest.raises(StoppedError):
            Run(tmp_path).measure(0, 1.0)
    run = Run(tmp_path)
    for step, loss in enumerate((1.0, 0.5, 0.4, 0.8)):
        run.measure(step, loss)
    assert run.best() == 2.0


def test_the_lowest_loss_of_many_is_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step, loss in enumerate((1.0, 0.5, 0.7, 0.4, 0.3, 0.9)):
        run.measure(step, loss)
        run = Run(tmp_path)
    assert run.best() == 4.0
