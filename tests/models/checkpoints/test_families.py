from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import headwise
from headwise.errors import CheckpointError, SpecError
from headwise.models.checkpoints import family_names, family_of, open_checkpoint
from headwise.models.families.base import canonical_shapes
from headwise.models.specs import GroupedSpec
from tests.closeness import assert_close
from tests.conftest import TINY
from tests.tiny_families import FAMILIES, answer, save_family, tiny_family

WITH_GGUF = [name for name in FAMILIES if family_of(name).gguf_tensors]


def test_a_file_is_all_a_family_needs() -> None:
    assert {"llama", "qwen2", "gpt2", "bert", "whisper"} <= set(family_names())
    for name in family_names():
        assert family_of(name).model_type == name
        assert family_of(f"headwise_{name}") is family_of(name)


@pytest.mark.parametrize("name", ["falcon", "base", "", "../llama", "headwise_", "headwise_headwise_llama", "None"])
def test_names_without_a_file(name: str) -> None:
    names = re.escape(", ".join(family_names()))
    with pytest.raises(
        SpecError, match=rf"^model_type = '.*': cannot be converted, or read from GGUF, yet; can: {names}$"
    ):
        family_of(name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_place_is_a_module_of_the_model(kind: str) -> None:
    model, family = tiny_family(kind), family_of(kind)
    root = model if hasattr(model, family.base[:-1]) else model.base_model
    names = family if root is model and model.base_model is not model else family.bare()
    assert "Layer" in type(root.get_submodule(names.layer.format(layer=1))).__name__ or kind == "gpt2"
    assert "Attention" in type(root.get_submodule(names.place(1))).__name__
    assert names.place(1).startswith(names.layer.format(layer=1))


@pytest.mark.parametrize("kind", FAMILIES)
def test_reading_and_writing_attention_are_inverses(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_family(tmp_path / "model", kind))
    family = checkpoint.family
    places = [(spec, cross) for cross in (False, True) for spec in _layers(checkpoint, cross=cross)]
    written: set[str] = set()
    for index, (spec, cross) in enumerate(places):
        layer = index % checkpoint.spec.num_layers
        state = family.read_attention(checkpoint.read, layer, spec, cross=cross)
        assert state["q_proj.weight"].shape == (spec.num_heads * spec.head_dim, spec.hidden_size)
        stored = family.write_attention(state, layer, spec, cross=cross)
        assert {name: tuple(t.shape) for name, t in stored.items()} == family.stored_shapes(layer, spec, cross=cross)
        for name, tensor in stored.items():
            # Offsets of norms are added and taken away in float64, which these weights fill.
            assert_close(tensor, checkpoint.read(name), 1e-15 if family.gguf_norm_offset and "norm" in name else 0)
        written |= set(stored)
    # Nothing of the attention is left behind; BERT's module has the norm that follows it, too.
    inside = {name for name in checkpoint.tensors if re.search(r"attn\.|attention\.", name)}
    inside -= {name for name in inside if "encoder.layers" in name or "vision_tower" in name or "LayerNorm" in name}
    assert written == inside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_stored_as_offsets_come_back_to_the_bit(dtype: torch.dtype) -> None:
    family = family_of("gemma3_text")
    spec = GroupedSpec(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, qk_norm="head")
    stored = {
        f"{family.place(0)}.{name}": torch.randn(shape).to(dtype) * 1e-2
        for name, shape in canonical_shapes(spec).items()
    }
    state = family.read_attention(stored.__getitem__, 0, spec)
    stored_norm = stored["model.layers.0.self_attn.k_norm.weight"]
    assert torch.equal(state["k_norm.weight"], 1 + stored_norm.double())
    for name, tensor in family.write_attention(state, 0, spec).items():
        assert torch.equal(tensor.to(dtype), stored[name])


def _layers(checkpoint: Any, *, cross: bool) -> list[GroupedSpec]:
    return list(checkpoint.spec.cross_layers if cross else checkpoint.spec.layers)


@torch.inference_mode()
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_read_is_what_transformers_computes_with(kind: str, tmp_path: Path) -> None:
    """The output of the model's own module, seen by a hook, is that of a layer with the tensors read."""
    model = tiny_family(kind)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = checkpoint.spec.layers[0]
    assert isinstance(spec, GroupedSpec)
    state = checkpoint.family.read_attention(checkpoint.read, 0, spec)
    layer = headwise.GroupedQueryAttention(
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        head_dim=spec.head_dim,
        bias=spec.bias,
        softmax_scale=spec.softmax_scale,
    ).double()
    layer.load_state_dict({name: t for name, t in state.items() if "norm" not in name})
    calls: dict[str, torch.Tensor] = {}
    root = model if checkpoint.family.layer.startswith(family_of(kind).base) else model.base_model
    module = root.get_submodule(checkpoint.family.place(0, hosted=True))
    module.register_forward_hook(
        lambda _, args, kwargs, out: calls.update(input=args[0] if args else kwargs["hidden_states"], output=out[0]),
        with_kwargs=True,
    )
    # One token attends to itself: neither position nor score matters, only values and the output projection.
    answer(model, torch.tensor([[5]]))
    out = layer(calls["input"])
    if kind == "bert":  # whose module ends before the output projection
        calls["output"] = torch.nn.functional.linear(calls["output"], state["o_proj.weight"], state["o_proj.bias"])
    assert_close(out, calls["output"], 1e-12)


@pytest.mark.parametrize("kind", WITH_GGUF)
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


def test_a_fused_projection_of_another_shape(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_family(tmp_path / "model", "phi3"))
    spec = GroupedSpec(hidden_size=48, num_heads=6, num_kv_heads=6, head_dim=8)
    rule = r"qkv_proj.weight shape = \(96, 48\): must be \(144, 48\) by the config"
    with pytest.raises(CheckpointError, match=rule):
        checkpoint.family.read_attention(checkpoint.read, 0, spec)


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


OLD_FOLDERS: dict[str, Any] = {
    "gpt2": lambda tensors: {
        **{name.removeprefix("transformer."): t for name, t in tensors.items()},
        **{f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in (0, 1)},
    },
    "gpt_neox": lambda tensors: {
        **tensors,
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril(),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
    },
    "bert": lambda tensors: {**tensors, "embeddings.position_ids": torch.arange(64)[None]},
}


@pytest.mark.parametrize("kind", OLD_FOLDERS)
@pytest.mark.parametrize("to", ["mqa", "mla"])
def test_folders_that_old_releases_saved(kind: str, to: str, tmp_path: Path) -> None:
    """Names without the model's prefix; masks, frequencies and positions saved as if they were weights."""
    save_family(tmp_path / "new", kind)
    save_family(tmp_path / "old", kind)
    rewrite(tmp_path / "old", OLD_FOLDERS[kind])
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(4))
    # Tensors that lie elsewhere in their file may round otherwise.
    assert_close(answer(headwise.load(tmp_path / "old"), ids), answer(headwise.load(tmp_path / "new"), ids), 1e-12)
    options = {"kv_budget": 1.0} if to == "mla" else {}
    for name in ("old", "new"):
        headwise.convert(tmp_path / name, tmp_path / f"{name}-out", to=to, **options, evaluate=False)
    old, new = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("old", "new"))
    assert old.keys() == new.keys()
    for name in new:
        assert_close(old[name], new[name], 1e-9)


