"""Windows of a step that are worked on side by side, on several threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.conversion.healing.loop import add_gradients
from headwise.conversion.healing.optimizer import Muon, TrainingState
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import save_tiny
from tests.threads import four_threads

__all__ = ["four_threads"]

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 60


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "text.txt").write_text(TEXT)
    headwise.convert(folder, folder.parent / "half", to="mla", kv_budget=0.5, evaluate=False)
    return folder


@pytest.fixture
def keywords(source: Path) -> dict[str, Any]:
    numbers = {"steps": 6, "window": 16, "batch": 5, "measurements": 3, "learning_rate": 3e-3}
    return {"teacher": source, "text": source.parent / "text.txt", "dtype": "float32", "evaluate": False, **numbers}


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_gradients_of_parts_are_those_of_their_sum(parts: int) -> None:
    torch.manual_seed(0)
    weight, unused = nn.Parameter(torch.randn(6, 4, dtype=torch.float64)), nn.Parameter(torch.randn(3))
    inputs = [torch.randn(5, 4, dtype=torch.float64) for _ in range(parts)]

    def loss_of(one: Tensor) -> Tensor:
        return (one @ weight.mT).square().sum()

    weight.grad = torch.ones_like(weight)
    total = add_gradients(loss_of, inputs, [weight, unused], apart=True)
    expected = 2 * sum(weight @ one.mT @ one for one in inputs) + 1
    assert total == pytest.approx(sum(float(loss_of(one).detach()) for one in inputs))
    torch.testing.assert_close(weight.grad, expected.detach())
    assert unused.grad is None


def test_parameters_with_one_gradient_keep_their_own() -> None:
    one, two = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    add_gradients(lambda factor: (factor * (one + two)).sum(), [1.0, 2.0], [one, two], apart=True)
    assert one.grad is not None
    assert two.grad is not None
    one.grad.mul_(0)
    assert torch.equal(two.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize(
    "more", [{}, {"train": "lora"}, {"hidden": 1.0}, {"checkpointing": True}, {"objective": "cross-entropy"}], ids=str
)
def test_threads_learn_what_one_does(
    more: dict[str, Any], source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    side_by_side = headwise.heal(source.parent / "half", tmp_path / "two", **keywords, **more)
    torch.set_num_threads(1)
    alone = headwise.heal(source.parent / "half", tmp_path / "one", **keywords, **more)
    assert side_by_side.losses == pytest.approx(alone.losses, rel=1e-4)
    assert side_by_side.held_out[-1][1] == pytest.approx(alone.held_out[-1][1], rel=1e-4)


def test_a_killed_run_ends_with_the_same_bits(
    source: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = headwise.heal(source.parent / "half", tmp_path / "whole", **keywords)
    with monkeypatch.context() as patch:
        stop_at(patch, TrainingState, "save", 3, after=True)
        with pytest.raises(StoppedError):
            headwise.heal(source.parent / "half", tmp_path / "out", **keywords)
    assert headwise.heal(source.parent / "half", tmp_path / "out", **keywords).losses == whole.losses
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == two


def test_matrices_turn_alike_on_threads_and_alone() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(24, 40) for _ in range(7)]
    moved = []
    for count in (4, 1):
        torch.set_num_threads(count)
        matrices = [nn.Parameter(torch.zeros(24, 40)) for _ in gradients]
        optimizer = Muon(matrices, [], rate=1e-2, dtype=torch.float32)
        for matrix, gradient in zip(matrices, gradients, strict=True):
            matrix.grad = gradient.clone()
        optimizer.step()
        moved.append(torch.stack([matrix.detach() for matrix in matrices]))
    torch.testing.assert_close(*moved)


def test_layers_that_are_computed_twice_stay_without_dropout(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "opt", dropout=0.5)
    (tmp_path / "text.txt").write_text(TEXT)
    keywords = {"teacher": source, "text": tmp_path / "text.txt", "steps": 3, "window": 16, "evaluate": False}
    headwise.convert(source, tmp_path / "half", to="gqa:2", evaluate=False)
    plain = headwise.heal(tmp_path / "half", tmp_path / "plain", **keywords)
    twice = headwise.heal(tmp_path / "half", tmp_path / "twice", **keywords, checkpointing=True)
    assert twice.losses == pytest.approx(plain.losses, rel=1e-4)
