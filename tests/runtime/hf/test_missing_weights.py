"""A config whose layers no tensor fills is refused before the model is built."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headwise
from headwise.errors import CheckpointError
from headwise.models.checkpoints import open_checkpoint
from headwise.runtime.hf import check_complete
from headwise.runtime.hf.load import check_values
from tests.real_models import save_tiny
from tests.tiny_families import save_family

MIXTURES: dict[str, dict[str, Any]] = {
    "granitemoe": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
    },
    "gemma2": {"head_dim": 8},
}


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test fail if a model is built."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(sys.modules["headwise.runtime.hf.load"], "_meta_tensors", refuse)


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        ("granitemoe", {"num_hidden_layers": 9000}, "num_hidden_layers = 9000: is more than the 21 tensors of"),
        ("granitemoe", {"num_hidden_layers": 20}, "weights = '60,432 numbers': are fewer than half of the 520,"),
        ("granitemoe", {"num_local_experts": 10_000}, "weights = '60,432 numbers': are fewer than half of the"),
        ("granitemoe", {"num_experts": 100_000}, "num_experts = 100000: is more than the 60,432 numbers of"),
        ("granitemoe", {"intermediate_size": 10**8}, "weights = '60,432 numbers': are fewer than half of the"),
        ("granitemoe", {"head_dim": 2**20}, "weights = '60,432 numbers': are fewer than half of the"),
        ("granitemoe", {"vocab_size": 10**9}, "weights = '60,432 numbers': are fewer than half of the"),
        ("glm4_moe", {"n_routed_experts": 100_000}, "weights = '46,808 numbers': are fewer than half of the"),
        ("glm4_moe", {"moe_intermediate_size": 10**8}, "weights = '46,808 numbers': are fewer than half of the"),
        # The file does not say what its class assumes.
        (
            "glm4_moe",
            {"n_routed_experts": 9000, "moe_intermediate_size": ...},
            "n_routed_experts = 9000: is more than the 46,808 num",
        ),
        ("gemma2", {"intermediate_size": 10**8}, "weights = '37,344 numbers': are fewer than half of the"),
    ],
    ids=str,
)
def test_a_family_without_a_file(
    tmp_path: Path, unbuilt: None, kind: str, changes: dict[str, Any], line: str
) -> None:
    folder = save_tiny(tmp_path / kind, kind, **MIXTURES[kind])
    check_values(open_checkpoint(folder))
    edit(folder, **changes)
    with pytest.raises(CheckpointError) as refused:
        headwise.load(folder)
    assert str(refused.value).startswith(line)


def test_layers_that_nothing_fills(tiny_llama: Path, unbuilt: None) -> None:
    """There are as many tensors as layers, but not these layers' tensors."""
    path = tiny_llama / "model.safetensors"
    save_file({**load_file(path), **{f"more.{index}": torch.zeros(1) for index in range(5000)}}, path)
    edit(tiny_llama, num_hidden_layers=5000)
    with pytest.raises(CheckpointError, match=r"^tensor = 'model.layers.2.self_attn.q_proj.weight': is missing from"):
        check_complete(open_checkpoint(tiny_llama))


def test_layers_of_an_encoder_that_nothing_fills(tmp_path: Path, unbuilt: None) -> None:
    folder = save_family(tmp_path / "whisper", "whisper")
    edit(folder, encoder_layers=5000)
    with pytest.raises(CheckpointError, match=r"^encoder_layers = 5000: is more than the \d+ tensors of"):
        check_complete(open_checkpoint(folder))


@pytest.mark.parametrize("kind", MIXTURES)
def test_whole_ones_are_run(tmp_path: Path, kind: str) -> None:
    """In float64 too, which the usual way to run experts does not multiply."""
    folder = save_tiny(tmp_path / kind, kind, **MIXTURES[kind])
    model = headwise.load(folder)
    assert model.dtype == torch.float64
    ids = torch.tensor([[1, 5, 7, 9]])
    logits = model(ids).logits
    assert torch.isfinite(logits).all()
    assert torch.allclose(headwise.load(folder, dtype="float32")(ids).logits.double(), logits, atol=1e-4)
