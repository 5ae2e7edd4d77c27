"""The report and the folder of `convert`, and the files that it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import headwise
from headwise.costs.formulas import dtype_bytes
from headwise.models.checkpoints import load_tokenizer
from tests.real_models import save_tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "source", "qwen2")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def first_tokens(source: Path, count: int) -> torch.Tensor:
    return torch.tensor([load_tokenizer(source)(TEXT, add_special_tokens=False)["input_ids"][:count]])


def test_the_report_is_true_to_the_files(source: Path, tmp_path: Path) -> None:
    done = headwise.convert(source, tmp_path / "out", to="mla", kv_budget=0.5, evaluate=False)
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    assert done.parameters_after == sum(torch.Size(shape).numel() for shape in shapes)
    assert done.disk_bytes == 8 * done.parameters_after
    # 2 layers of 3 key–value heads, 8 wide, keys and values, 8 bytes each; then half of that.
    assert done.kv_bytes_per_token_before == 2 * 2 * 3 * 8 * 8
    assert done.kv_bytes_per_token_after == done.kv_bytes_per_token_before // 2
    assert done.seconds > 0
    assert done.peak_rss_bytes is not None
    assert any("calibrat" in note for note in done.notes)
    inspection = headwise.inspect(tmp_path / "out", dtype="float64")
    assert inspection.kv_bytes_per_token == done.kv_bytes_per_token_after
    assert (inspection.mechanism, inspection.kv_lora_rank, inspection.qk_rope_head_dim) == ("mla", 18, 6)
    assert inspection.weights is not None
    assert inspection.weights["total"] == done.parameters_after
    json.dumps(done.to_dict())


def test_grouped_results_are_stock_folders(source: Path, tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "out", to="gqa:1", evaluate=False)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["num_key_value_heads"] == 1
    assert "headwise" not in config
    assert headwise.inspect(tmp_path / "out").mechanism == "mqa"


def test_the_tokenizer_comes_along(source: Path, tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "out", to="mla", kv_budget=0.5, evaluate=False)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_dtype_is_the_outputs(source: Path, tmp_path: Path) -> None:
    done = headwise.convert(source, tmp_path / "out", to="mla", kv_budget=1.0, dtype="bfloat16", evaluate=False)
    assert done.dtype == "bfloat16"
    assert headwise.load(tmp_path / "out").dtype == torch.bfloat16
    assert headwise.load(tmp_path / "out", dtype="float32").dtype == torch.float32


def test_a_dry_run_writes_nothing_and_reports_the_same(source: Path, text: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    options = {"to": "mla", "kv_budget": 0.5, "calibrate": text}
    dry = headwise.convert(source, tmp_path / "out", dry_run=True, **options)
    assert sorted(tmp_path.iterdir()) == before
    assert dry.seconds > 0
    wet = headwise.convert(source, tmp_path / "out", **options, evaluate=False)
    same = ("kv_bytes_per_token_before", "kv_bytes_per_token_after", "parameters_after", "disk_bytes", "label")
    assert [getattr(dry, name) for name in same] == [getattr(wet, name) for name in same]
    options["spread"] = True
    spread = headwise.convert(source, tmp_path / "spread", dry_run=True, **options)
    assert [note for note in spread.notes if note not in dry.notes] == [
        "the text decides how the cache is spread over layers; parameters and disk depend on it"
    ]


class Watched:
    """Progress that is told what to expect, and remembers what it was told."""

    def __init__(self) -> None:
        self.expected: dict[str, float] = {}
        self.stages: list[str] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        assert self.expected or stage == "estimating", "what to expect is told first"
        if stage not in self.stages:
            self.stages.append(stage)

    def expect(self, seconds: Mapping[str, float]) -> None:
        self.expected = dict(seconds)


@pytest.mark.parametrize(
    "options", [{}, {"kv_budget": None, "kv_bytes": 0.25}, {"format": "deepseek"}, {"to": "mqa", "kv_budget": None}]
)
def test_every_stage_is_expected_in_its_order(
    source: Path, text: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    exam = tmp_path / "exam.txt"
    exam.write_text(TEXT[::-1])
    watched = Watched()
    options = {"to": "mla", "kv_budget": 0.5, **options}
    headwise.convert(
        source, tmp_path / "out", **options, calibrate=text, calibration_tokens=512, evaluate=exam, progress=watched
    )
    stages = [stage for stage in watched.stages if stage not in ("estimating", "loading", "decoding", "exporting")]
    assert list(watched.expected) == stages
    assert all(seconds > 0 for seconds in watched.expected.values())


def test_the_same_conversion_gives_the_same_bytes(source: Path, text: Path, tmp_path: Path) -> None:
    how = {"kv_budget": 0.4, "calibrate": text, "calibration_tokens": 512}
    for name in ("a", "b"):
        headwise.convert(source, tmp_path / name, to="mla", **how, evaluate=False)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_calibration_text_lowers_the_error_it_is_meant_to(source: Path, text: Path, tmp_path: Path) -> None:
    """On its calibration text, a calibrated model is nearer to the source than one converted by weights alone."""
    ids = first_tokens(source, 128)
    errors = {}
    with torch.inference_mode():
        expected = headwise.load(source)(ids).logits
        for name, options in (("blind", {}), ("calibrated", {"calibrate": text, "calibration_tokens": 512})):
            headwise.convert(source, tmp_path / name, to="mla", kv_budget=0.5, **options, evaluate=False)
            errors[name] = float((headwise.load(tmp_path / name)(ids).logits - expected).square().mean())
    assert errors["calibrated"] < errors["blind"]


def test_more_cache_is_less_damage(source: Path, text: Path, tmp_path: Path) -> None:
    ids = first_tokens(source, 128)
    errors, how = [], {"calibrate": text, "calibration_tokens": 512}
    with torch.inference_mode():
        expected = headwise.load(source)(ids).logits
        for budget in (0.25, 0.5, 0.75, 1.0):
            out = tmp_path / f"at-{budget}"
            headwise.convert(source, out, to="mla", kv_budget=budget, **how, evaluate=False)
            errors.append(float((headwise.load(out)(ids).logits - expected).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


def test_overwrite_replaces_a_model_folder(source: Path, tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "out", to="mha", evaluate=False)
    headwise.convert(source, tmp_path / "out", to="mqa", overwrite=True, evaluate=False)
    assert headwise.inspect(tmp_path / "out").mechanism == "mqa"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_converting_from_mla_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "mla", to="mla", kv_budget=0.5, evaluate=False)
    with pytest.raises(headwise.SpecError, match="converting from MLA is not supported"):
        headwise.convert(tmp_path / "mla", tmp_path / "out", to="gqa:1")


def test_only_every_channel_and_the_whole_latent_is_lossless(source: Path, tmp_path: Path) -> None:
    """A cache of the source's size that is divided in another way loses something."""
    done = headwise.convert(source, tmp_path / "out", to="mla", kv_lora_rank=36, qk_rope_head_dim=12, evaluate=False)
    assert done.kv_bytes_per_token_after == done.kv_bytes_per_token_before
    assert any("calibrat" in note for note in done.notes)


