"""A new method is known to the command line, the frontier's comparison and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise
from headwise.conversion import find_method
from headwise.conversion.frontiers.candidate import list_candidates
from headwise.models.checkpoints import open_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=6, num_key_value_heads=3, **sizes))
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_it_converts_by_its_name(source: Path, tmp_path: Path) -> None:
    done = headwise.convert(source, tmp_path / "out", to="mqa", method="last_head", evaluate=False)
    assert (done.method, done.mechanism) == ("last_head", "mqa")
    before, after = (headwise.load(folder).model.layers[0].self_attn.v_proj for folder in (source, tmp_path / "out"))
    assert torch.equal(after.weight, before.weight[-8:])


def test_comparisons_and_messages_know_it(source: Path, tmp_path: Path) -> None:
    candidates, _ = list_candidates(open_checkpoint(source), ["mqa"], methods=True)
    assert "last_head" in {candidate.method for candidate in candidates}
    assert find_method("last_head").title == "last head"
    with pytest.raises(headwise.ArgumentError, match=r"method = 'x': must be one of aligned, .*last_head"):
        headwise.convert(source, tmp_path / "out", to="mqa", method="x")


def test_what_it_declares_is_held_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("any text")
    options = {"method": "last_head", "calibrate": tmp_path / "text.txt"}
    with pytest.raises(headwise.ArgumentError, match="goes with mla and aligned heads, not with last_head"):
        headwise.convert(source, tmp_path / "out", to="mqa", **options)
    with pytest.raises(headwise.ArgumentError, match="merges key–value heads, and none are merged here"):
        headwise.convert(source, tmp_path / "out", to="mla", kv_budget=0.5, method="last_head")
