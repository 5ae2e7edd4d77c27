"""A head that is stored beside tied embeddings, and differs: transformers computes with it, and so does all else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headwise
from headwise.conversion import export_gguf
from headwise.costs.formulas import model as cost
from headwise.models.checkpoints import family_of, open_checkpoint
from headwise.models.specs import read_spec
from tests.byte_level import save_byte_level
from tests.closeness import assert_close
from tests.conversion.test_resumed import TEXT
from tests.real_models import save_tiny
from tests.tiny_families import FAMILIES, answer, save_family, tiny_family

HEADS = {"gpt_neox": "embed_out.weight", "whisper": "proj_out.weight"}
"""Names of heads in files, where they are not ``lm_head.weight``."""
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
TIED = {"tie_word_embeddings": True}


def add_head(folder: Path, head: torch.Tensor | None = None, *, name: str = "lm_head.weight") -> torch.Tensor:
    """Store a head, a random one unless given, in a folder that has none."""
    tensors = load_file(folder / "model.safetensors")
    assert name not in tensors
    embedding = next(tensor for own, tensor in tensors.items() if own.endswith(("embed_tokens.weight", "wte.weight")))
    head = torch.randn(embedding.shape, dtype=embedding.dtype) / 7 if head is None else head
    save_file(tensors | {name: head}, folder / "model.safetensors", metadata={"format": "pt"})
    return head


def says_tied(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", True)


def stock(folder: Path, auto: str = "AutoModelForCausalLM") -> torch.Tensor:
    """What stock transformers computes."""
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = getattr(transformers, auto).from_pretrained(folder, **options).eval()
    return answer(model, IDS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save_tiny(tmp_path / "source", vocab_size=400, **TIED)
    save_byte_level(folder, 400)
    add_head(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bert"])
def test_every_family_keeps_it(name: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "source", name, **TIED)
    if name == "gpt_neox":
        tensors = load_file(folder / "model.safetensors")
        head = torch.randn_like(tensors["gpt_neox.embed_in.weight"]) / 7
        save_file(tensors | {HEADS[name]: head}, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        add_head(folder, name=HEADS.get(name, "lm_head.weight"))
    expected = stock(folder, family_of(name).autos[0])
    assert torch.equal(answer(headwise.load(folder), IDS), expected)
    report = headwise.convert(folder, tmp_path / "mha", to="mha", evaluate=False)
    assert not says_tied(tmp_path / "mha")
    assert_close(answer(headwise.load(tmp_path / "mha"), IDS), expected, 1e-5 if name == "olmo2" else 1e-12)
    assert "tie_word_embeddings is taken as false" in " ".join(report.notes)
    assert report.parameters_before == sum(t.numel() for t in load_file(folder / "model.safetensors").values())


def test_an_encoder_with_a_masked_head_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    config = tiny_family("bert").config
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).double().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    embedding, bias = (
        tensors[f"{name}"] for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
    )
    tensors["cls.predictions.decoder.weight"] = torch.randn_like(embedding) / 7
    tensors["cls.predictions.decoder.bias"] = torch.randn_like(bias)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = stock(folder, "AutoModelForMaskedLM")
    headwise.convert(folder, tmp_path / "gqa", to="mha", evaluate=False)
    assert_close(answer(headwise.load(tmp_path / "gqa"), IDS), expected, 1e-12)


LATENT = {"to": "mla", "kv_lora_rank": 16, "qk_rope_head_dim": 4}
WRITERS: dict[str, dict[str, Any]] = {
    "gqa": {"to": "gqa:1"},
    "mla": LATENT,
    "deepseek": {**LATENT, "format": "deepseek"},
    "deepseek, wider": {**LATENT, "format": "deepseek", "pad_to": "32+8"},
    "deepseek-longrope": {**LATENT, "format": "deepseek-longrope"},
    "gguf": {"to": "mha", "format": "gguf"},
    "gguf, mla": {**LATENT, "format": "gguf"},
    "codes": {"to": "mla", "kv_bytes": 0.5},
    "codes, same": {"to": "same", "kv_bytes": 0.5},
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_keeps_it(name: str, source: Path, text: Path, tmp_path: Path) -> None:
    options = WRITERS[name]
    if "kv_bytes" in options or name == "gguf, mla":
        options = {**options, "calibrate": text, "calibration_tokens": 512, "calibration_window": 64}
    headwise.convert(source, tmp_path / "out", **options, evaluate=False)
    head, kept = open_checkpoint(source).read("lm_head.weight"), headwise.load(tmp_path / "out").lm_head.weight
    assert torch.equal(kept, head.to(kept.dtype))
    assert read_spec(tmp_path / "out").body.tied is False  # type: ignore[union-attr]


def test_healing_and_export_keep_it(source: Path, text: Path, tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "half", to="mla", kv_budget=0.5, evaluate=False)
    report = headwise.heal(
        source,
        tmp_path / "healed",
        teacher=tmp_path / "half",
        text=text,
        steps=2,
        window=16,
        train="attention",
        evaluate=False,
    )
    head = open_checkpoint(source).read("lm_head.weight")
    assert not says_tied(tmp_path / "healed")
    assert torch.equal(headwise.load(tmp_path / "healed").lm_head.weight, head)
    assert "tie_word_embeddings is taken as false" in " ".join(report.notes)
    export_gguf(source, tmp_path / "model.gguf")
    assert_close(answer(headwise.load(tmp_path / "model.gguf"), IDS), stock(source).float(), 1e-5)


def test_its_weights_are_counted(source: Path) -> None:
    stored = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    assert cost.weights(read_spec(source)).total == stored
    (source / "model.safetensors").unlink()
    assert cost.weights(read_spec(source)).total == stored - 400 * 48  # as the config says


def test_in_shards_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    untied = tiny_family("llama")
    untied.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    config = json.loads((tmp_path / "source/config.json").read_text())
    (tmp_path / "source/config.json").write_text(json.dumps(config | TIED))
    headwise.convert(tmp_path / "source", tmp_path / "out", to="mha", evaluate=False)
    assert_close(answer(headwise.load(tmp_path / "out"), IDS), stock(tmp_path / "source"), 1e-12)


def test_an_equal_head_stays_tied(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "source", **TIED)
    add_head(folder, open_checkpoint(folder).read("model.embed_tokens.weight").clone())
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.config["tie_word_embeddings"], checkpoint.notes) == (True, ())
    headwise.convert(folder, tmp_path / "out", to="mha", evaluate=False)
    assert says_tied(tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    assert_close(answer(headwise.load(tmp_path / "out"), IDS), stock(folder), 1e-12)


@pytest.mark.parametrize("inner", [True, False, None])
def test_the_text_part_of_a_larger_model(inner: bool | None, tmp_path: Path) -> None:
    """The whole's config decides, and a head that is stored and differs decides over both."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "sliding_window": 8,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    whole = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **TIED)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(whole)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"].pop("tie_word_embeddings", None)
    config["text_config"] |= {} if inner is None else {"tie_word_embeddings": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tied = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert cost.weights(read_spec(tmp_path)).head == 0
    add_head(tmp_path)
    own = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert own.lm_head.weight is not own.get_input_embeddings().weight
    assert cost.weights(read_spec(tmp_path)).head == own.lm_head.weight.numel()


DAMAGED: dict[str, Any] = {
    "no header": b"",
    "a long header": (10**15).to_bytes(8, "little") + b"{}",
    "no JSON": (2).to_bytes(8, "little") + b"{[",
    "no tensors": (4).to_bytes(8, "little") + b"[[]]",
    "no places": (30).to_bytes(8, "little") + b'{"lm_head.weight":{"dtype":1}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights_say_nothing_of_the_config(content: bytes, source: Path) -> None:
    (source / "model.safetensors").write_bytes(content)
    body = read_spec(source).body
    assert body is not None
    assert body.tied


def test_an_index_leads_nowhere_else(source: Path, tmp_path: Path) -> None:
    moved = (source / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    names = dict.fromkeys(load_file(moved), "../elsewhere.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    body = read_spec(source).body
    assert body is not None
    assert body.tied
