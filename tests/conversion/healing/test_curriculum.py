"""A rank curriculum: channels in order of importance, faded out in training and cut off in the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import headwise
from headwise.conversion.calibration.windows import CalibrationWindows, plain_windows
from headwise.conversion.healing.curriculum import FadingChannels, RankCurriculum, order_channels
from headwise.conversion.healing.state import TrainingState
from headwise.errors import ArgumentError, CheckpointError
from headwise.models.checkpoints import open_checkpoint
from headwise.runtime.attention.latent import MultiHeadLatentAttention
from tests.closeness import assert_close
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import save_tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 60
WINDOWS = plain_windows(torch.randint(2, 30, (6, 40), generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion to MLA; of qwen2 with biases."""
    folder = tmp_path_factory.mktemp("curriculum")
    save_tiny(folder / "source", request.param)
    (folder / "text.txt").write_text(TEXT)
    headwise.convert(folder / "source", folder / "half", to="mla", kv_budget=0.5, evaluate=False)
    return folder / "half"


@pytest.fixture
def keywords(converted: Path) -> dict[str, Any]:
    options = {"steps": 12, "window": 16, "measurements": 6, "learning_rate": 3e-3, "dtype": "float32"}
    texts = {"teacher": converted.parent / "source", "text": converted.parent / "text.txt", "evaluate": False}
    return {**options, **texts, "rank_curriculum": 0.5}


def loaded(folder: Path) -> Any:
    return headwise.load(folder, dtype="float64").requires_grad_(False)


def logits_of(model: Any) -> Any:
    def logits(windows: CalibrationWindows) -> Tensor:
        out: Tensor = model(windows.ids, position_ids=windows.positions, use_cache=False).logits
        return out

    return logits


def divergence(model: Any, expected: Tensor) -> float:
    """The mean KL from a model's expected log-probabilities."""
    found = logits_of(model)(WINDOWS).log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def layers(model: Any) -> Iterator[MultiHeadLatentAttention]:
    return (module for module in model.modules() if isinstance(module, MultiHeadLatentAttention))


def test_a_model_whose_channels_are_ordered_computes_the_same(converted: Path, tmp_path: Path) -> None:
    model = loaded(converted)
    expected = logits_of(model)(WINDOWS)
    before = [layer.kv_b_proj.weight.clone() for layer in layers(model)]
    order_channels(model, WINDOWS, tmp_path, logits_of(model))
    assert_close(logits_of(model)(WINDOWS), expected, 1e-9)
    assert not any(torch.equal(old, layer.kv_b_proj.weight) for old, layer in zip(before, layers(model), strict=True))


def test_bases_are_found_once(converted: Path, tmp_path: Path) -> None:
    """Another process, or a later run, turns its latents alike, whatever it would find."""
    one, other = loaded(converted), loaded(converted)
    order_channels(one, WINDOWS, tmp_path, logits_of(one))
    order_channels(other, WINDOWS[:1], tmp_path, logits_of(other))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_last_channels_cost_least(converted: Path, tmp_path: Path) -> None:
    """Less than the first ones, and than as many of the channels that the conversion has."""
    model, curriculum = loaded(converted), RankCurriculum(open_checkpoint(converted), 0.6)
    expected = logits_of(model)(WINDOWS).log_softmax(-1)
    conversions = FadingChannels(model, curriculum)
    conversions.set(1.0)
    unordered = divergence(model, expected)
    conversions.set(0.0)
    assert divergence(model, expected) < 1e-12
    order_channels(model, WINDOWS, tmp_path, logits_of(model))
    conversions.set(1.0)
    ordered = divergence(model, expected)
    assert 1e-9 < ordered < 0.7 * unordered
    conversions.set(0.1)
    assert 0 < divergence(model, expected) < ordered


def test_channels_fade_one_after_another(converted: Path) -> None:
    model = loaded(converted)
    fading = FadingChannels(model, RankCurriculum(open_checkpoint(converted), 0.5))
    (path, layer), *_ = [(n, m) for n, m in model.named_modules() if isinstance(m, MultiHeadLatentAttention)]
    rank, rotary = layer.spec.kv_lora_rank, layer.spec.qk_rope_head_dim
    gone = rank - round(0.5 * rank)
    for done, expected in ((0.0, 0.0), (0.25, gone / 2), (0.5, gone), (0.9, gone)):
        fading.set(done)
        factors = fading.factors[path]
        assert float((1 - factors).sum()) == pytest.approx(expected)
        assert (factors[-rotary:] == 1).all()
        assert (factors[:rank].diff() <= 0).all()
        assert int(((factors > 0) & (factors < 1)).sum()) <= 1


