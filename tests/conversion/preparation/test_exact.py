"""A prepared model computes what its source does, and nothing of it but queries and keys is another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import headwise
from headwise.errors import HeadwiseError
from headwise.models.checkpoints import open_checkpoint
from tests.tiny_families import answer, save_family

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FROM_WEIGHTS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text")
FROM_A_TEXT = ("gpt_neox", "gpt2", "opt")
KEYS = ("k_proj", "k_norm", "qkv", "query_key", "c_attn")
CACHES = ("llama.cpp:q4_0", "llama.cpp:q8_0/q4_0")
TEXT = "The keys of a cache are rounded, and the text goes on. " * 40

pytestmark = pytest.mark.usefixtures("short_search")


def make(folder: Path, name: str, head_dim: int, **more: object) -> Path:
    sizes = {**SIZES, "hidden_size": 4 * head_dim, **more}
    if name in ("qwen3", "gemma3_text"):
        sizes["head_dim"] = head_dim
    if name == "opt":
        sizes["word_embed_proj_dim"] = 4 * head_dim
    save_family(folder, name, **sizes)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(7)
    for tensor, stored in tensors.items():  # keys whose channels are uneven, as those of real models are
        if any(part in tensor for part in KEYS):
            axis = 1 if "c_attn.weight" in tensor else 0
            uneven = 4.0 ** torch.randint(-1, 2, (stored.shape[axis],), generator=generator)
            tensors[tensor] = stored * (uneven if axis or stored.ndim == 1 else uneven[:, None])
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "head_dim", "cache"),
    [(name, 32, cache) for cache in CACHES for name in (*FROM_WEIGHTS, *FROM_A_TEXT)]
    + [(name, 64, CACHES[0]) for name in FROM_WEIGHTS],  # two blocks a head, which all formats have alike
)
def test_every_family(name: str, head_dim: int, cache: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", name, head_dim)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    calibrate = {"calibrate": text, "calibration_tokens": 256} if name in FROM_A_TEXT else {}
    made = headwise.prepare(source, tmp_path / "out", cache=cache, **calibrate)
    assert all(ratio <= 1.0 for layer in made.layers for ratio in layer.loss.values())
    assert min(ratio for layer in made.layers for ratio in layer.loss.values()) < 0.99
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    folders = source, tmp_path / "out"
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    before, after = (answer(model.eval(), ids) for model in models)
    # transformers computes Gemma's norms in float32, whatever the model's dtype.
    assert (before - after).abs().max() < (1e-5 if name == "gemma3_text" else 1e-9)
    old, new = map(open_checkpoint, folders)
    assert old.tensors == new.tensors
    for tensor in old.tensors:
        if not any(part in tensor for part in (*KEYS, "q_proj", "q_norm")):
            assert torch.equal(old.read(tensor), new.read(tensor)), tensor
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "out/config.json").read_text())


def test_bfloat16_rounds_nothing(tmp_path: Path) -> None:
    """The products of rows are those of the source, bit by bit: powers of two move no bit of a mantissa."""
    source = make(tmp_path / "source", "qwen2", 32)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    for file in source.glob("tokenizer*"):
        (tmp_path / "half" / file.name).write_bytes(file.read_bytes())
    headwise.prepare(tmp_path / "half", tmp_path / "out", cache="llama.cpp:q4_0")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "out"))
    moved = 0
    for name in (name for name in old if "k_proj" in name):
        ratio = new[name].double().abs().sort(0).values / old[name].double().abs().sort(0).values
        moved += int((new[name] != old[name]).any())
        mantissas = [torch.frexp(part[name].float())[0].abs().flatten().sort().values for part in (old, new)]
        assert torch.equal(*mantissas), (name, ratio)
    assert moved


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_weights_that_overflow_are_refused_by_their_layer(tmp_path: Path, projection: str) -> None:
    source = make(tmp_path / "source", "llama", 32)
    file = source / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if f".1.self_attn.{projection}.weight" in name)
    tensors[name] = tensors[name].clone()
    tensors[name][3, 2] = 3e38
    save_file(tensors, file, {"format": "pt"})
    what = {"q": "queries", "k": "keys", "v": "values"}[projection[0]]
    with pytest.raises(HeadwiseError, match=f"^{what} of layer 1 = .*: must be at most 1e\\+15 in size"):
        headwise.prepare(source, tmp_path / "out", cache="llama.cpp:q4_0")
    assert not (tmp_path / "out").exists()


def test_what_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    source = make(tmp_path / "source", "llama", 32)
    cases = {
        ("int4",): "must be an engine's own cache, such as llama.cpp:iq4_nl, mlx:",
        ("lama.cpp:q4_0",): "must be an engine's own cache",
        ("llama.cpp:f16",): "nothing to prepare",
        ("llama.cpp:q9",): "must be",
    }
    for cache, words in cases.items():
        with pytest.raises(HeadwiseError, match=words):
            headwise.prepare(source, tmp_path / "out", cache=list(cache))
    with pytest.raises(HeadwiseError, match="must not be the source"):
        headwise.prepare(source, source, cache="llama.cpp:q4_0", overwrite=True)
    text = make(tmp_path / "made", "llama", 32) / "text.txt"
    text.write_text("a text")
    with pytest.raises(HeadwiseError, match="must not be a text of evaluate, or a folder that holds it"):
        headwise.prepare(source, text.parent, cache="llama.cpp:q4_0", evaluate=text, overwrite=True)
    with pytest.raises(HeadwiseError, match=r"^for = 'llama.cpp:q4_0': has blocks of 32"):
        headwise.prepare(tiny_llama, tmp_path / "out", cache="llama.cpp:q4_0")
    with pytest.raises(HeadwiseError, match="calibrate"):
        headwise.prepare(make(tmp_path / "gpt2", "gpt2", 32), tmp_path / "out", cache="llama.cpp:q4_0")
    for name in ("bert", "whisper"):
        with pytest.raises(HeadwiseError, match="no decoder"):
            headwise.prepare(save_family(tmp_path / name, name), tmp_path / "out", cache="llama.cpp:q4_0")
    assert not (tmp_path / "out").exists()
    assert open_checkpoint(source).tensors
