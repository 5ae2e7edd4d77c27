"""A conversion on a text that ends early continues where it stopped, and writes the bytes of an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.conversion import write_folder as layers
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.plan import Place
from headwise.conversion.storage import Activations, LayerFiles
from headwise.measure.texts import sources
from headwise.models.checkpoints import Checkpoint, FolderWriter
from tests.real_models import save_tiny
from tests.tiny_families import save_family

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40
FILES = ("model.safetensors", "config.json")
OPTIONS: dict[str, dict[str, Any]] = {"mla": {"to": "mla", "kv_budget": 0.5, "spread": True}, "mqa": {"to": "mqa"}}
Uninterrupted = Callable[[str], tuple[Path, Path, dict[str, Any]]]


class StoppedError(Exception):
    """Ends a run early; a kill leaves no more behind than an error does."""


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool) -> None:
    """End the run at the n-th call of a method, before the call or after it."""
    count = 0
    original: Callable[..., Any] = getattr(owner, name)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            raise StoppedError
        result = original(*args, **kwargs)
        if count == call:
            raise StoppedError
        return result

    monkeypatch.setattr(owner, name, stopping)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """A source, its conversion without an interruption, and all options of that; made once for each."""

    @cache
    def convert(to: str) -> tuple[Path, Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(to)
        text = folder / "text.txt"
        text.write_text(TEXT)
        options = {**OPTIONS[to], "calibrate": text, "calibration_tokens": 512}
        source = save_tiny(folder / "source")
        headwise.convert(source, folder / "whole", **options, evaluate=False)
        return source, folder / "whole", options

    return convert


@pytest.mark.parametrize(
    ("to", "owner", "name", "call", "after"),
    [  # in the order in which a run comes to them; before a call is where it was after the one before it
        ("mla", LayerFiles, "save", 1, False),
        ("mla", LayerFiles, "save", 1, True),  # a sensitivity
        ("mla", Activations, "commit", 1, True),  # the embeddings
        ("mla", LayerFiles, "save", 3, True),  # a layer's solutions while the cache is spread
        ("mla", LayerFiles, "save", 4, True),  # what was tried of it
        ("mla", LayerFiles, "save", 7, True),  # an allocation
        ("mla", LayerFiles, "save", 11, False),  # the spread as a whole
        ("mla", LayerFiles, "save", 11, True),  # the first layer
        ("mla", Activations, "commit", 2, True),  # its outputs
        ("mla", Activations, "commit", 3, True),  # all
        ("mqa", LayerFiles, "save", 3, True),
        ("mqa", Activations, "commit", 2, True),
        ("mqa", Activations, "commit", 3, True),
    ],
)
def test_it_goes_on(
    to: str,
    owner: type[Any],
    name: str,
    call: int,
    after: bool,
    uninterrupted: Uninterrupted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, whole, options = uninterrupted(to)
    measured = {"evaluate": (name, call) == ("commit", 2)}  # what resumes may be measured, which changes no file
    with monkeypatch.context() as patch:
        stop_at(patch, owner, name, call, after=after)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **options, **measured)
    assert not (tmp_path / "out").exists()
    headwise.convert(source, tmp_path / "out", **options, **measured)
    for file in FILES:
        assert (tmp_path / "out" / file).read_bytes() == (whole / file).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in source.parent.iterdir()) == ["source", "text.txt", whole.name]


def test_layers_that_are_done_are_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "source", num_hidden_layers=3)
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"to": "mla", "kv_budget": 0.5, "calibrate": tmp_path / "text.txt", "calibration_tokens": 512}
    options["spread"] = True
    with monkeypatch.context() as patch:
        stop_at(patch, Activations, "commit", 3, after=True)  # the embeddings', and two layers'
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **options)
    solved: list[int] = []
    original = TextCalibrator.collect

    def noting(self: TextCalibrator, place: Place, source: Any) -> Any:
        solved.append(place.index)
        return original(self, place, source)

    monkeypatch.setattr(TextCalibrator, "collect", noting)
    # `None` fails if sensitivities are measured again.
    monkeypatch.setattr("headwise.conversion.calibration.source._measure", None)
    steps: list[tuple[str, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        steps.append((stage, done))

    headwise.convert(source, tmp_path / "out", **options, evaluate=False, progress=progress)
    assert solved == [2]
    assert steps == [("converting", 2), ("converting", 3)]  # the layers that are loaded say nothing about the pace


@pytest.mark.parametrize(
    ("model", "options", "shard_bytes"),
    [
        ("llama", {"to": "mla", "kv_budget": 0.5}, None),  # all in one file, of which a kill leaves nothing
        ("llama", {"to": "mla", "kv_budget": 0.5}, 4000),
        ("llama", {"to": "mqa"}, None),
        ("llama", {"to": "mqa", "method": "mean"}, 4000),
        ("llama", {"to": "mha"}, 4000),
        ("whisper", {"to": "mla", "kv_budget": 0.5}, None),
        ("whisper", {"to": "gqa:2"}, None),
    ],
    ids=str,
)
def test_without_a_text_finished_layers_are_not_read_again(
    model: str, options: dict[str, Any], shard_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shard_bytes is not None:
        monkeypatch.setitem(FolderWriter.__init__.__kwdefaults__, "shard_bytes", shard_bytes)
    source = save_family(tmp_path / "source", "whisper") if model == "whisper" else save_tiny(tmp_path / "source")
    headwise.convert(source, tmp_path / "whole", **options, evaluate=False)
    read: list[Place] = []
    original = layers.read_layer

    def noting(checkpoint: Checkpoint, place: Place) -> Any:
        read.append(place)
        return original(checkpoint, place)

    monkeypatch.setattr(layers, "read_layer", noting)
    with monkeypatch.context() as patch:
        stop_at(patch, layers, "convert_layer", 4 if model == "whisper" else 2, after=False)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **options)
    first = list(read)
    read.clear()
    headwise.convert(source, tmp_path / "out", **options, evaluate=False)
    assert len(first) == (3 if model == "whisper" else 1)
    assert not {*first} & {*read}
    assert len(first) + len(read) == (4 if model == "whisper" else 2)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_other_arguments_start_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"to": "mla", "calibrate": tmp_path / "text.txt", "calibration_tokens": 512}
    headwise.convert(source, tmp_path / "whole", kv_budget=0.25, **options, evaluate=False)
    with monkeypatch.context() as patch:
        stop_at(patch, Activations, "commit", 3, after=True)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", kv_budget=0.5, **options)
    headwise.convert(source, tmp_path / "out", kv_budget=0.25, **options, evaluate=False)
    for file in FILES:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_text_that_has_changed_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of texts changes and its name does not; ``datasets`` is not needed to notice."""
    source = save_tiny(tmp_path / "source")
    (tmp_path / "texts").mkdir()
    monkeypatch.setattr(sources, "_dataset_rows", rows_of)
    options = {"to": "mqa", "calibrate": tmp_path / "texts", "calibration_tokens": 512, "evaluate": False}
    (tmp_path / "texts/a.txt").write_text(TEXT)
    with monkeypatch.context() as patch:
        stop_at(patch, Activations, "commit", 2, after=True)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **options)
    (tmp_path / "texts/a.txt").write_text(TEXT[::-1])
    headwise.convert(source, tmp_path / "out", **options)
    headwise.convert(source, tmp_path / "whole", **options)
    for file in FILES:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def rows_of(*_: object, data_files: list[str], **__: object) -> list[dict[str, str]]:
    return [{"text": Path(file).read_text()} for file in data_files]


