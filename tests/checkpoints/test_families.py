from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headwise.checkpoints import family_names, family_of, open_checkpoint
from headwise.errors import CheckpointError, SpecError
from headwise.specs import GroupedSpec
from tests.conftest import TINY


def test_a_file_is_all_a_family_needs() -> None:
    assert family_names() == ["llama", "qwen2"]
    for name in family_names():
        assert family_of(name).model_type == name
        assert family_of(f"headwise_{name}") is family_of(name)


@pytest.mark.parametrize("name", ["gpt2", "base", "", "../llama", "headwise_", "headwise_headwise_llama", "None"])
def test_names_without_a_file(name: str) -> None:
    with pytest.raises(
        SpecError, match=r"^model_type = '.*': cannot be converted, or read from GGUF, yet; can: llama, qwen2$"
    ):
        family_of(name)


@pytest.mark.parametrize("kind", family_names())
def test_attention_is_found_and_whole(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for index, spec in enumerate(checkpoint.spec.layers):
        assert isinstance(spec, GroupedSpec)
        state = checkpoint.family.read_attention(checkpoint.read, index, spec)
        expected = model.model.layers[index].self_attn.state_dict()
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor)


@pytest.mark.parametrize("kind", family_names())
def test_every_gguf_name_is_a_name_of_the_model(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY))
    names = {name.rpartition(".")[0].replace("layers.0", "layers.{layer}") for name in model.state_dict()}
    assert set(family_of(kind).gguf_tensors.values()) == {name for name in names if "layers.1" not in name}


def test_a_projection_of_another_shape(tiny_llama_folder: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama_folder)
    spec = GroupedSpec(hidden_size=32, num_heads=4, num_kv_heads=4, head_dim=8)
    rule = r"k_proj.weight shape = \(16, 32\): must be \(32, 32\) by the config"
    with pytest.raises(CheckpointError, match=rule):
        checkpoint.family.read_attention(checkpoint.read, 0, spec)
