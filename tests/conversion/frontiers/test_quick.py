"""Predictions of what formats of a cache lose, beside measurements, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.conversion.frontiers.quick import LEAST, QuickFrontier, list_formats
from headwise.costs.prediction import SERVING_ENGINES
from headwise.decide.advice import predictable, read_measured
from headwise.errors import ArgumentError, HeadwiseError, SpecError
from headwise.measure.evaluation.scoring import score_window
from headwise.measure.texts.windows import token_windows
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from headwise.runtime.hf import default_cache, load
from headwise.runtime.quantization.formats import ENGINE_FORMATS
from tests.conversion.frontiers.test_run import OTHER, TEXT
from tests.real_models import save_tiny
from tests.tiny_families import FAMILIES, save_family

BITS = ("int8", "int4", "int2")
DECODERS = [name for name in FAMILIES if name not in ("bert", "whisper")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and a text; not to be changed."""
    folder = tmp_path_factory.mktemp("quick")
    save_tiny(folder / "source", head_dim=64)
    (folder / "text.txt").write_text(TEXT)
    return folder


def predicted(place: Path, *targets: str, source: str = "source") -> QuickFrontier:
    return headwise.quick_frontier(
        place / source, calibrate=place / "text.txt", calibration_tokens=512, targets=targets
    )


def measured(folder: Path, quantize: str) -> float:
    """What the cache loses on another text."""
    models = {"model": load(folder, dtype=torch.float32), "against": load(folder, dtype=torch.float32)}
    windows = token_windows(load_tokenizer(folder), OTHER, window=128, windows=2)
    with default_cache(models["model"], quantize):
        return float(torch.stack([score_window(models, window)["kl"] for window in windows]).mean())


def test_fewer_bits_lose_more_as_they_do_on_another_text(place: Path) -> None:
    result = predicted(place, "int2", "int8", "llama.cpp:f32", "int4")
    found = {point.target: point.kl for point in result.points}
    assert list(found) == ["llama.cpp:f32", *BITS]  # what loses least is first
    assert abs(found.pop("llama.cpp:f32")) < 1e-6
    truth = {name: measured(place / "source", name) for name in BITS}
    assert sorted(truth, key=truth.__getitem__) == list(found)
    for name in BITS:
        assert 1 / 2 < found[name] / truth[name] < 2, name


def test_keys_and_values_both_count(place: Path) -> None:
    found = {point.target: point.kl for point in predicted(place, "int8", "int8/int4", "int4/int8", "int4").points}
    assert found["int8"] * 5 < min(found["int8/int4"], found["int4/int8"])
    assert found["int4"] > max(found["int8/int4"], found["int4/int8"])


def test_every_format_is_predicted_or_named_as_left_out(place: Path) -> None:
    result = predicted(place)
    assert json.loads(json.dumps(result.to_dict()))["points"][0]["target"] == result.points[0].target
    names = {point.target for point in result.points}
    left_out = " ".join(result.notes)
    engines = {f"{engine}:{name}" for engine, formats in ENGINE_FORMATS.items() for name in formats}
    engines |= {f"{engine.name}:{cache.name}" for engine in SERVING_ENGINES.values() for cache in engine.caches}
    for name in engines | {"int8", "int4", "int3", "int2", "int4+hadamard", "fp8", "kivi4", "kivi3", "kivi2"}:
        assert (name in names) != (name in left_out.replace(",", "").split()), name
    assert {"int8", "kivi2", "llama.cpp:q4_0", "llama.cpp:q8_0/q4_0", "vllm:fp8", "mlx:4"} <= names
    fractions = {point.target: point.cache_fraction for point in result.points}
    assert fractions["llama.cpp:q8_0"] == 8.5 / 16
    assert {point.target: point.runs_in for point in result.points}["mlx:4"] == "MLX-LM"


@pytest.mark.parametrize("name", [*DECODERS, "wide llama", "wide gemma3_text", "wide qwen3"])
def test_what_advice_has_predicted_suits_the_model(name: str, tmp_path: Path) -> None:
    """Formats that are chosen by the config alone are formats of the model's cache."""
    if name.startswith("wide "):
        save_tiny(tmp_path / "source", name.removeprefix("wide "), head_dim=64)
    else:
        save_family(tmp_path / "source", name)
    checkpoint = open_checkpoint(tmp_path / "source")
    targets = predictable(checkpoint.spec)
    formats, _ = list_formats(checkpoint, targets)
    assert set(formats) == set(targets)
    assert bool(targets) == name.startswith("wide ") or targets


def test_logits_that_are_not_finite_are_a_loss_without_bounds(tmp_path: Path) -> None:
    """SGLang's float8 has no number beyond 448, and does not stop there."""
    save_tiny(tmp_path / "source", head_dim=64)
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "v_proj" in name:
            tensors[name] = tensors[name] * 1e3
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "text.txt").write_text(TEXT)
    result = headwise.quick_frontier(
        tmp_path / "source",
        calibrate=tmp_path / "text.txt",
        calibration_tokens=512,
        targets=["sglang:fp8", "int8"],
        output=tmp_path / "out",
    )
    assert [point.target for point in result.points] == ["int8", "sglang:fp8"]
    assert result.points[1].kl == math.inf
    known = read_measured([tmp_path / "out"])
    assert known["sglang:fp8"].loss_at_most == math.inf
    assert known["int8"].loss < 1


def test_a_model_without_keys_of_heads_is_refused(place: Path, tmp_path: Path) -> None:
    headwise.convert(place / "source", tmp_path / "mla", to="mla", kv_budget=0.5, evaluate=False)
    save_family(tmp_path / "bert", "bert")
    for name, rule in (("mla", "must have keys and values of heads"), ("bert", "must be of a decoder of text")):
        with pytest.raises(SpecError, match=rule):
            headwise.quick_frontier(tmp_path / name, calibrate=place / "text.txt")


def test_a_short_text_and_a_target_that_is_no_format_are_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short. " * 10)
    source = place / "source"
    for options, error, rule in (
        ({"calibrate": tmp_path / "short.txt"}, ArgumentError, f"must be at least {LEAST} tokens"),
        ({"calibrate": tmp_path / "none.txt"}, HeadwiseError, "none.txt"),
        ({"calibrate": place / "text.txt", "targets": ["mqa"]}, ArgumentError, "is no format of a cache"),
        ({"calibrate": place / "text.txt", "targets": ["int9"]}, ArgumentError, "target = 'int9'"),
    ):
        with pytest.raises(error, match=rule):
            headwise.quick_frontier(source, **options)  # type: ignore[arg-type]  # of several types


def test_predictions_are_kept_beside_those_of_the_same_windows_alone(place: Path, tmp_path: Path) -> None:
    """Windows of 32 and of 64 tokens have as many tokens together, and other predictions."""

    def predict(target: str, window: int) -> list[str]:
        options = {"calibration_tokens": 512, "calibration_window": window, "targets": [target]}
        result = headwise.quick_frontier(
            place / "source", calibrate=place / "text.txt", output=tmp_path / "out", **options
        )
        return sorted(point.target for point in result.points)

    assert predict("int8", 64) == ["int8"]
    assert predict("int4", 64) == ["int4", "int8"]
    with pytest.raises(ArgumentError, match="windows"):
        predict("int4", 32)
    assert predict("int4", 64) == ["int4", "int8"]
