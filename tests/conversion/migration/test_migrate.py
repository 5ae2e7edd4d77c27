"""Migration: it ends with the smallest size whose loss is allowed, and keeps what every size lost."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.base.documents import MIGRATION
from headwise.errors import HeadwiseError
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import save_tiny

module = importlib.import_module("headwise.conversion.migrate")

STUDY = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40
EXAM = "then it does so again. the quick brown fox jumps over the lazy dog, and " * 12
SIZES = ("mla:0.5", "mla:0.125")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "study.txt").write_text(STUDY)
    (folder / "exam.txt").write_text(EXAM)
    # A model that has learnt both texts: the perplexity of what a model does not know may fall by chance.
    random, taught = save_tiny(folder / "random"), folder / "model"
    options = {"objective": "cross-entropy", "learning_rate": 3e-3, "dtype": "float32", "recall": False}
    headwise.heal(
        random, taught, teacher=random, text=folder / "study.txt", steps=150, window=64, evaluate=False, **options
    )
    return taught


@pytest.fixture
def keywords(source: Path) -> dict[str, Any]:
    folder = source.parent
    texts = {"calibrate": folder / "study.txt", "evaluate": folder / "exam.txt"}
    return {**texts, "targets": SIZES, "calibration_tokens": 512}


@pytest.fixture(scope="module")
def every(source: Path) -> Any:
    """The report of a migration in which every size is allowed; its folder is not to be changed."""
    folder = source.parent
    texts = {"calibrate": folder / "study.txt", "evaluate": folder / "exam.txt"}
    return headwise.migrate(
        source, folder / "all", max_quality_loss=10, **texts, targets=SIZES, calibration_tokens=512
    )


def test_the_smallest_size_within_the_loss_is_chosen(
    every: Any, source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    keywords["targets"] = SIZES[::-1]  # in whatever order
    tried = every.steps
    assert every.chosen == tried[-1]
    numbers = 2 * 2 * 3 * 8  # two layers, keys and values of three heads
    assert every.cache_bytes_per_token == tried[0].cache_bytes_per_token == 2 * numbers  # as bfloat16
    assert every.chosen.cache_bytes_per_token == numbers / 4
    larger, smaller = tried[-2:]
    assert larger.loss < smaller.loss
    report = headwise.migrate(source, tmp_path / "out", max_quality_loss=(larger.loss + smaller.loss) / 2, **keywords)
    assert report.chosen is not None
    assert report.chosen.target == larger.target
    assert [step.target for step in report.steps] == ["mla:1", *SIZES]
    assert [step.is_allowed for step in report.steps] == [True, True, False]
    document = json.loads((tmp_path / "out" / MIGRATION).read_text())
    assert document["chosen"]["target"] == larger.target
    again = headwise.evaluate(tmp_path / "out", against=source, text=keywords["evaluate"], windows=2)
    assert again.perplexity_ratio == pytest.approx(1 + report.chosen.loss, rel=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_where_no_size_is_allowed_what_was_made_is_kept(
    source: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords["targets"] = ["mqa"]
    report = headwise.migrate(source, tmp_path / "out", max_quality_loss=1e-9, **keywords)
    assert report.chosen is None
    assert len(report.steps) == 2  # the exact one, and the one that lost too much
    assert [str(path) for path in tmp_path.iterdir()] == [report.kept]
    monkeypatch.delattr(module, "convert")  # nothing is made again
    larger = headwise.migrate(source, tmp_path / "out", max_quality_loss=10, **keywords)
    assert larger.chosen is not None
    assert larger.kept is None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_size_that_is_not_allowed_ends_its_kind_alone(
    source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    keywords["targets"] = ["mqa", "mla:0.25", "mla:0.125", "same@0.5"]
    report = headwise.migrate(source, tmp_path / "out", max_quality_loss=0.1, **keywords)
    assert report.chosen is not None
    assert report.chosen.target == "same@0.5"
    assert [step.target for step in report.steps] == ["mla:1", "same@0.5", "mqa", "mla:0.25"]


def test_a_conversion_that_should_be_exact_and_is_not(
    source: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXACT", -1.0)
    with pytest.raises(HeadwiseError, match="measures something else"):
        headwise.migrate(source, tmp_path / "out", max_quality_loss=10, **keywords)
    assert not any(tmp_path.iterdir())


def test_a_size_that_loses_too_much_is_trained(
    source: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords = {**keywords, "targets": ["mqa"], "max_quality_loss": 1e-9}
    plain = headwise.migrate(source, tmp_path / "out", **keywords)
    monkeypatch.setattr(module, "convert", None)  # nothing is converted again
    report = headwise.migrate(source, tmp_path / "out", **keywords, heal_tokens=2048)
    assert [step.healed for step in report.steps] == [False, False, True]
    assert report.steps[1] == plain.steps[1]
    assert report.steps[2].kl != report.steps[1].kl


def test_a_size_that_is_allowed_once_it_is_trained_is_chosen(
    source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    keywords = {**keywords, "targets": ["mqa"], "heal_tokens": 4096}
    tried = headwise.migrate(source, tmp_path / "none", max_quality_loss=1e-9, **keywords).steps
    converted, healed = tried[1:]
    assert healed.loss < converted.loss
    allowed = (healed.loss + converted.loss) / 2
    report = headwise.migrate(source, tmp_path / "out", max_quality_loss=allowed, **keywords)
    assert report.chosen == healed.__class__(**{**asdict(healed), "is_allowed": True})
    assert (tmp_path / "out" / "healing.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".none.headwise-migration"}


def test_a_smaller_loss_is_asked_for_after_a_run_was_ended(
    every: Any, source: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the size that is now the answer was removed for a smaller one."""
    *_, larger, smaller = every.steps
    with monkeypatch.context() as patch:
        stop_at(patch, module, "convert", 3, after=True)
        with pytest.raises(StoppedError):
            headwise.migrate(source, tmp_path / "out", max_quality_loss=10, **keywords)
    allowed = (larger.loss + smaller.loss) / 2
    report = headwise.migrate(source, tmp_path / "out", max_quality_loss=allowed, **keywords)
    assert report.chosen is not None
    assert report.chosen.target == larger.target
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_was_put_at_the_output_meanwhile_stays(
    source: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.convert

    def meanwhile(*args: Any, **options: Any) -> Any:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "notes.txt").write_text("mine")
        return original(*args, **options)

    monkeypatch.setattr(module, "convert", meanwhile)
    with pytest.raises(HeadwiseError, match="is not empty"):
        headwise.migrate(source, tmp_path / "out", max_quality_loss=10, **{**keywords, "targets": ["mqa"]})
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("call", [1, 2])
def test_a_killed_run_goes_on(
    call: int, every: Any, source: Path, keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, module, "convert", call, after=True)
        with pytest.raises(StoppedError):
            headwise.migrate(source, tmp_path / "out", max_quality_loss=10, **keywords)
    made = []
    original = module.convert
    monkeypatch.setattr(module, "convert", lambda *args, **kwargs: (made.append(args), original(*args, **kwargs))[1])
    resumed = headwise.migrate(source, tmp_path / "out", max_quality_loss=10, **keywords)
    assert resumed.steps == every.steps
    assert len(made) == 3 - call + 1
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        Path(every.output) / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_quality_loss": 0.0}, "max_quality_loss"),
        ({"max_quality_loss": 25.0}, "max_quality_loss"),
        ({"targets": ["int8"]}, "target"),
        ({"targets": ["mla:2"]}, "target"),
        ({"targets": ["mla:0.5", "gqa:7"]}, "num_kv_heads"),
        ({"evaluate": "nothing.txt"}, "evaluate"),
        ({"evaluate": "study.txt"}, "evaluate"),
        ({"heal_tokens": 1}, "heal_tokens"),
        ({"calibration_window": 5000}, "calibration_window"),
        ({"calibrate": "short.txt", "heal_tokens": 512}, "calibrate"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    changes: dict[str, Any], field: str, source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    if changes.get("evaluate") == "study.txt":
        changes = {"evaluate": keywords["calibrate"]}
    if changes.get("calibrate") == "short.txt":  # long enough to be calibrated on
        changes = changes | {"calibrate": source.parent / "short.txt"}
        changes["calibrate"].write_text(STUDY[:200])
    with pytest.raises(HeadwiseError) as caught:
        headwise.migrate(source, tmp_path / "out", **{"max_quality_loss": 0.1, **keywords, **changes})
    assert field in str(caught.value)
    assert not any(tmp_path.iterdir())
