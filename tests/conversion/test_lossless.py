"""Every path of the converter has a lossless setting, which is tested on every kind of model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from tests.closeness import assert_close
from tests.real_models import save_tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "mha": ("llama", {"num_key_value_heads": 6}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "untied and wide heads": ("llama", {"head_dim": 14, "tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "dynamic rope": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
}


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = headwise.load(folder)(ids).logits
    return out


@pytest.fixture(params=list(MODELS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model_type, overrides = MODELS[request.param]
    return save_tiny(tmp_path / "source", model_type, **overrides)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def test_repeating_heads_changes_not_a_bit(source: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    done = headwise.convert(source, tmp_path / "out", to="mha", evaluate=False)
    assert done.mechanism == "mha"
    assert torch.equal(logits(tmp_path / "out", ids), logits(source, ids))


def test_mla_with_every_channel_and_the_whole_latent_is_the_model(
    source: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    done = headwise.convert(source, tmp_path / "out", to="mla", kv_budget=1.0, evaluate=False)
    assert done.kv_bytes_per_token_after == done.kv_bytes_per_token_before
    assert not [note for note in done.notes if "rotary frequencies change" not in note]
    assert_close(logits(tmp_path / "out", ids), logits(source, ids), 1e-8)


def test_a_full_latent_beside_part_of_the_rotation_keeps_the_values(
    source: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    """With one token there is no distance, so that dropped rotation loses only by the mean's smaller size."""
    spec = headwise.inspect(source)
    assert spec.num_kv_heads is not None
    assert spec.head_dim is not None
    keys = spec.num_kv_heads * spec.head_dim
    rank = 2 * keys - 4
    headwise.convert(source, tmp_path / "out", to="mla", kv_lora_rank=rank, qk_rope_head_dim=4, evaluate=False)
    # A single token attends to itself alone: whatever its score, its output is its value.
    assert_close(logits(tmp_path / "out", ids[:, :1]), logits(source, ids[:, :1]), 1e-8)


def test_there_and_back_is_where_one_started(source: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    spec = headwise.inspect(source)
    headwise.convert(source, tmp_path / "wide", to="mha", evaluate=False)
    headwise.convert(tmp_path / "wide", tmp_path / "back", to=f"gqa:{spec.num_kv_heads}", evaluate=False)
    assert_close(logits(tmp_path / "back", ids), logits(source, ids), 1e-12)
