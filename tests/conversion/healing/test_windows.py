"""The windows of a run: every one is read before any is read again, and a step's are a function of its number."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import headwise
from headwise.base.options import HealOptions
from headwise.conversion.healing import windows as module
from headwise.conversion.healing.windows import HELD, HealingWindows, step_count
from headwise.errors import ArgumentError
from headwise.models.checkpoints import Checkpoint, open_checkpoint
from tests.real_models import save_tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 60


def options(text: Path, **others: object) -> HealOptions:
    return HealOptions(**{"teacher": "source", "text": text, "window": 16, "tokens": 640, **others})  # type: ignore[arg-type]


def open_windows(checkpoint: Checkpoint, chosen: HealOptions) -> HealingWindows:
    return module.open_windows(checkpoint, chosen, checkpoint.spec)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_each_pass_reads_every_window_once_in_another_order(text: Path, tiny_llama_folder: Path) -> None:
    windows = open_windows(open_checkpoint(tiny_llama_folder), options(text, batch=2))
    assert windows.held_out.shape == (HELD, 16)
    count = len(windows.train)
    assert windows.steps == 20
    rows = torch.cat([windows.step(index).ids for index in range(count)])  # two passes
    first, second = rows[:count], rows[count:]
    ordered = sorted(map(tuple, windows.train.ids.tolist()))
    assert sorted(map(tuple, first.tolist())) == ordered
    assert sorted(map(tuple, second.tolist())) == ordered
    assert not torch.equal(first, second)


def test_a_step_is_a_function_of_its_number_and_the_seed(text: Path, tiny_llama_folder: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama_folder)
    one, same, other = (open_windows(checkpoint, options(text, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(one.step(7).ids, same.step(7).ids)
    assert any(not torch.equal(one.step(index).ids, other.step(index).ids) for index in range(5))


def test_far_passages_are_as_far_as_the_teachers_rope_reaches(text: Path, tiny_llama_folder: Path) -> None:
    source = open_checkpoint(tiny_llama_folder)
    headwise.convert(source.path, text.parent / "half", to="mla", kv_budget=0.5, evaluate=False)
    keywords = {"to": "mla", "kv_bytes": 0.3, "calibrate": text, "evaluate": False}
    headwise.convert(source.path, text.parent / "coded", **keywords)
    for name, has_gaps in (("half", True), ("coded", False)):  # codes of keys are rotated by slots
        windows = module.open_windows(open_checkpoint(text.parent / name), options(text, window=64), source.spec)
        assert bool(windows.train.repeats.any())
        assert bool((windows.train.positions.diff(dim=1) > 1).any()) is has_gaps


def test_positions_are_those_that_both_models_have(text: Path, tmp_path: Path) -> None:
    few, many = (save_tiny(tmp_path / f"{count}", max_position_embeddings=count) for count in (256, 4096))
    for model, teacher in ((few, many), (many, few)):
        source = open_checkpoint(teacher).spec
        windows = module.open_windows(open_checkpoint(model), options(text, window=64), source).train
        assert 64 <= windows.positions.max() < 256
        with pytest.raises(ArgumentError, match=f"at most 256, the {'model' if model == few else 'teacher'}'s"):
            module.open_windows(open_checkpoint(model), options(text, window=257), source)


@pytest.mark.parametrize("objective", ["distill", "cross-entropy"])
def test_passages_begin_alike_where_the_teacher_says_what_follows(objective: str, text: Path, tmp_path: Path) -> None:
    text.write_text("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=8_000)))
    source = open_checkpoint(save_tiny(tmp_path / "wide", max_position_embeddings=4096))
    windows = open_windows(source, options(text, window=256, tokens=2560, objective=objective)).train
    first = windows.ids[windows.repeats][:, :128].unflatten(1, (4, 32))
    assert len(first) > 0
    shared = first[:, :, [0, 1, 2, 3, 6, 7]]
    assert bool((shared == shared[:, :1]).all()) is (objective == "distill")


def test_held_out_windows_are_not_trained_on(text: Path, tiny_llama_folder: Path) -> None:
    text.write_text("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=40_000)))
    windows = open_windows(open_checkpoint(tiny_llama_folder), options(text, recall=False))
    trained, held_out = ({tuple(row) for row in ids.tolist()} for ids in (windows.train.ids, windows.held_out))
    assert len(held_out) == HELD
    assert len(trained) >= windows.steps - HELD
    assert not trained & held_out


@pytest.mark.parametrize("tokens", [32, 64, 80, 96, 112, 176, 240])
def test_every_window_is_trained_on_or_held_out(tokens: int, text: Path, tiny_llama_folder: Path) -> None:
    windows = open_windows(open_checkpoint(tiny_llama_folder), options(text, tokens=tokens))
    assert 1 <= len(windows.held_out) <= HELD
    assert len(windows.train) + len(windows.held_out) == tokens // 16 + HELD


@pytest.mark.parametrize(
    ("chosen", "steps"),
    [
        ({"tokens": 640}, 40),
        ({"tokens": 641}, 41),
        ({"tokens": 640, "batch": 4}, 10),
        ({"tokens": None, "steps": 7}, 7),
        ({"tokens": None, "alpha": 0.05, "pretraining_tokens": 64_000}, 200),
        ({"tokens": 2}, 1),
    ],
)
def test_steps(chosen: dict[str, object], steps: int, text: Path) -> None:
    assert step_count(options(text, **chosen), 16) == steps


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"steps": 3}, "steps: must be left out beside tokens"),
        ({"tokens": None, "alpha": 0.05}, "alpha: goes with pretraining_tokens"),
        ({"pretraining_tokens": 5}, "pretraining_tokens: goes with alpha"),
        ({"window": 129}, "window: must be at most 128"),
        ({"learning_rate": 0.0}, "learning_rate: must be above 0"),
        ({"warmup": 1.0}, "warmup: must be at least 0 and below 1"),
        ({"batch": 0}, "batch: must be at least 1"),
        ({"seed": 2**32}, "seed: must be at least 0 and below"),
        ({"text_weight": float("inf")}, "text_weight: must be finite"),
        ({"tokens": None, "alpha": float("inf"), "pretraining_tokens": 5}, "alpha: must be finite"),
    ],
)
def test_what_is_refused(chosen: dict[str, object], message: str, text: Path, tiny_llama_folder: Path) -> None:
    field, _, rule = message.partition(": ")
    with pytest.raises(ArgumentError, match=rule) as caught:
        open_windows(open_checkpoint(tiny_llama_folder), options(text, **chosen))
    assert caught.value.field == field