@pytest.mark.parametrize(
    "how",
    [
        {"train": "all", "checkpointing": True},
        {"train": "attention", "teacher_top": 8},
        {"train": "new", "objective": "cross-entropy"},
        {"train": "lora"},  # which trains no bias
    ],
    ids=lambda how: how["train"],
)
def test_the_result_has_the_smaller_cache(
    how: dict[str, Any], converted: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    report = headwise.heal(converted, tmp_path / "out", **keywords, **how)
    before, after = open_checkpoint(converted), open_checkpoint(tmp_path / "out")
    for old, new in zip(before.spec.layers, after.spec.layers, strict=True):
        assert new.kv_lora_rank == round(0.5 * old.kv_lora_rank)  # type: ignore[attr-defined]
        assert new.qk_rope_head_dim == old.qk_rope_head_dim  # type: ignore[attr-defined]
    assert 6 <= report.best_step <= 12
    # What was measured with channels that were gone is what the folder computes without them.
    model = headwise.load(tmp_path / "out", dtype="float32")
    again = headwise.heal(tmp_path / "out", tmp_path / "again", **{**keywords, **how, "rank_curriculum": None})
    assert again.held_out[0][1] == pytest.approx(report.kept_loss, rel=1e-4)
    assert report.kept_loss == min(loss for step, loss in report.held_out if step >= 6)
    assert model(WINDOWS.ids).logits.isfinite().all()
    assert json.loads((tmp_path / "out" / "healing.json").read_text())["rank_curriculum"] == 0.5
    assert "latents fell to 0.5 of their channels" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("train", ["all", "lora"])
def test_a_killed_run_goes_on_and_computes_the_same(
    train: str, converted: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords["train"] = train
    whole = headwise.heal(converted, tmp_path / "whole", **keywords)
    with monkeypatch.context() as patch:
        stop_at(patch, TrainingState, "save", 4, after=True)
        with pytest.raises(StoppedError):
            headwise.heal(converted, tmp_path / "out", **keywords)
    report = headwise.heal(converted, tmp_path / "out", **keywords)
    assert (report.losses, report.held_out, report.best_step) == (whole.losses, whole.held_out, whole.best_step)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_bases_that_are_damaged_are_not_made_anew(
    converted: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU others would be found, which do not fit what was saved."""
    stop_at(monkeypatch, TrainingState, "save", 2, after=True)
    with pytest.raises(StoppedError):
        headwise.heal(converted, tmp_path / "out", **keywords)
    file, *_ = sorted(tmp_path.glob(".*/work/channels/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    with pytest.raises(CheckpointError, match=r"channels = .*: an earlier run's result is lost"):
        headwise.heal(converted, tmp_path / "out", **keywords)
    monkeypatch.undo()
    assert headwise.heal(converted, tmp_path / "out", **keywords).steps == 12


def test_the_ordering_is_shown(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    headwise.heal(converted, tmp_path / "out", **keywords, progress=lambda *stage: stages.append(stage))
    assert [done for stage, done, _ in stages if stage == "ordering channels"] == list(range(9))


def test_a_part_that_leaves_out_nothing_is_refused(converted: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"rank_curriculum = 0\.99: leaves out no channel of any latent"):
        headwise.heal(converted, tmp_path / "out", **{**keywords, "rank_curriculum": 0.99})


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"to": "mqa"}, "needs MLA in headwise's own format"),
        ({"to": "mla", "kv_budget": 0.5, "format": "deepseek"}, "needs MLA in headwise's own format"),
        ({"to": "mla", "kv_bytes": 0.2}, "needs a cache without codes"),
    ],
)
def test_folders_without_such_channels_are_refused(
    how: dict[str, Any], rule: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    source, text = keywords["teacher"], keywords["text"]
    if "kv_bytes" in how:
        how = {**how, "calibrate": text, "calibration_tokens": 256, "calibration_window": 32}
    headwise.convert(source, tmp_path / "other", **how, evaluate=False)
    with pytest.raises(ArgumentError, match=f"rank_curriculum = 0.5: {rule}"):
        headwise.heal(tmp_path / "other", tmp_path / "out", **keywords)
    assert not (tmp_path / "out").exists()
