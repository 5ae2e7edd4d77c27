"""Statistics of a source in a folder: its content, what is refused, and conversions by it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import headwise
from headwise.conversion import write_folder as layer_loop
from headwise.conversion.calibration import saved
from headwise.conversion.calibration.saved import _full_matrix, _triangle, open_statistics, read_evidence
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.storage import LayerFiles
from headwise.measure.evaluation.beside_source import REFERENCE
from headwise.measure.texts import calibration_windows
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from headwise.runtime.hf import LayerwiseModel
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import save_tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40

calibrate = sys.modules["headwise.conversion.calibrate"]

convert = partial(headwise.convert, evaluate=False)
"""No result is evaluated, except where a test asks for it."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and its statistics, of which each test has copies."""
    folder = tmp_path_factory.mktemp("saved")
    source, text = save_tiny(folder / "source", "qwen2"), folder / "text.txt"
    text.write_text(TEXT)
    headwise.calibrate(source, folder / "statistics", calibrate=text, calibration_tokens=512)
    return folder


@pytest.fixture
def source(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place / "source", tmp_path / "source"))


@pytest.fixture
def statistics(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place / "statistics", tmp_path / "statistics"))


def test_a_disk_without_room_for_what_enters_layers_is_refused(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"calibrate": text, "calibration_tokens": 512}
    with monkeypatch.context() as patch:
        stop_at(patch, LayerFiles, "save", 3, after=True)  # the first layer's statistics
        with pytest.raises(StoppedError):
            headwise.calibrate(source, tmp_path / "stopped", **options)
    (work,) = tmp_path.glob(".stopped.*")
    taken = sum(file.stat().st_size for file in work.rglob("*") if file.suffix in (".activations", ".spill"))
    for missing in (1, 0):
        free = 64 * 1024**2 + taken - missing
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        with pytest.raises(headwise.StorageError, match="of disk and") if missing else nullcontext():
            headwise.calibrate(source, tmp_path / "again", **options)


def layers_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the source's layers that conversions read, in order."""
    read: list[int] = []
    own = layer_loop.read_layer
    monkeypatch.setattr(layer_loop, "read_layer", lambda model, place: read.append(place.index) or own(model, place))
    return read


def error_of(source: Path, converted: Path) -> float:
    ids = torch.tensor([load_tokenizer(source)(TEXT, add_special_tokens=False)["input_ids"][:128]])
    with torch.inference_mode():
        difference = headwise.load(converted)(ids).logits - headwise.load(source)(ids).logits
    return float(difference.square().mean())


def test_a_triangle_is_the_whole_matrix() -> None:
    half = torch.randn(7, 7, dtype=torch.float64)
    gram = half + half.mT
    assert torch.equal(_full_matrix(_triangle(gram), 7), gram)
    assert len(_triangle(gram)) == 28
    with pytest.raises(headwise.CheckpointError, match="must be the triangle of a matrix 8 wide"):
        _full_matrix(_triangle(gram), 8)


