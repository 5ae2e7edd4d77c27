"""Folders with tensors too many or too few that stock transformers runs: they run the same, with a note."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import headwise
from headwise.cli.app import app
from headwise.cli.main import register_commands
from headwise.conversion import export_gguf
from headwise.errors import CheckpointError
from headwise.models.checkpoints import FolderWriter, family_of, open_checkpoint
from tests.byte_level import save_byte_level
from tests.closeness import assert_close
from tests.models.checkpoints.split_gguf import split
from tests.real_models import save_character_tokenizer, save_tiny, tiny_model
from tests.tiny_families import answer, save_family, tiny_family

INDEX = "model.safetensors.index.json"
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""DeepSeek-V3 and GLM-4.5, small."""


def stock(folder: Path, auto: str = "AutoModelForCausalLM", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What stock transformers computes."""
    return answer(getattr(transformers, auto).from_pretrained(folder, dtype=dtype).eval(), IDS)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop(folder: Path, *ends: str) -> None:
    """Take the tensors with these ends out of a folder's file."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def assert_runs(folder: Path, out: Path, note: str, auto: str = "AutoModelForCausalLM") -> None:
    """The folder, and what is converted from it, compute what stock transformers computes; a note says ``note``."""
    expected = stock(folder, auto)
    assert_close(answer(headwise.load(folder), IDS), expected, 1e-12)
    report = headwise.convert(folder, out, to="mha", evaluate=False)
    assert_close(stock(out, auto), expected, 1e-12)
    assert [own for own in report.notes if note in own] == list(open_checkpoint(folder).notes)
    assert len(open_checkpoint(folder).notes) == 1
    assert open_checkpoint(out).notes == ()


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tied model in several files."""
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 3
    return tmp_path / "sharded"


def edit_index(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["ghost", "lm_head.weight", "model.layers.2.self_attn.q_proj.weight"])
def test_an_index_that_names_a_tensor_no_file_has(name: str, sharded: Path, tmp_path: Path) -> None:
    edit_index(sharded, lambda named: {name: named["model.norm.weight"]})
    assert_runs(sharded, tmp_path / "out", f"names tensors that no file has, such as {name} (1 in all)")


def test_a_tensor_in_another_file_than_the_index_says(sharded: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_index(sharded, lambda named: {name: next(file for file in named.values() if file != named[name])})
    assert torch.equal(answer(headwise.load(sharded), IDS), stock(sharded))
    assert open_checkpoint(sharded).notes == ()


def test_a_tensor_that_the_model_needs_is_missing_all_the_same(sharded: Path) -> None:
    name = "model.norm.weight"
    file = sharded / json.loads((sharded / INDEX).read_text())["weight_map"][name]
    save_file({own: t for own, t in load_file(file).items() if own != name}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"^tensor = '{name}': is missing from"):
        headwise.load(sharded)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "opt", "bert", "whisper"])
def test_layers_beyond_those_of_the_config(name: str, tmp_path: Path) -> None:
    extra = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3_text" else {}
    field = {"gpt2": "n_layer", "whisper": "decoder_layers"}.get(name, "num_hidden_layers")
    folder = save_family(tmp_path / "source", name)
    edit_config(folder, **{field: 2 if name == "gemma3_text" else 1}, **extra)
    assert_runs(folder, tmp_path / "out", "are not read, such as ", family_of(name).autos[0])


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("deepseek_v3", {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                         "v_head_dim": 8}),
        ("glm4_moe", {"head_dim": 8}),
    ],
)  # fmt: skip
def test_layers_that_predict_several_tokens(model_type: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(model_type, **TINY, **sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last = {
        name.replace(".2.", ".3.", 1): t.clone() for name, t in tensors.items() if name.startswith("model.layers.2.")
    }
    last |= {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.enorm.weight": torch.ones(32)}
    last["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | last, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert torch.equal(answer(headwise.load(tmp_path), IDS), stock(tmp_path, dtype=torch.float32))
    assert headwise.inspect(tmp_path).weights is not None


@pytest.mark.parametrize(
    ("name", "fields", "ends"),
    [
        ("llama", {"attention_bias": True}, ("o_proj.bias",)),
        ("llama", {"attention_bias": True}, ("_proj.bias",)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, ("o_proj.bias", "1.mlp.up_proj.bias")),
        ("llama", {"mlp_bias": True}, ("mlp.gate_proj.bias",)),
        ("qwen3", {"attention_bias": True}, ("o_proj.bias",)),
        ("gemma3_text", {"attention_bias": True}, ("o_proj.bias",)),
    ],
)
def test_biases_that_are_missing_are_zeros(
    name: str, fields: dict[str, Any], ends: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save_family(tmp_path / "source", name, **fields)
    drop(folder, *ends)
    assert_runs(folder, tmp_path / "out", "are missing and taken as zeros, such as ")


def test_missing_biases_of_a_conversion(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "source", "llama", attention_bias=True)
    drop(folder, "o_proj.bias")
    headwise.convert(folder, tmp_path / "mla", to="mla", kv_budget=1.0, evaluate=False)
    assert_close(answer(headwise.load(tmp_path / "mla"), IDS), stock(folder), 1e-10)


@pytest.mark.parametrize(("name", "end"), [("qwen2", "k_proj.bias"), ("gpt2", "c_proj.bias"), ("opt", "fc1.bias")])
def test_biases_that_every_model_of_a_family_has_are_required(name: str, end: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "source", name)
    drop(folder, end)
    with pytest.raises(CheckpointError, match=rf"{end}': is missing from"):
        headwise.load(folder)


def test_a_gguf_without_the_bias_of_the_output(tmp_path: Path) -> None:
    """As llama.cpp writes a Llama with biases on queries, keys and values alone."""
    folder = tmp_path / "source"
    tiny_model("llama", attention_bias=True).float().save_pretrained(folder)
    export_gguf(folder, tmp_path / "whole.gguf")
    (file,) = split(tmp_path / "whole.gguf", tmp_path / "parts", 100, without=("attn_output.bias",))
    drop(folder, "o_proj.bias")
    assert_close(answer(headwise.load(file), IDS), stock(folder).float(), 1e-5)
    assert open_checkpoint(file).notes == open_checkpoint(folder).notes


@pytest.mark.parametrize("kind", ["pad", "bos", "eos"])
def test_a_special_token_of_minus_1_is_none_in_gguf(kind: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "source", vocab_size=400)
    save_byte_level(folder, 400)
    edit_config(folder, **{f"{kind}_token_id": -1})
    export_gguf(folder, tmp_path / "model.gguf")
    assert_close(answer(headwise.load(tmp_path / "model.gguf"), IDS), stock(folder).float(), 1e-5)
    told = json.loads((folder / "tokenizer_config.json").read_text()).get(f"{kind}_token")
    id_in_file = open_checkpoint(tmp_path / "model.gguf").config.get(f"{kind}_token_id")
    assert id_in_file == (
        None if told is None else transformers.AutoTokenizer.from_pretrained(folder).get_vocab()[told]
    )


def test_export_prints_the_note(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "source", vocab_size=400, attention_bias=True)
    save_byte_level(folder, 400)
    drop(folder, "o_proj.bias")
    register_commands()
    result = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "model.gguf")])
    (note,) = open_checkpoint(folder).notes
    assert f"note: {note}" in " ".join(result.stdout.split())


def test_a_field_with_an_underscore_is_kept(tmp_path: Path) -> None:
    source = save_family(tmp_path / "opt", "opt", _remove_final_layer_norm=True)
    edit_config(source, _name_or_path="/home/somebody/opt", _commit_hash="0123abcd")
    expected = stock(source)
    headwise.convert(source, tmp_path / "out", to="mha", evaluate=False)
    assert_close(stock(tmp_path / "out"), expected, 1e-12)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [key for key in written if key.startswith("_")] == ["_remove_final_layer_norm"]


def test_all_chat_templates_are_kept(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    (source / "additional_chat_templates" / "linked.jinja").symlink_to("/etc/hostname")
    headwise.convert(source, tmp_path / "out", to="mha", evaluate=False)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert found == tokenizer.chat_template


def test_an_index_counts_the_bytes_of_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path / "source"))
    with FolderWriter(tmp_path / "out", checkpoint.tensors, shard_bytes=20_000) as writer:
        for name in checkpoint.tensors:
            writer.add(name, checkpoint.read(name))
        writer.write_json("config.json", checkpoint.config)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    tensors = [tensor for file in (tmp_path / "out").glob("*.safetensors") for tensor in load_file(file).values()]
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)


def test_heads_of_other_tasks_are_left_out(tmp_path: Path) -> None:
    """As in the published bert-base-uncased, and beside a model trained with a value head."""
    source = tmp_path / "bert"
    torch.manual_seed(0)
    transformers.BertForPreTraining(tiny_family("bert").config).double().save_pretrained(source)
    save_character_tokenizer(source, 97)
    edit_config(source, architectures=["BertForMaskedLM"])
    expected = stock(source, "AutoModelForMaskedLM")
    assert_close(answer(headwise.load(source), IDS), expected, 1e-12)
    report = headwise.convert(source, tmp_path / "out", to="mla", kv_budget=1.0, evaluate=False)
    assert_close(answer(headwise.load(tmp_path / "out"), IDS), expected, 1e-10)
    assert any(note.startswith("tensors without a place in the model are not read") for note in report.notes)
    valued = save_tiny(tmp_path / "llama")
    tensors = load_file(valued / "model.safetensors")
    save_file(tensors | {"v_head.summary.weight": torch.ones(1, 32)}, valued / "model.safetensors")
    expected = stock(valued)
    assert_close(answer(headwise.load(valued), IDS), expected, 1e-12)
    report = headwise.convert(valued, tmp_path / "mha", to="mha", evaluate=False)
    assert_close(stock(tmp_path / "mha"), expected, 1e-12)
    assert any("such as v_head.summary.weight" in note for note in report.notes)