def test_discarded_work_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the report and not in the card: the folder does not depend on files that were there before."""
    source = save_tiny(tmp_path / "source")
    for name, kv_budget, notes in (("out", 0.25, 1), ("other", 0.5, 0)):
        with monkeypatch.context() as patch:
            stop_at(patch, layers, "convert_layer", 2, after=False)
            with pytest.raises(StoppedError):
                headwise.convert(source, tmp_path / name, to="mla", kv_budget=0.5)
        done = headwise.convert(source, tmp_path / name, to="mla", kv_budget=kv_budget, evaluate=False)
        assert sum("discarded what another conversion" in note for note in done.notes) == notes
        assert "discarded" not in (tmp_path / name / "README.md").read_text()


def test_what_a_kill_left_of_the_sensitivities_is_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers' inputs are in a temporary folder, which only a kill leaves behind."""
    source = save_tiny(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"to": "mqa", "calibrate": tmp_path / "text.txt", "calibration_tokens": 512, "evaluate": False}
    with monkeypatch.context() as patch:
        stop_at(patch, Activations, "commit", 1, after=True)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **options)
    work = tmp_path / ".out.headwise-partial/work"
    (work / "sensitivities-abc").mkdir()
    (work / "sensitivities-abc/0.activations").write_bytes(b"states")
    with monkeypatch.context() as patch:
        stop_at(patch, Activations, "commit", 1, after=True)
        with pytest.raises(StoppedError):
            headwise.convert(source, tmp_path / "out", **options)
    assert sorted(path.name for path in work.glob("sensitivities*")) == ["sensitivities"]