def test_statistics_are_of_the_inputs_of_the_sources_layers(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments of every attention's inputs, from the whole model run on all of the tokens."""
    monkeypatch.setattr("headwise.conversion.solvers.device.QUICK", False)  # layers are then run in float32
    statistics = tmp_path / "statistics"
    headwise.calibrate(source, statistics, calibrate=text, calibration_tokens=512)
    calibrator = open_statistics(statistics, open_checkpoint(source))
    about = json.loads((statistics / "statistics.json").read_text())
    assert about["tokens"] == calibrator.tokens == 512
    windows = calibration_windows(load_tokenizer(source), [text], tokens=512, window=about["window"])
    model = headwise.load(source)
    seen: list[list[torch.Tensor]] = [[], []]
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(lambda *args, own=seen[index]: own.append(args[2].flatten(0, 1)))
    with torch.inference_mode():
        model(windows)
    for index, (own,) in enumerate(seen):
        inputs = torch.cat((own, torch.ones(512, 1, dtype=torch.float64)), dim=1)
        moments = read_evidence(LayerFiles(calibrator.folder), index).statistics.inputs  # type: ignore[union-attr]
        assert torch.allclose(moments, inputs.mT @ inputs / 512, rtol=1e-4, atol=1e-5 * float(moments.abs().max()))


@pytest.mark.parametrize("target", [{"to": "mla", "kv_budget": 0.5}, {"to": "mqa"}], ids=["mla", "mqa"])
def test_any_target_is_made_without_running_the_model(
    source: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: dict[str, Any]
) -> None:
    convert(source, tmp_path / "blind", **target)
    monkeypatch.setattr(LayerwiseModel, "__init__", None)  # is called if the model is run
    done = convert(source, tmp_path / "out", statistics=statistics, **target)
    assert done.calibration_tokens == 512
    assert not any("no calibration text" in note for note in done.notes)
    assert error_of(source, tmp_path / "out") < error_of(source, tmp_path / "blind")


@pytest.mark.parametrize("method", [None, "mha2mla", "transmla:2"])
def test_it_is_the_conversion_on_the_text_with_every_stage_left_out(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str | None
) -> None:
    """Without sensitivities, each layer is solved for the source's own stream, on the training windows."""
    without = ("spread", "sequence", "refit", "refine") if method is None else ()  # a published one has none
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "method": method}
    convert(source, tmp_path / "on-text", calibrate=text, calibration_tokens=512, without=without, **options)
    # Calibrated on no more than those windows, in their order.
    original = calibrate.open_windows
    monkeypatch.setattr(
        calibrate, "open_windows", lambda *args: (original(*args).ids[: -original(*args).held_out], 0, 0)
    )
    headwise.calibrate(source, tmp_path / "fewer", calibrate=text, calibration_tokens=512)
    convert(source, tmp_path / "out", statistics=tmp_path / "fewer", **options)
    expected, actual = (load_file(tmp_path / name / "model.safetensors") for name in ("on-text", "out"))
    for name, tensor in expected.items():
        assert torch.allclose(actual[name], tensor, rtol=1e-4, atol=1e-5 * float(tensor.abs().max())), name


