"""The file in which a conversion keeps what it measured of itself, and `advise` that reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.base.documents import MEASURED
from headwise.conversion.frontiers.candidate import read_target
from headwise.costs.formulas.target import parse_target, target_options
from headwise.decide.advice import read_measured
from headwise.decide.report import read_folder
from headwise.errors import CheckpointError, StorageError
from headwise.models.specs import read_spec
from tests.real_models import save_tiny

TEXT = "".join(f"{index:04d} the quick brown fox jumps over the lazy dog. " for index in range(60))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "source")


@pytest.fixture
def study(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return {"calibrate": path, "calibration_tokens": 512, "evaluation_windows": 2}


@pytest.mark.parametrize("target", ["mla:0.5", "mqa", "mla@0.5"])
def test_advice_reads_a_converted_folder(source: Path, study: dict[str, Any], tmp_path: Path, target: str) -> None:
    done = headwise.convert(source, tmp_path / "out", **target_options(target), **study)
    assert done.evaluation is not None
    assert done.evaluation.perplexity_ratio is not None
    (found,) = read_measured([tmp_path / "out"], read_spec(source)).values()
    assert (found.target, found.label, found.kl) == (target, done.label, done.evaluation.kl)
    assert found.loss == done.evaluation.perplexity_ratio - 1
    if "@" not in target:
        assert found.cache_fraction == done.kv_bytes_per_token_after / done.kv_bytes_per_token_before
    else:
        assert 0.4 < found.cache_fraction < 0.7  # of a bfloat16 cache
    assert done.kv_bytes_per_token_after < done.kv_bytes_per_token_before
    with pytest.raises(CheckpointError, match="must be this model's frontier"):
        read_measured([tmp_path / "out"], read_spec("llama-3-8b"))
    assert (
        read_folder(tmp_path / "out").model is not None
    )  # its own page does not take it for a measurement of itself
    headwise.convert(
        source, tmp_path / "out", overwrite=True, **{**study, "evaluate": False}, **target_options(target)
    )
    assert not (tmp_path / "out" / MEASURED).exists()
    with pytest.raises(StorageError, match=r"frontier\.json"):
        read_measured([tmp_path / "out"])


def test_what_is_not_the_target_by_itself_says_so(source: Path, study: dict[str, Any], tmp_path: Path) -> None:
    half = {"to": "mla", "kv_budget": 0.5, **study}
    ways = {}
    headwise.convert(source, tmp_path / "a", **half, without=("refine",))
    headwise.convert(source, tmp_path / "b", **half, method="mha2mla")
    headwise.convert(source, tmp_path / "c", **half, format="deepseek", bias_free=True)
    for name in "abc":
        (point,) = json.loads((tmp_path / name / MEASURED).read_text())["points"]
        ways[name] = point["way"]
        assert read_measured([tmp_path / name]) == {}
    assert ways == {"a": "headwise without refine", "b": "headwise by mha2mla", "c": "headwise as deepseek"}
    headwise.convert(source, tmp_path / "d", to="mla", kv_lora_rank=16, qk_rope_head_dim=8, bits=4, **study)
    assert not (tmp_path / "d" / MEASURED).exists()


@pytest.mark.parametrize(
    "target", ["mha", "mqa", "gqa:3", "mla:0.5", "mla:0.333", "mla:144+48", "mla@0.25", "gqa:2@0.25", "same@0.19"]
)
def test_a_target_is_spelled_as_frontiers_do(target: str) -> None:
    spelled = parse_target(**target_options(target)).spelling
    assert spelled == target == read_target(target)


def test_bits_have_no_spelling() -> None:
    assert parse_target("mla", kv_budget=0.5, bits=4).spelling is None
