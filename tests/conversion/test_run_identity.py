"""A killed run is continued by the same command, and by no run with another value of an option that matters."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headwise
from headwise.base.options import (
    CalibrateOptions,
    ConvertOptions,
    FrontierOptions,
    HealOptions,
    MigrateOptions,
    Options,
    SampleOptions,
    declarations,
)
from headwise.conversion.frontiers import run as results
from headwise.models.checkpoints import run_identity
from tests.real_models import save_tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40
MLA = {"to": "mla", "kv_budget": 0.5}
SIZED = {"to": "mla", "kv_lora_rank": 8, "qk_rope_head_dim": 4}
STUDY = {"calibrate": "study.txt", "calibration_tokens": 512}

CONVERT: dict[str, tuple[dict[str, Any], Any]] = {
    "to": ({"to": "mqa"}, "gqa:1"),
    "kv_budget": (MLA, 0.6),
    "kv_lora_rank": (SIZED, 9),
    "qk_rope_head_dim": (SIZED, 6),
    "kv_bytes": ({**STUDY, "to": "mla", "kv_bytes": 0.3}, 0.2),
    "bits": ({**SIZED, **STUDY, "bits": 4}, 3),
    "calibrate": ({**MLA, **STUDY}, "other.txt"),
    "calibration_tokens": ({**MLA, **STUDY}, 500),
    "calibration_window": ({**MLA, **STUDY}, 64),
    "statistics": ({**MLA, "statistics": "statistics"}, "statistics-2"),
    "method": ({**MLA, **STUDY}, "transmla"),
    "without": ({**MLA, **STUDY, "without": ["refit", "recall"]}, ["refit"]),
    "spread": ({**MLA, **STUDY}, True),
    "dtype": (MLA, "bfloat16"),
    "format": (MLA, "deepseek"),
    "bias_free": ({**MLA, **STUDY, "format": "deepseek"}, True),
    "pad_to": ({**MLA, "format": "deepseek"}, "64+64"),
    "evaluate": ({**MLA, **STUDY, "evaluate": False}, "exam.txt"),
    "evaluation_windows": ({**MLA, **STUDY}, 3),
    "device": (MLA, "cpu"),
    "overwrite": (MLA, True),
    "served_context": (MLA, 8),
    "served_by": (MLA, "vllm"),
}
"""For each option the rest of a command, and another value than the option has there."""

CALIBRATE: dict[str, tuple[dict[str, Any], Any]] = {
    "calibrate": (STUDY, "other.txt"),
    "calibration_tokens": (STUDY, 500),
    "calibration_window": (STUDY, 64),
    "device": (STUDY, "cpu"),
    "overwrite": (STUDY, True),
}

ONE = {**STUDY, "evaluate": "exam.txt", "targets": ["mla:0.5"], "window": 48, "windows": 2, "plot": False}
FRONTIER: dict[str, tuple[dict[str, Any], Any]] = {
    "calibrate": (ONE, "other.txt"),
    "calibration_tokens": (ONE, 500),
    "calibration_window": (ONE, 64),
    "evaluate": (ONE, "third.txt"),
    "window": (ONE, 47),
    "windows": (ONE, 3),
    "continuations": (ONE, 1),
    "dtype": (ONE, "bfloat16"),
    "targets": (ONE, ["mla:0.5", "mqa"]),
    "methods": (ONE, True),
    "keep": (ONE, True),
    "device": (ONE, "cpu"),
}

HEALED = {"teacher": "source", "text": "study.txt", "steps": 3, "window": 32, "evaluate": False}
HEAL: dict[str, tuple[dict[str, Any], Any]] = {
    "teacher": (HEALED, "other"),
    "text": (HEALED, "other.txt"),
    "train": (HEALED, "attention"),
    "cache": ({**HEALED, "cache": "vllm:fp8"}, "vllm:int8_per_token_head"),
    "lora_rank": ({**HEALED, "train": "lora"}, 2),
    "dtype": ({**HEALED, "dtype": "float32"}, "bfloat16"),
    "device": (HEALED, "cpu"),
    "checkpointing": (HEALED, True),
    "seed": (HEALED, 1),
    "evaluate": (HEALED, "exam.txt"),
    "evaluation_windows": (HEALED, 3),
    "overwrite": (HEALED, True),
    "objective": (HEALED, "cross-entropy"),
    "temperature": (HEALED, 2.0),
    "hidden": (HEALED, 0.5),
    "text_weight": (HEALED, 0.5),
    "teacher_top": (HEALED, 8),
    "recall": (HEALED, False),
    "tokens": ({**HEALED, "steps": None, "tokens": 96}, 128),
    "steps": (HEALED, 4),
    "alpha": ({**HEALED, "steps": None, "alpha": 0.1, "pretraining_tokens": 1000}, 0.2),
    "pretraining_tokens": ({**HEALED, "steps": None, "alpha": 0.1, "pretraining_tokens": 1000}, 2000),
    "window": (HEALED, 48),
    "batch": (HEALED, 2),
    "micro_batch": (HEALED, 2),
    "optimizer": (HEALED, "adamw"),
    "learning_rate": (HEALED, 1e-3),
    "warmup": (HEALED, 0.5),
    "patience": (HEALED, 1),
    "measurements": (HEALED, 2),
}

MIGRATED = {**STUDY, "max_quality_loss": 0.1, "evaluate": "exam.txt", "targets": ["mla:0.5"]}
MIGRATE: dict[str, tuple[dict[str, Any], Any]] = {
    "calibrate": (MIGRATED, "other.txt"),
    "calibration_tokens": (MIGRATED, 500),
    "calibration_window": (MIGRATED, 64),
    "device": (MIGRATED, "cpu"),
    "max_quality_loss": (MIGRATED, 0.2),
    "targets": (MIGRATED, ["mqa"]),
    "evaluate": (MIGRATED, "third.txt"),
    "evaluation_windows": (MIGRATED, 3),
    "heal_tokens": (MIGRATED, 64),
    "overwrite": (MIGRATED, True),
}

SAMPLED = {"tokens": 40, "length": 40}
SAMPLE: dict[str, tuple[dict[str, Any], Any]] = {
    "tokens": (SAMPLED, 50),
    "length": (SAMPLED, 39),
    "temperature": (SAMPLED, 0.5),
    "top_p": (SAMPLED, 0.5),
    "batch": (SAMPLED, 2),
    "seed": (SAMPLED, 1),
    "dtype": (SAMPLED, "float64"),
    "device": (SAMPLED, "cpu"),
    "overwrite": (SAMPLED, True),
}

FUNCTIONS: dict[str, tuple[Callable[..., Any], ModuleType, type[Options]]] = {
    "convert": (headwise.convert, sys.modules["headwise.conversion.convert"], ConvertOptions),
    "calibrate": (headwise.calibrate, sys.modules["headwise.conversion.calibrate"], CalibrateOptions),
    "frontier": (headwise.frontier, results, FrontierOptions),
    "heal": (headwise.heal, sys.modules["headwise.conversion.healing.heal"], HealOptions),
    "sample": (headwise.sample, sys.modules["headwise.measure.texts.sample"], SampleOptions),
    "migrate": (headwise.migrate, sys.modules["headwise.conversion.migrate"], MigrateOptions),
}
"""Each function that continues a killed run, the module that makes its identity, and its options."""

CASES = [
    ("convert", CONVERT),
    ("calibrate", CALIBRATE),
    ("frontier", FRONTIER),
    ("heal", HEAL),
    ("migrate", MIGRATE),
    ("sample", SAMPLE),
]


class IdentityError(Exception):
    """Ends a run as soon as it has an identity."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, a conversion, texts and two sets of statistics; not to be changed."""
    folder = tmp_path_factory.mktemp("identity")
    save_tiny(folder / "source")
    save_tiny(folder / "other", seed=1)
    headwise.convert(folder / "source", folder / "half", to="mla", kv_budget=0.5, evaluate=False)
    for name, text in (("study", TEXT), ("other", TEXT[1:]), ("exam", TEXT[::-1]), ("third", TEXT[:1:-1])):
        (folder / f"{name}.txt").write_text(text)
    for name, tokens in (("statistics", 512), ("statistics-2", 400)):
        headwise.calibrate(
            folder / "source", folder / name, calibrate=folder / "study.txt", calibration_tokens=tokens
        )
    return folder


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    """The identities of commands whose options have been changed, which many options share."""
    return {}


