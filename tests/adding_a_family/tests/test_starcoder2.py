"""A new family gets every target, exact where exact is possible, and folders that load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Starcoder2Config, Starcoder2ForCausalLM

import headwise

IDS = torch.randint(0, 97, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    torch.manual_seed(0)
    model = Starcoder2ForCausalLM(
        Starcoder2Config(**sizes, **heads, bos_token_id=1, eos_token_id=2, sliding_window=None)
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    out: torch.Tensor = headwise.load(folder, dtype="float64")(IDS).logits
    return out


@pytest.mark.parametrize("how", [{"to": "mha"}, {"to": "mla", "kv_budget": 1.0}], ids=["mha", "mla"])
def test_what_loses_nothing_is_the_source(how: dict[str, object], source: Path, tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "out", **how, dtype="float64", evaluate=False)
    assert torch.allclose(logits(tmp_path / "out"), logits(source), atol=1e-9)


def test_a_smaller_cache_loads_in_transformers(source: Path, tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "out", to="mqa", evaluate=False)
    model = Starcoder2ForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_key_value_heads == 1
    assert model(IDS).logits.isfinite().all()