def test_calibration_uses_all_the_tokens_asked_for(source: Path, text: Path, tmp_path: Path) -> None:
    options = {"to": "mla", "kv_budget": 0.5, "calibrate": text, "without": ("refine",)}
    done = headwise.convert(source, tmp_path / "some", **options, calibration_tokens=300, evaluate=False)
    assert done.calibration_tokens == 300
    assert headwise.convert(source, tmp_path / "all", **options, evaluate=False).calibration_tokens > 2000


def test_a_tensor_without_a_place_in_the_model_is_refused(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "llama", "attention_bias": False}))
    with pytest.raises(headwise.CheckpointError, match=r"tensor = '.*bias': has no place in the model"):
        headwise.convert(source, tmp_path / "out", to="mqa")


def test_what_is_gained_is_weighed_against_what_it_costs(source: Path, tmp_path: Path) -> None:
    """At the user's context, before any work: files, caches, and the tokens from which on memory is saved."""
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5}
    dry = headwise.convert(source, tmp_path / "out", **options, served_context=64, dry_run=True)
    done = headwise.convert(source, tmp_path / "out", **options, served_context=64, evaluate=False)
    assert dry.balance is not None
    assert dry.balance == done.balance
    folders = source, tmp_path / "out"
    files = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders]
    before, after = dry.balance.weight_bytes
    assert before == files[0]
    assert after == dry.disk_bytes == pytest.approx(files[1], rel=0.02)  # without the file's header
    wider = dtype_bytes(done.dtype) / 2  # a served cache has 16 bits a value
    by_token = [done.kv_bytes_per_token_before / wider, done.kv_bytes_per_token_after / wider]
    assert list(dry.balance.cache_bytes) == [64 * each for each in by_token]
    even = dry.balance.even_at
    assert even is not None
    for tokens, is_saved in ((even, True), (even - 1, False)):
        found = headwise.convert(source, tmp_path / "dry", **options, served_context=tokens, dry_run=True).balance
        assert found is not None
        assert (found.saved >= 0) == is_saved
    assert dry.balance.flops is not None
    assert dry.balance.flops > 1  # a latent's products are wider
    fewer = headwise.convert(source, tmp_path / "dry", to="mqa", served_context=64, dry_run=True).balance
    assert fewer is not None
    assert fewer.even_at == 0
    with pytest.raises(headwise.ArgumentError, match="served_context = 0: must be at least 1"):
        headwise.convert(source, tmp_path / "dry", **options, served_context=0, dry_run=True)
    with pytest.raises(headwise.ArgumentError, match=r"served_by = 'ollama': must be one of llama\.cpp"):
        headwise.convert(source, tmp_path / "dry", **options, served_by="ollama", dry_run=True)


@pytest.mark.parametrize("place", ["/proc/no", "/proc/no/such/folder"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(source: Path, place: str) -> None:
    for dry_run in (True, False):
        with pytest.raises(headwise.ArgumentError, match=r"output = '/proc/no.*cannot be written"):
            headwise.convert(source, place, to="mqa", dry_run=dry_run)
