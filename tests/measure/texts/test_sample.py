"""Text that a model writes: how much, how it begins and ends, and what a killed run or bad input does to it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.base.jobs import lock_folder
from headwise.errors import ArgumentError, CheckpointError, StorageError
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import save_tiny

MODULE: Any = sys.modules["headwise.measure.texts.sample"]
HOW: dict[str, Any] = {"tokens": 400, "length": 48, "batch": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("sampled") / "model")


def test_so_many_tokens_are_written(model: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    report = headwise.sample(model, tmp_path / "own.txt", **HOW, progress=lambda *stage: stages.append(stage))
    assert report.tokens >= 400
    documents = (tmp_path / "own.txt").read_text(encoding="utf-8").split("\n\n")
    assert 4 <= report.documents <= len(documents)  # one may have empty lines within
    assert stages[0] == ("writing", 0, 400)
    assert stages[-1] == ("writing", 400, 400)
    assert {path.name for path in tmp_path.iterdir()} == {"own.txt", "own.txt.sha256"}


def test_a_seed_decides_the_text(model: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        headwise.sample(model, tmp_path / name, **HOW, seed=seed)
    one, same, other = ((tmp_path / name).read_bytes() for name in ("one", "same", "other"))
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), state)  # the user's own draws stay as they are


def test_the_likeliest_tokens_alone_are_drawn(model: Path, tmp_path: Path) -> None:
    """With nearly no probability to draw from, every document is the greedy one."""
    headwise.sample(model, tmp_path / "own.txt", **HOW, top_p=1e-6)
    text = (tmp_path / "own.txt").read_text().strip()
    assert text == "\n\n".join([text.split("\n\n")[0]] * (text.count("\n\n") + 1))


def test_a_document_ends_where_the_model_ends_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "SHORTEST", 1)
    monkeypatch.setattr(MODULE, "stop_tokens", lambda model: [*range(0, 90, 2)])
    report = headwise.sample(model, tmp_path / "own.txt", **{**HOW, "tokens": 40})
    assert report.tokens / report.documents < 20  # of 48: every second token ends one


@pytest.mark.parametrize("damage", [b"", b"{", b"[]"], ids=["none", "cut off", "of another kind"])
def test_a_killed_run_goes_on_and_writes_the_same(
    damage: bytes, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = headwise.sample(model, tmp_path / "whole.txt", **HOW)
    with monkeypatch.context() as patch:
        stop_at(patch, MODULE, "remembered", 2, after=True)
        with pytest.raises(StoppedError):
            headwise.sample(model, tmp_path / "own.txt", **HOW)
    _, second = sorted(tmp_path.glob(".own.txt.headwise-partial/batch-*"))
    assert not (tmp_path / "own.txt").exists()
    if damage:
        second.write_bytes(damage)
    counts: list[int] = []
    report = headwise.sample(model, tmp_path / "own.txt", **HOW, progress=lambda _, done, total: counts.append(done))
    assert counts[0] > 0
    assert (tmp_path / "own.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()
    assert (report.documents, report.tokens) == (whole.documents, whole.tokens)
    assert not [*tmp_path.glob(".own.txt*")]


def test_a_full_disk_loses_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headwise.sample(model, tmp_path / "whole.txt", **HOW)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(MODULE, "write_among_others", full)
        with pytest.raises(StorageError, match=r"output = .*own\.txt"):
            headwise.sample(model, tmp_path / "own.txt", **HOW)
    counts: list[int] = []
    headwise.sample(model, tmp_path / "own.txt", **HOW, progress=lambda _, done, total: counts.append(done))
    assert counts == [HOW["tokens"]]  # nothing was left to write but the file
    assert (tmp_path / "own.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()


def test_two_processes_do_not_write_one_file(model: Path, tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / ".own.txt.headwise-partial")
    with pytest.raises(ArgumentError, match="is being written by process"):
        headwise.sample(model, tmp_path / "own.txt", **HOW)
    lock.release()


def test_logits_that_overflow_are_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    tensors["model.norm.weight"].fill_(6e4)
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="computes NaN or infinite logits in float16"):
        headwise.sample(tmp_path / "broken", tmp_path / "own.txt", **HOW, dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_a_killed_run_of_another_kind_is_not_continued(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headwise.sample(model, tmp_path / "whole.txt", **HOW)
    with monkeypatch.context() as patch:
        stop_at(patch, MODULE, "remembered", 2, after=True)
        with pytest.raises(StoppedError):
            headwise.sample(model, tmp_path / "own.txt", **HOW, seed=1)
    headwise.sample(model, tmp_path / "own.txt", **HOW)
    assert (tmp_path / "own.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()


def test_a_file_is_replaced_where_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    (tmp_path / "target.txt").write_text("mine")
    file.symlink_to("target.txt")
    with pytest.raises(ArgumentError, match=r"output = .*own\.txt.*: exists; say --overwrite to replace it"):
        headwise.sample(model, file, **HOW)
    assert file.read_text() == "mine"
    headwise.sample(model, file, **HOW, overwrite=True)
    assert file.is_symlink()
    assert (tmp_path / "target.txt").read_text() != "mine"


def test_outputs_that_are_no_file_of_the_users_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for output, message in (
        (tmp_path / "folder", "must be a file, or not exist"),
        (Path("."), "must be the path of a file"),
        (tmp_path / "none" / "own.txt", "cannot be written: No such file"),
        (model / "own.txt", "must not be in the model"),
        (model / "model.safetensors", "must not be in the model"),
    ):
        with pytest.raises(ArgumentError, match=message):
            headwise.sample(model, output, **HOW, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_model_that_ends_every_text_at_once_is_given_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "stop_tokens", lambda model: [*range(97)])
    with pytest.raises(CheckpointError, match="ends nearly every text within 32 tokens"):
        headwise.sample(model, tmp_path / "own.txt", **HOW)
    assert not (tmp_path / "own.txt").exists()


def test_documents_end_where_the_models_positions_do(model: Path, tmp_path: Path) -> None:
    """This model has fewer positions than a document has tokens by default."""
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert positions < 512
    for name, length in (("default", {}), ("named", {"length": positions - 1})):
        headwise.sample(model, tmp_path / name, tokens=40, batch=1, **length)
    assert (tmp_path / "default").read_bytes() == (tmp_path / "named").read_bytes()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": 0}, "tokens = 0: must be at least 1"),
        ({"length": 31}, "length = 31: must be at least 32"),
        ({"length": 10_000}, r"length = 10000: must be below \d+, the model's positions"),
        ({"top_p": 0.0}, r"top_p = 0\.0: must be above 0 and at most 1"),
        ({"temperature": 0.0}, r"temperature = 0\.0: must be from 0\.01 to 100"),
        ({"dtype": "int3"}, "dtype"),
    ],
)
def test_bad_input_is_refused(wrong: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        headwise.sample(model, tmp_path / "own.txt", **{**HOW, **wrong})
    assert not [*tmp_path.iterdir()]


def test_the_text_is_one_to_train_on(model: Path, tmp_path: Path) -> None:
    headwise.sample(model, tmp_path / "own.txt", **{**HOW, "tokens": 600})
    headwise.convert(model, tmp_path / "half", to="mla", kv_budget=0.5, evaluate=False)
    text = {"teacher": model, "text": tmp_path / "own.txt", "steps": 2, "window": 16, "evaluate": False}
    headwise.heal(tmp_path / "half", tmp_path / "healed", **text)
    assert json.loads((tmp_path / "healed" / "healing.json").read_text())["texts"] == [str(tmp_path / "own.txt")]