def test_layers_that_are_done_are_neither_read_nor_solved_again(
    source: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "statistics": statistics}
    convert(source, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        stop_at(patch, LayerFiles, "save", 1, after=True)
        with pytest.raises(StoppedError):
            convert(source, tmp_path / "out", **options)
    read = layers_read(monkeypatch)
    convert(source, tmp_path / "out", **options)
    assert read == [1]
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("call", [1, 3, 4])
def test_a_calibration_that_ended_early_goes_on(
    source: Path, text: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    options: dict[str, Any] = {"calibrate": text, "calibration_tokens": 512}
    with monkeypatch.context() as patch:
        stop_at(patch, LayerFiles, "save", call, after=True)
        with pytest.raises(StoppedError):
            headwise.calibrate(source, tmp_path / "again", **options)
    assert not (tmp_path / "again").exists()
    headwise.calibrate(source, tmp_path / "again", **options)
    files = sorted(file.name for file in statistics.iterdir())
    assert files == ["SHA256SUMS", "layer-00000.safetensors", "layer-00001.safetensors", "statistics.json"]
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (statistics / file).read_bytes()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_calibration_whose_earlier_layers_are_damaged_begins_anew(
    source: Path,
    text: Path,
    statistics: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    options: dict[str, Any] = {"calibrate": text, "calibration_tokens": 512}
    with monkeypatch.context() as patch:
        stop_at(patch, LayerFiles, "save", 4, after=True)  # saving the second layer
        with pytest.raises(StoppedError):
            headwise.calibrate(source, tmp_path / "again", **options)
    damage(tmp_path / ".again.headwise-partial/work/layers/layer-00000.safetensors")
    with pytest.raises(headwise.CheckpointError, match="layer = 0: an earlier run's result is lost"):
        headwise.calibrate(source, tmp_path / "again", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "statistics", "text.txt"]
    headwise.calibrate(source, tmp_path / "again", **options)
    assert (tmp_path / "again/statistics.json").read_bytes() == (statistics / "statistics.json").read_bytes()


def poison(file: Path) -> None:
    results = LayerFiles(file.parent)
    loaded = results.load(0)
    assert loaded is not None
    loaded[0]["inputs"][3] = float("nan")
    results.save(0, *loaded)


def changed(**tensors: Any) -> Callable[[Path], None]:
    """Change tensors of a layer's file (None removes one, a function maps it), and correct all checksums."""

    def spoil(file: Path) -> None:
        results = LayerFiles(file.parent)
        loaded = results.load(0)
        assert loaded is not None
        own, about = loaded
        for name, change in tensors.items():
            changed_tensor = change(own[name]) if callable(change) else change
            own = {key: value for key, value in own.items() if key != name}
            own |= {} if changed_tensor is None else {name: changed_tensor}
        results.save(0, own, about)
        report = json.loads((file.parent / "statistics.json").read_text())
        report["layers"][0] = results.checksum(0)
        (file.parent / "statistics.json").write_text(json.dumps(report))

    return spoil


def shrink(file: Path) -> None:
    file.write_bytes(save({"inputs": torch.zeros(3)}))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)  # which safetensors would wait for


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (cut, "is cut short or damaged; calibrate again"),
        (flip, "is cut short or damaged; calibrate again"),
        (Path.unlink, "is missing; calibrate again"),
        (pipe, "is missing; calibrate again"),
        (shrink, "is cut short or damaged; calibrate again"),
        (poison, "holds NaN or infinite values: inputs of layer 0"),
        (changed(keys=None), "lacks keys of layer 0"),
        (changed(sensitivity=None), "lacks sensitivity of layer 0"),
        (changed(more=torch.zeros(3)), "has a tensor too many: more of layer 0"),
        (changed(inputs=torch.Tensor.half), "holds float16 in the place of float64: inputs of layer 0"),
        (changed(keys=torch.Tensor.int), "holds int32 in the place of float64: keys of layer 0"),
        (changed(distances=torch.Tensor.float), "holds float32 in the place of float64: distances of layer 0"),
        (changed(sensitivity=torch.Tensor.double), "holds float64 in the place of float32: sensitivity of layer 0"),
        (changed(inputs=torch.Tensor.neg), "holds negative sums of squares: inputs of layer 0"),
        (changed(keys=torch.Tensor.neg), "holds negative sums of squares: keys of layer 0"),
        (changed(sensitivity=torch.Tensor.neg), "holds negative sums of squares: sensitivity of layer 0"),
        (changed(head_weight=torch.Tensor.neg), "holds negative sums of squares: head_weight of layer 0"),
        (changed(inputs=lambda own: own[1:]), r"holds shape \(1224,\) in the place of \(1225,\): inputs of layer 0"),
        (changed(sensitivity=lambda own: own[1:]), "sensitivity of layer 0"),
        (changed(queries=lambda own: own[None]), r"holds shape \(1,\) in the place of \(\): queries of layer 0"),
        (changed(distances=lambda own: own[1:]), "distances of layer 0"),
        (changed(distances=lambda own: own[:, 1:]), r"layer-00000.* is not the layer that statistics\.json names"),
    ],
)
def test_a_damaged_layer_is_refused_by_name(
    source: Path, statistics: Path, tmp_path: Path, spoil: Callable[[Path], None], rule: str
) -> None:
    spoil(statistics / "layer-00000.safetensors")
    with pytest.raises(headwise.CheckpointError, match=rule):
        convert(source, tmp_path / "out", to="mqa", statistics=statistics)
    assert not (tmp_path / "out").exists()


def test_a_layer_in_anothers_place_is_refused(source: Path, statistics: Path, tmp_path: Path) -> None:
    (statistics / "layer-00001.safetensors").write_bytes((statistics / "layer-00000.safetensors").read_bytes())
    with pytest.raises(headwise.CheckpointError, match=r"layer-00001.*is not the layer that statistics\.json names"):
        convert(source, tmp_path / "out", to="mqa", statistics=statistics)


def test_another_models_are_refused(source: Path, statistics: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "qwen2", seed=1)
    with pytest.raises(headwise.CheckpointError, match="is of another model than"):
        convert(other, tmp_path / "out", to="mqa", statistics=statistics)
    deeper = save_tiny(tmp_path / "deeper", "qwen2", num_hidden_layers=3)
    with pytest.raises(headwise.CheckpointError, match=r"has 2 layers, and .*deeper has 3"):
        convert(deeper, tmp_path / "out", to="mqa", statistics=statistics)
    source.rename(tmp_path / "moved")
    convert(tmp_path / "moved", tmp_path / "out", to="mqa", statistics=statistics)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 1}', "[" * 100_000])
def test_what_is_no_such_folder_is_refused(
    source: Path, statistics: Path, tmp_path: Path, content: str | None
) -> None:
    about = statistics / "statistics.json"
    about.unlink() if content is None else about.write_text(content)
    with pytest.raises(headwise.CheckpointError, match=r"has no readable statistics\.json"):
        convert(source, tmp_path / "out", to="mqa", statistics=statistics)


