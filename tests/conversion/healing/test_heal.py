"""Healing end to end: what it learns, what it writes, and what a killed run, a NaN or bad input does to it."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import headwise
from headwise.base.options import HealOptions
from headwise.conversion import export_gguf
from headwise.conversion.healing import loop
from headwise.conversion.healing.objective import StoredTeacher
from headwise.conversion.healing.optimizer import TrainingState
from headwise.conversion.healing.report import CONVERSION
from headwise.errors import CheckpointError, HeadwiseError
from tests.byte_level import save_byte_level
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import exchange_tokens, save_tiny

module = importlib.import_module("headwise.conversion.healing.heal")

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 60


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    folder = source.parent / "half"
    headwise.convert(source, folder, to="mla", kv_budget=0.5, evaluate=False)
    return folder


@pytest.fixture(scope="module")
def coded(source: Path) -> Callable[[str], Path]:
    """The folder that the source becomes with a cache in codes, made once; not to be changed."""

    def make(to: str) -> Path:
        text = {"calibrate": source.parent / "text.txt", "calibration_tokens": 1024}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("headwise.conversion.codes.RATIOS", (1.0, 1.6))  # each takes a second
            headwise.convert(source, source.parent / f"coded {to}", to=to, kv_bytes=0.12, **text, evaluate=False)
        return source.parent / f"coded {to}"

    return cache(make)


@pytest.fixture(scope="module")
def usual(source: Path) -> dict[str, Any]:
    """The options of most runs."""
    return {
        "teacher": source,
        "text": source.parent / "text.txt",
        "steps": 12,
        "window": 16,
        "measurements": 4,
        "learning_rate": 3e-3,
        "dtype": "float32",
        "evaluate": False,
    }


@pytest.fixture
def keywords(usual: dict[str, Any]) -> dict[str, Any]:
    """The same, to be changed."""
    return dict(usual)


@pytest.fixture(scope="module")
def whole(converted: Path, usual: dict[str, Any]) -> Any:
    """The report of a run with these options, whose folder is not to be changed."""
    return headwise.heal(converted, converted.parent / "whole", **usual)


def test_the_model_gets_nearer_to_its_teacher(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    report = headwise.heal(converted, tmp_path / "out", **{**keywords, "steps": 40, "evaluate": True})
    assert report.before is not None
    assert report.after is not None
    assert report.after.kl is not None
    assert report.before.kl is not None
    assert report.after.kl < 0.8 * report.before.kl
    assert report.held_out[-1][1] < 0.8 * report.held_out[0][1]
    assert len(report.losses) == report.steps == 40
    assert report.tokens == 40 * 16
    assert report.best_step == min(report.held_out, key=lambda pair: pair[1])[0]


def test_the_learning_rate_follows_from_what_was_lost(
    converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    del keywords["learning_rate"]
    report = headwise.heal(converted, tmp_path / "out", **keywords)
    assert report.learning_rate == 1.8e-4 * math.sqrt(report.held_out[0][1])
    assert report.to_dict()["learning_rate"] == report.learning_rate
    named = headwise.heal(converted, tmp_path / "named", **keywords, learning_rate=report.learning_rate)
    assert named.losses == report.losses
    for other in ({"objective": "cross-entropy"}, {"hidden": 0.5}):
        assert headwise.heal(converted, tmp_path / "other", **keywords, **other, overwrite=True).learning_rate == 1e-4


def test_the_rate_rises_to_it_and_falls_by_a_cosine(keywords: dict[str, Any]) -> None:
    options = HealOptions(**{**keywords, "warmup": 0.1, "steps": 100})
    windows = SimpleNamespace(steps=100)
    rates = [loop.Loop(None, None, {}, windows, options, torch.float32)._schedule(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10:] == pytest.approx([(1 + math.cos(math.pi * step / 90)) / 2 for step in range(90)])


def test_products_in_bfloat16_move_float32_weights(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    whole, half = (
        headwise.heal(converted, tmp_path / dtype, **{**keywords, "steps": 30, "dtype": dtype})
        for dtype in ("float32", "bfloat16")
    )
    assert half.losses != whole.losses
    assert half.held_out[0][1] == pytest.approx(whole.held_out[0][1], rel=0.05)
    assert half.held_out[-1][1] < 0.8 * half.held_out[0][1]


def test_a_model_that_lost_nothing_is_not_moved(source: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    del keywords["learning_rate"]
    report = headwise.heal(source, tmp_path / "out", **keywords)
    assert report.held_out[0][1] == pytest.approx(0, abs=1e-6)
    assert report.learning_rate == pytest.approx(0, abs=1e-6)
    assert report.held_out[-1][1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("more", [{}, {"teacher_top": 8}, {"objective": "cross-entropy"}])
def test_windows_that_are_computed_at_once_change_nothing(
    more: dict[str, Any], converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    options = {**keywords, **more, "batch": 5, "steps": 4}
    losses = [
        headwise.heal(converted, tmp_path / f"{count}", **options, micro_batch=count).losses for count in (1, 2, 9)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_what_was_measured_is_what_the_folder_holds(
    converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    exam = tmp_path / "exam.txt"
    exam.write_text(TEXT[::-1])
    report = headwise.heal(converted, tmp_path / "out", **{**keywords, "evaluate": exam})
    assert report.after is not None
    again = headwise.evaluate(tmp_path / "out", text=exam, against=keywords["teacher"], windows=2)
    assert again.kl == pytest.approx(report.after.kl, rel=1e-6)
    before = headwise.evaluate(converted, text=exam, against=keywords["teacher"], windows=2)
    assert report.before is not None
    assert before.kl == pytest.approx(report.before.kl, rel=1e-6)


def test_the_folder_is_the_converted_one_with_other_values(converted: Path, whole: Any) -> None:
    out = Path(whole.output)
    before, after = (load_file(folder / "model.safetensors") for folder in (converted, out))
    assert {name: (t.shape, t.dtype) for name, t in before.items()} == {
        name: (t.shape, t.dtype) for name, t in after.items()
    }
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((converted / "config.json").read_text()) == json.loads((out / "config.json").read_text())
    assert (out / CONVERSION).read_bytes() == (converted / "README.md").read_bytes()
    card = (out / "README.md").read_text()
    assert str(out.parent) not in card
    assert "trained by headwise to behave like `model`" in card
    assert "- distillation" in card
    assert "Not trained" not in card
    document = json.loads((out / "healing.json").read_text())
    assert document["steps"] == 12
    assert headwise.load(out)(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


@pytest.mark.parametrize("train", ["attention", "new"])
def test_what_is_not_trained_keeps_its_bits(
    train: str, converted: Path, source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    report = headwise.heal(converted, tmp_path / "out", **keywords, train=train)
    before, after = (load_file(folder / "model.safetensors") for folder in (converted, tmp_path / "out"))
    known = load_file(source / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if train == "attention":
        expected = {name for name in before if ".self_attn." in name}
    else:
        expected = {name for name in before if name not in known or known[name].shape != before[name].shape}
    assert changed == expected
    assert report.trained_parameters == sum(before[name].numel() for name in expected)


def test_changes_of_low_rank_are_merged(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    report = headwise.heal(converted, tmp_path / "out", **keywords, train="lora", lora_rank=2)
    before, after = (load_file(folder / "model.safetensors") for folder in (converted, tmp_path / "out"))
    assert report.held_out[-1][1] < report.held_out[0][1]
    assert before.keys() == after.keys()
    changed = {
        name: (after[name] - before[name]).double() for name in before if not torch.equal(before[name], after[name])
    }
    assert {name.rsplit(".", 2)[1] for name in changed} >= {"q_proj", "o_proj", "kv_b_proj", "down_proj"}
    assert "lm_head.weight" not in changed
    assert all(int(torch.linalg.matrix_rank(change, rtol=1e-3)) <= 2 for change in changed.values())


@pytest.mark.parametrize(("method", "call"), [("save", 1), ("save", 2), ("save", 4), ("load", 1)])
@pytest.mark.parametrize("after", [False, True])
def test_a_killed_run_goes_on_and_computes_the_same(
    method: str,
    call: int,
    after: bool,
    whole: Any,
    converted: Path,
    keywords: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, TrainingState, method, call, after=after)
        with pytest.raises(StoppedError):
            headwise.heal(converted, tmp_path / "out", **keywords)
    assert not (tmp_path / "out").exists()
    resumed = headwise.heal(converted, tmp_path / "out", **keywords)
    assert resumed.losses == whole.losses
    assert resumed.held_out == whole.held_out
    one, other = (load_file(Path(folder) / "model.safetensors") for folder in (whole.output, tmp_path / "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_was_killed_in_any_step_and_goes_on(
    whole: Any, converted: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (2, 5, 1, 4, 3):  # steps of each run until it is killed
        with monkeypatch.context() as patch:
            stop_at(patch, loop.Loop, "_step", call, after=True)
            with pytest.raises(StoppedError):
                headwise.heal(converted, tmp_path / "out", **keywords)
    assert headwise.heal(converted, tmp_path / "out", **keywords).losses == whole.losses
    one, other = (load_file(Path(folder) / "model.safetensors") for folder in (whole.output, tmp_path / "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_loss_that_is_not_finite_rolls_back(
    converted: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = loop.Loop._loss, 0

    def once_nan(self: loop.Loop, *args: Any) -> torch.Tensor:
        nonlocal calls
        loss = original(self, *args)
        if loss.requires_grad:
            calls += 1
        return loss * (torch.nan if calls == 8 else 1)

    monkeypatch.setattr(loop.Loop, "_loss", once_nan)
    report = headwise.heal(converted, tmp_path / "out", **keywords)
    assert (report.rollbacks, report.steps) == (1, 12)
    assert all(torch.tensor(report.losses).isfinite())
    assert "the learning rate was halved" in (tmp_path / "out" / "README.md").read_text()
    assert all(t.isfinite().all() for t in load_file(tmp_path / "out" / "model.safetensors").values())


def test_a_run_whose_loss_stays_not_finite_is_given_up(
    converted: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.Loop._loss
    monkeypatch.setattr(loop.Loop, "_loss", lambda *a: original(*a) * (torch.nan if torch.is_grad_enabled() else 1))
    with pytest.raises(CheckpointError, match="loss = 'step 0': is not finite"):
        headwise.heal(converted, tmp_path / "out", **keywords)
    assert not (tmp_path / "out").exists()


def test_it_stops_where_the_held_out_loss_falls_no_more(
    source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    """The teacher itself has nothing to learn: every step leads away from it."""
    report = headwise.heal(source, tmp_path / "out", **{**keywords, "steps": 40, "measurements": 20, "patience": 3})
    assert report.stopped
    assert report.steps == 40 // 2 + 2 * 3 < report.planned_steps
    assert report.best_step == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    # Nothing is lost by it: float32 holds all that the model's float64 weights have but rounding.
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)


def test_a_step_that_breaks_the_model_is_not_saved(
    converted: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, broken = loop.Loop._step, []

    def breaking(self: loop.Loop, optimizer: torch.optim.Optimizer, done: Any) -> float:
        loss = original(self, optimizer, done)
        if done.step == 5 and not broken:  # right before a measurement
            broken.append(1)
            with torch.no_grad():
                next(iter(self.parameters.values())).fill_(torch.nan)
        return loss

    monkeypatch.setattr(loop.Loop, "_step", breaking)
    report = headwise.heal(converted, tmp_path / "out", **keywords)
    assert broken
    assert report.rollbacks == 1
    assert all(t.isfinite().all() for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert report.steps == 12


def test_progress_is_told_how_the_training_goes(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    class Told:
        """Progress that keeps what it was told."""

        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def __call__(self, stage: str, done: int, total: int) -> None:
            assert done <= total

        def report_training(self, stage: str, **how: float) -> None:
            assert stage == "healing"
            self.steps.append(how)

    told = Told()
    report = headwise.heal(converted, tmp_path / "out", **keywords, progress=told)
    assert len(told.steps) == report.steps
    assert told.steps[0]["loss"] == report.losses[0]
    assert told.steps[-1]["loss"] == pytest.approx(sum(report.losses[-10:]) / len(report.losses[-10:]))
    assert told.steps[-1]["tokens_per_second"] == pytest.approx(report.tokens_per_second)
    assert told.steps[0]["seconds_left"] > told.steps[-1]["seconds_left"] == 0


def test_uptraining_needs_no_teachers_logits(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    report = headwise.heal(converted, tmp_path / "out", **keywords, objective="cross-entropy")
    assert report.held_out[-1][1] < report.held_out[0][1]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trained by headwise to predict text." in card
    assert "distillation" not in card
    options = {**keywords, "steps": 1, "objective": "cross-entropy", "hidden": 1.0}
    headwise.heal(converted, tmp_path / "both", **options)
    card = (tmp_path / "both" / "README.md").read_text()
    assert "to predict text, with layers' outputs like those of `model`." in card
    assert "- distillation" in card


def test_a_model_with_nothing_new_is_refused_before_any_work(
    source: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_train", None)
    with pytest.raises(HeadwiseError, match="train = 'new': leaves nothing to train"):
        headwise.heal(source, tmp_path / "out", **keywords, train="new")
    assert not any(tmp_path.iterdir())


def test_computing_layers_twice_changes_nothing(
    whole: Any, converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    other = headwise.heal(converted, tmp_path / "other", **keywords, checkpointing=True)
    assert other.losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_teacher_on_disk_teaches_the_same(
    whole: Any, converted: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(StoredTeacher, "top", lambda *a, top=StoredTeacher.top: (loaded.append(1), top(*a))[1])
    stored = headwise.heal(converted, tmp_path / "stored", **keywords, teacher_top=97)  # all of the vocabulary
    assert len(loaded) >= 12
    assert stored.losses == pytest.approx(whole.losses, rel=0.02)  # probabilities are kept in float16
    few = headwise.heal(converted, tmp_path / "few", **keywords, teacher_top=8)
    assert few.held_out[0][1] < whole.held_out[0][1]  # a lower bound
    assert few.held_out[-1][1] < few.held_out[0][1]
    with pytest.raises(HeadwiseError, match=r"teacher_top = 98: must be at most 97, the vocabulary"):
        headwise.heal(converted, tmp_path / "many", **keywords, teacher_top=98)


def test_a_stored_teacher_is_not_loaded_again(
    converted: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(module, "load", lambda path, **k: (loaded.append(Path(path)), headwise.load(path, **k))[1])
    whole = headwise.heal(converted, tmp_path / "whole", **keywords, teacher_top=8)
    assert loaded == [keywords["teacher"], converted]
    with monkeypatch.context() as patch:
        stop_at(patch, module, "_write", 1, after=False)
        with pytest.raises(StoppedError):
            headwise.heal(converted, tmp_path / "out", **keywords, teacher_top=8)
    loaded.clear()
    resumed = headwise.heal(converted, tmp_path / "out", **keywords, teacher_top=8)
    assert loaded == [converted]
    assert resumed.losses == whole.losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher_top": 8, "temperature": 2.0}, "temperature = 2.0: must be 1.0 with teacher_top"),
        ({"teacher_top": 8, "hidden": 1.0}, "hidden = 1.0: must be 0.0 with teacher_top"),
        (
            {"objective": "cross-entropy", "teacher_top": 8},
            "teacher_top = 8: must be None with objective cross-entropy",
        ),
        ({"objective": "cross-entropy", "temperature": 2.0}, "temperature = 2.0: must be 1.0 with objective cross"),
        ({"objective": "cross-entropy", "text_weight": 0.5}, "text_weight = 0.5: must be 0.0 with objective cross"),
    ],
)
def test_options_of_another_objective_are_refused(
    options: dict[str, Any], message: str, converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(HeadwiseError, match=re.escape(message)):
        headwise.heal(converted, tmp_path / "out", **keywords, **options)


def test_hidden_states_are_learnt_too(whole: Any, converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    report = headwise.heal(converted, tmp_path / "out", **keywords, hidden=1.0)
    assert report.losses[0] > whole.losses[0]  # there is a second term
    assert report.held_out[-1][1] < report.held_out[0][1]


def test_the_texts_own_tokens_are_learnt_too(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    keywords = {**keywords, "steps": 4, "recall": False, "learning_rate": 1e-4}
    plain = headwise.heal(converted, tmp_path / "plain", **keywords)
    text = headwise.heal(converted, tmp_path / "text", **keywords, objective="cross-entropy")
    both = headwise.heal(converted, tmp_path / "both", **keywords, text_weight=0.5)
    assert both.losses[0] == pytest.approx(plain.losses[0] + 0.5 * text.losses[0], rel=1e-5)
    assert both.held_out[0] == plain.held_out[0]  # the divergence alone
    assert both.objective_settings == {"text_weight": 0.5}
    assert f"- distill, text_weight 0.5, on {both.tokens} tokens" in (tmp_path / "both" / "README.md").read_text()
    assert both.losses[1] != pytest.approx(plain.losses[1] + 0.5 * text.losses[1], rel=1e-5)  # it moves the weights


def test_windows_that_repeat_passages_are_no_text(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    keywords = {**keywords, "window": 32, "recall": True, "learning_rate": 1e-12}  # the weights stay
    plain = headwise.heal(converted, tmp_path / "plain", **keywords)
    both = headwise.heal(converted, tmp_path / "both", **keywords, text_weight=0.5)
    added = [loss - other for loss, other in zip(both.losses, plain.losses, strict=True)]
    repeats = [abs(more) < 1e-4 for more in added]
    assert 0 < sum(repeats) < len(repeats)
    assert all(repeat or more > 0.5 for repeat, more in zip(repeats, added, strict=True))


def test_a_healed_stock_folder_stays_stock_and_is_exported(keywords: dict[str, Any], tmp_path: Path) -> None:
    """Transformers alone loads it, and a GGUF file of it computes the same."""
    source = save_tiny(tmp_path / "source", vocab_size=320)
    save_byte_level(source, 320)
    stock = {"to": "mla", "kv_budget": 0.5, "format": "deepseek", "bias_free": True}
    text = {"calibrate": keywords["text"], "calibration_tokens": 256, "calibration_window": 32}
    headwise.convert(source, tmp_path / "stock", **stock, **text, evaluate=False)
    headwise.heal(tmp_path / "stock", tmp_path / "healed", **{**keywords, "teacher": source, "learning_rate": 3e-4})
    config = json.loads((tmp_path / "healed" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "healed", dtype=torch.float32)
    export_gguf(tmp_path / "healed", tmp_path / "healed.gguf", outtype="f32")
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        logits, exported = (one(ids).logits for one in (model, headwise.load(tmp_path / "healed.gguf")))
        before = headwise.load(tmp_path / "stock")(ids).logits
    torch.testing.assert_close(exported, logits, rtol=1e-5, atol=1e-5)
    assert (logits - before).abs().max() > 1e-2


@pytest.mark.parametrize(("to", "cached"), [("mla", ("kv_a_proj",)), ("same", ("k_proj", "v_proj"))])
def test_a_cache_in_codes_is_healed_with_its_codes(
    to: str, cached: tuple[str, ...], coded: Callable[[str], Path], keywords: dict[str, Any], tmp_path: Path
) -> None:
    folder = coded(to)
    report = headwise.heal(folder, tmp_path / "out", **{**keywords, "steps": 60, "learning_rate": 1e-3})
    assert report.held_out[-1][1] < 0.97 * report.held_out[0][1]
    assert (folder / "kv_cache.safetensors").read_bytes() == (tmp_path / "out" / "kv_cache.safetensors").read_bytes()
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    for name, tensor in before.items():  # the codes were fitted to what computes the cached values
        assert torch.equal(tensor, after[name]) == any(f".{part}" in name for part in cached), name


def test_changes_of_low_rank_leave_what_computes_coded_values_as_it_is(
    coded: Callable[[str], Path], keywords: dict[str, Any], tmp_path: Path
) -> None:
    folder = coded("mla")
    changes = {"train": "lora", "lora_rank": 4, "steps": 20, "learning_rate": 1e-3}
    assert headwise.heal(folder, tmp_path / "out", **{**keywords, **changes}).best_step > 0
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    for name, tensor in before.items():
        is_changed = "_proj" in name and "kv_a_proj" not in name
        assert torch.equal(tensor, after[name]) != is_changed, name


def test_changes_that_the_folder_has_no_tensor_for_are_refused(keywords: dict[str, Any], tmp_path: Path) -> None:
    source, coded = save_tiny(tmp_path / "source", "phi3"), tmp_path / "coded"
    text = {"calibrate": keywords["text"], "calibration_tokens": 512}
    headwise.convert(source, coded, to="same", kv_bytes=0.25, **text, evaluate=False)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*no tensor of its own"):  # it stores qkv_proj
        headwise.heal(coded, tmp_path / "out", **{**keywords, "teacher": source, "train": "lora"})


def test_new_tensors_that_are_all_of_a_coded_cache_are_refused(
    coded: Callable[[str], Path], keywords: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(HeadwiseError, match="only what computes the values of a cache in codes"):
        headwise.heal(coded("mqa"), tmp_path / "out", **{**keywords, "train": "new"})


def test_adamw_can_move_everything(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    muon, adamw = (
        headwise.heal(converted, tmp_path / name, **{**keywords, "steps": 30, "optimizer": name})
        for name in ("muon", "adamw")
    )
    assert adamw.losses[0] == muon.losses[0]
    assert adamw.losses[1:] != muon.losses[1:]
    assert adamw.held_out[-1][1] < 0.9 * adamw.held_out[0][1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"text": "nothing.txt"}, "text"),
        ({"teacher": "nowhere"}, "teacher = 'nowhere'"),
        ({"device": "nothing"}, "device"),
        ({"evaluate": "nothing.txt"}, "evaluate"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    changes: dict[str, Any], field: str, converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(HeadwiseError) as caught:
        headwise.heal(converted, tmp_path / "out", **{**keywords, **changes})
    assert field in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_teacher_of_another_shape_has_no_states_to_match(
    converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    other = save_tiny(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(HeadwiseError, match="is 3 in the teacher and 2 in the model"):
        headwise.heal(converted, tmp_path / "out", **{**keywords, "teacher": other, "hidden": 1.0})


def test_a_teacher_of_another_vocabulary_is_refused(
    converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    other = save_tiny(tmp_path / "other", vocab_size=80)
    with pytest.raises(HeadwiseError, match="has a vocabulary of 80"):
        headwise.heal(converted, tmp_path / "out", **{**keywords, "teacher": other})


def test_a_teacher_that_numbers_tokens_otherwise_is_refused(
    converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    other = exchange_tokens(save_tiny(tmp_path / "other"))
    with pytest.raises(HeadwiseError, match="as the token 'a', which is"):
        headwise.heal(converted, tmp_path / "out", **{**keywords, "teacher": other})


def test_a_larger_teacher_of_the_same_vocabulary_is_learnt_from(
    converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    larger = save_tiny(tmp_path / "larger", hidden_size=96, num_hidden_layers=4, max_position_embeddings=4096)
    report = headwise.heal(converted, tmp_path / "out", **{**keywords, "teacher": larger, "steps": 40})
    assert report.held_out[-1][1] < 0.8 * report.held_out[0][1]


@pytest.mark.parametrize("broken", ["model", "teacher"])
def test_a_model_whose_logits_overflow_is_refused(
    broken: str, converted: Path, source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(converted if broken == "model" else source, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(1e38)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = folder if broken == "model" else converted
    with pytest.raises(CheckpointError, match="loss = 'nan': must be finite before any step; check both models"):
        headwise.heal(model, tmp_path / "out", **{**keywords, "teacher": folder if broken == "teacher" else source})
    assert not (tmp_path / "out").exists()
