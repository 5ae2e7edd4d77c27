"""Configs whose fields of RoPE disagree, or say what a family ignores: what is written computes what the source does.

The source is transformers' own model of the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import headwise
from headwise.conversion import export_gguf
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import read_config
from headwise.serving.engines import engines
from tests.closeness import assert_close
from tests.tiny_families import NORMED, answer, save_family

Config = dict[str, Any]

BOTH: Config = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rope_scaling": {"type": "linear", "factor": 4.0},
}
YARN: Config = {**BOTH, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
PART: Config = {"partial_rotary_factor": 0.5, "rotary_dim": 4}
GEMMA: Config = {
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": None},
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_local_base_freq": 500.0,
    "rope_theta": 2e4,
}
LONG: Config = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0], "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, Config]] = {
    **{f"{name}, two objects": (name, YARN) for name in ("llama", "mistral", "qwen2", "qwen3")},
    **{f"{name}, a part": (name, PART) for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")},
    "llama, a base beside": (
        "llama",
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "gemma, by layers": ("gemma3_text", GEMMA),
    "gemma, a window that never acts": ("gemma3_text", {"sliding_window": 64, "rope_local_base_freq": 500.0}),
    "gpt_neox, usual names": ("gpt_neox", {"rope_parameters": {}, "rotary_pct": 1.0, "rope_theta": 1e6, **PART}),
    "phi3, two lengths": (
        "phi3",
        {"rope_scaling": {"type": "yarn", **LONG}, "original_max_position_embeddings": 32, **PART},
    ),
}


def edited(folder: Path, name: str, fields: Config) -> Path:
    """A tiny folder of the family with other fields in its ``config.json``."""
    save_family(folder, name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "rope_parameters" not in fields:
        del config["rope_parameters"]
    path.write_text(json.dumps(config | fields))
    return folder


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_mla_with_everything_kept_is_the_model(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    family, fields = CASES[name]
    source = edited(tmp_path / "source", family, fields)
    expected = answer(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64), ids)
    for to, sizes in (("mla", {"kv_budget": 1.0}), ("mha", {})):
        headwise.convert(source, tmp_path / to, to=to, dtype="float64", evaluate=False, **sizes)
        assert_close(answer(headwise.load(tmp_path / to), ids), expected, 1e-6 if family in NORMED else 1e-9)


@pytest.mark.parametrize("fields", [BOTH, PART], ids=["two objects", "a part"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_gguf_is_the_model(name: str, fields: Config, tmp_path: Path, ids: torch.Tensor) -> None:
    source = edited(tmp_path / "source", name, {**fields, "sliding_window": None})
    for file in source.glob("tokenizer*"):  # of a kind that GGUF does not have
        file.unlink()
    export_gguf(source, tmp_path / "model.gguf", outtype="f32")
    expected = answer(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), ids)
    assert_close(answer(headwise.load(tmp_path / "model.gguf", dtype="float32"), ids), expected, 1e-4)


def test_deepseek_is_that_of_whole_heads(tmp_path: Path, ids: torch.Tensor) -> None:
    logits = []
    for name, fields in (("part", PART), ("plain", {})):
        source = edited(tmp_path / name, "llama", fields)
        options = {"to": "mla", "kv_budget": 0.5, "dtype": "float64", "format": "deepseek", "evaluate": False}
        headwise.convert(source, tmp_path / f"{name}-out", **options)
        logits.append(
            answer(AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-out", dtype=torch.float64), ids)
        )
    assert torch.equal(*logits)


def test_what_is_written_has_one_reading(tmp_path: Path) -> None:
    """Engines read ``rope_scaling`` or ``rope_parameters``: of the source MLX-LM would compute another model."""
    source = edited(tmp_path / "source", "llama", YARN)
    headwise.convert(source, tmp_path / "out", to="mha", evaluate=False)
    config = open_checkpoint(tmp_path / "out").config
    for left_out in ("rope_scaling", "rope_parameters", ""):
        one = {name: value for name, value in config.items() if name != left_out}
        assert read_config(one).layers[0].rope == open_checkpoint(source).spec.layers[0].rope
    proportional = {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    source = edited(tmp_path / "half", "llama", proportional)
    headwise.convert(source, tmp_path / "whole", to="mha", evaluate=False)
    assert open_checkpoint(tmp_path / "whole").spec.layers[0].rope == open_checkpoint(source).spec.layers[0].rope


@pytest.mark.parametrize(
    ("fields", "is_served"),
    [
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, True),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, False),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, False),
        ({**BOTH, "rope_theta": 1e6}, True),
    ],
)
def test_mlx_reads_the_former_fields_alone(fields: Config, is_served: bool, tmp_path: Path) -> None:
    verdicts = {one.engine: one for one in engines(edited(tmp_path / "source", "llama", fields)).verdicts}
    assert verdicts["MLX-LM"].serves is is_served


def test_the_plugin_for_vllm_is_told_the_kind_that_is_computed(tmp_path: Path) -> None:
    dynamic = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    source = edited(tmp_path / "source", "llama", dynamic)
    headwise.convert(source, tmp_path / "out", to="mla", kv_budget=1.0, evaluate=False)
    (verdict,) = (one for one in engines(tmp_path / "out").verdicts if one.engine == "vLLM")
    assert "has no rope_type dynamic" in str(verdict.why)