EXPERTS: dict[str, Any] = {
    "lacks matrices of its experts: 7 are stored": lambda tensors, last: tensors.pop(last),
    "is made of experts that differ in shape or dtype": lambda tensors, last: tensors.update(
        {last: tensors[last].float()}
    ),
}


@pytest.mark.parametrize("rule", EXPERTS)
def test_experts_that_make_no_whole(rule: str, tmp_path: Path) -> None:
    folder, last = save_family(tmp_path / "model", "mixtral"), "model.layers.1.block_sparse_moe.experts.3.w1.weight"

    def change(tensors: Any) -> Any:
        EXPERTS[rule](tensors, last)
        return tensors

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=rf"^tensor = 'model.layers.1.mlp.experts.gate_up_proj': {rule}"):
        open_checkpoint(folder)


def test_an_encoder_with_a_head_keeps_it(tmp_path: Path) -> None:
    """A masked-language model's names begin with ``bert.``, and its head comes along."""
    from transformers import BertForMaskedLM

    from headwise.runtime.hf import model_class

    model = BertForMaskedLM(tiny_family("bert").config).double().eval()
    model.save_pretrained(tmp_path / "source")
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(5))
    headwise.convert(tmp_path / "source", tmp_path / "mla", to="mla", kv_budget=1.0, evaluate=False)
    converted = headwise.load(tmp_path / "mla")
    assert type(converted).__name__ == "HeadwiseBertForMaskedLM"
    assert model_class(converted.config.to_dict() | {"architectures": ["BertForMaskedLM"]}) is type(converted)
    with torch.inference_mode():
        assert_close(converted(ids).logits, model(ids).logits, 1e-9)


def test_a_head_nobody_listed_is_refused(tmp_path: Path) -> None:
    from transformers import BertForNextSentencePrediction

    BertForNextSentencePrediction(tiny_family("bert").config).save_pretrained(tmp_path / "source")
    with pytest.raises(
        CheckpointError, match=r"^architectures = 'BertForNextSentencePrediction': must be one of BertModel, Bert"
    ):
        headwise.convert(tmp_path / "source", tmp_path / "out", to="mqa")