@pytest.mark.parametrize("name", ["tokens", "window"])
@pytest.mark.parametrize("value", ["1e999", "-5", "0", "true", '"512"', "512.0", "NaN"])
def test_a_number_that_is_none_is_refused(
    source: Path, statistics: Path, tmp_path: Path, name: str, value: str
) -> None:
    about = json.loads((statistics / "statistics.json").read_text())
    content = json.dumps({**about, name: "here"}).replace('"here"', value)
    (statistics / "statistics.json").write_text(content)
    rule = rf"names .* {name} in its statistics\.json, which must be a whole number of at least 1"
    with pytest.raises(headwise.CheckpointError, match=rule):
        convert(source, tmp_path / "out", to="mqa", statistics=statistics)


def test_another_format_is_refused(source: Path, statistics: Path, tmp_path: Path) -> None:
    about = json.loads((statistics / "statistics.json").read_text())
    (statistics / "statistics.json").write_text(json.dumps({**about, "format": 1}))
    with pytest.raises(headwise.CheckpointError, match="is of format 1; this headwise reads format 2"):
        convert(source, tmp_path / "out", to="mqa", statistics=statistics)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"calibrate": "text"}, "statistics = .*cannot be used with calibrate"),
        ({"without": ("refit",)}, "without = 'refit': is a stage of calibrate"),
        ({"method": "mean"}, "statistics = .*goes with mla and aligned heads, not with mean"),
    ],
)
def test_options_that_exclude_statistics(
    source: Path, statistics: Path, text: Path, tmp_path: Path, options: dict[str, Any], rule: str
) -> None:
    if "calibrate" in options:
        options = {"calibrate": text}
    with pytest.raises(headwise.ArgumentError, match=rule):
        convert(source, tmp_path / "out", to="mqa", statistics=statistics, **options)


def test_they_end_as_deepseek_too(
    source: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared channels are chosen by statistics, and the model is run for the comparison of logits alone."""
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "format": "deepseek"}
    convert(source, tmp_path / "blind", **options)
    monkeypatch.setattr("headwise.conversion.calibration.text.LayerwiseModel", None)  # is called if the model is run
    done = convert(source, tmp_path / "out", statistics=statistics, **options)
    assert (done.model_type, done.calibration_tokens) == ("deepseek_v3", 512)
    assert done.stock is not None
    assert done.stock.shared_plan_error is None
    assert error_of(source, tmp_path / "out") < error_of(source, tmp_path / "blind")


def test_the_card_and_the_proof_of_a_conversion_by_statistics(source: Path, statistics: Path, tmp_path: Path) -> None:
    done = headwise.convert(source, tmp_path / "out", to="mla", kv_budget=0.5, statistics=statistics)
    assert done.evaluation is not None
    assert done.evaluation.text == REFERENCE  # no calibration text has a rest to evaluate on
    card = (tmp_path / "out/README.md").read_text()
    assert "- steps: sensitivity, channels\n- calibrated on 512 tokens of `text.txt`, in windows of 256\n" in card


def test_a_dry_run_with_statistics_solves_one_layer(source: Path, statistics: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "statistics": statistics}
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        own = saved.read_evidence
        patch.setattr(saved, "read_evidence", lambda files, index: read.append(index) or own(files, index))
        dry = convert(source, tmp_path / "out", **options, dry_run=True)
    assert read == [0, 1, 0]  # both are checked, and one is solved
    assert dry.seconds > 0
    assert not (tmp_path / "out").exists()


def test_a_dry_run_by_statistics_removes_biases(source: Path, statistics: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"to": "mla", "kv_lora_rank": 20, "qk_rope_head_dim": 4, "format": "deepseek"}
    dry = convert(source, tmp_path / "out", statistics=statistics, bias_free=True, **options, dry_run=True)
    assert dry.seconds > 0


def test_the_report_says_where_the_time_went(source: Path, statistics: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out", to="mqa", statistics=statistics)
    assert 0 < done.seconds_reading < done.seconds
    assert 0 < done.seconds_writing < done.seconds - done.seconds_reading


def test_a_resumed_conversion_on_a_text_does_not_read_what_it_skips(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "calibrate": text, "calibration_tokens": 512}
    with monkeypatch.context() as patch:
        stop_at(patch, TextCalibrator, "advance", 1, after=True)
        with pytest.raises(StoppedError):
            convert(source, tmp_path / "out", **options)
    read = layers_read(monkeypatch)
    convert(source, tmp_path / "out", **options)
    assert read == [1]