def identity_of(monkeypatch: pytest.MonkeyPatch, place: Path, name: str, options: dict[str, Any]) -> str:
    """The identity of a run with these options; files are named relative to a folder."""
    function, module, _ = FUNCTIONS[name]

    def ending(*args: Any, **decides: Any) -> str:
        raise IdentityError(run_identity(*args, **decides))

    monkeypatch.setattr(module, "run_identity", ending)
    monkeypatch.chdir(place)
    is_converted = name == "heal" and "cache" not in options  # no engine has a cache of MLA in headwise's format
    with pytest.raises(IdentityError) as caught:
        function("half" if is_converted else "source", place / "out", **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "option"), [(name, option) for name, flips in CASES for option in flips], ids=str
)
def test_runs_differ_by_the_options_that_decide_the_result(
    function: str, option: str, place: Path, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, value = dict(CASES)[function][option]
    one = known.get(f"{function} {command}") or identity_of(monkeypatch, place, function, command)
    known[f"{function} {command}"] = one
    other = identity_of(monkeypatch, place, function, {**command, option: value})
    assert (one != other) is decides(function, option)


@pytest.mark.parametrize(("function", "flips"), CASES)
def test_the_same_command_is_the_same_run(
    function: str, flips: dict[str, Any], place: Path, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in {str(command): command for command, _ in flips.values()}.values():
        one = known.get(f"{function} {command}") or identity_of(monkeypatch, place, function, command)
        assert identity_of(monkeypatch, place, function, command) == one


def decides(function: str, option: str) -> bool:
    """Whether an option decides the result, as it is declared."""
    return declarations(FUNCTIONS[function][2])[option].identity


@pytest.mark.parametrize(("function", "flips"), CASES)
def test_every_option_is_tried(function: str, flips: dict[str, Any]) -> None:
    """A dry run and a page without a plot write nothing, or nothing that is continued."""
    assert {*flips} == {*declarations(FUNCTIONS[function][2])} - {"dry_run", "plot"}


def test_what_does_not_decide_a_result() -> None:
    never = {
        name: {one for one in declarations(kind) if not decides(name, one)}
        for name, (_, _, kind) in FUNCTIONS.items()
    }
    assert never == {
        "convert": {
            *("evaluate", "evaluation_windows", "overwrite", "dry_run", "device", "served_context", "served_by")
        },
        "calibrate": {"overwrite", "device"},
        "frontier": {"targets", "methods", "keep", "plot", "device"},
        "heal": {"evaluate", "evaluation_windows", "overwrite", "device", "micro_batch"},
        "migrate": {"max_quality_loss", "targets", "overwrite", "device"},
        "sample": {"overwrite", "device"},
    }


def test_the_name_of_a_text_decides_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copy(place / "study.txt", tmp_path / "copy.txt")
    commands = {"convert": {**MLA, **STUDY}, "calibrate": STUDY, "frontier": ONE, "heal": HEALED, "migrate": MIGRATED}
    for name, command in commands.items():
        field = "text" if name == "heal" else "calibrate"
        one, other = (identity_of(monkeypatch, place, name, {**command, field: text}) for text in ("study.txt", copy))
        assert one == other, name


def test_an_option_that_is_new_is_in_the_identity(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Identities begin with what the options declare, so that no list has to be kept beside them."""
    commands = {"convert": MLA, "calibrate": STUDY, "frontier": ONE, "heal": HEALED, "migrate": MIGRATED}
    for name, command in commands.items():
        before = identity_of(monkeypatch, place, name, command)
        with monkeypatch.context() as patch:
            kind, own = FUNCTIONS[name][2], FUNCTIONS[name][2].identity
            patch.setattr(kind, "identity", lambda self, own=own: {**own(self), "new": 1})
            assert identity_of(patch, place, name, command) != before, name
