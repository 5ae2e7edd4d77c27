from __future__ import annotations

import logging
import math
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headwise
from headwise.errors import CheckpointError
from headwise.models.checkpoints import GgufCheckpoint, open_checkpoint
from headwise.models.specs import read_gguf_header
from headwise.models.specs.sources import bundled_gguf
from tests.closeness import assert_close
from tests.conftest import TINY
from tests.models.checkpoints.tiny_gguf import EPSILON, write_tiny_gguf


def theirs(path: Path) -> dict[str, torch.Tensor]:
    """The file as read by transformers."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_every_tensor_is_what_transformers_reads(tiny_llama_folder: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(tiny_llama_folder, path, kind)
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GgufCheckpoint)
    expected = theirs(path)
    assert set(checkpoint.tensors) == set(expected)
    original = open_checkpoint(tiny_llama_folder)
    for name, tensor in expected.items():
        read = checkpoint.read(name)
        assert (tuple(read.shape), read.dtype) == (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype)
        assert torch.equal(read.float(), tensor), name
        assert (read.float() - original.read(name)).abs().max() < 1e-3
    assert checkpoint.quantization == ("Q8_0" if kind == "Q8_0" else None)


def test_the_file_runs_and_converts_without_a_tokenizer(tiny_llama_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(tiny_llama_folder, path)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        logits = headwise.load(tiny_llama_folder)(ids).logits
        assert torch.equal(headwise.load(path)(ids).logits, logits)
        headwise.convert(path, tmp_path / "out", to="mha", evaluate=False)
        torch.testing.assert_close(headwise.load(tmp_path / "out")(ids).logits, logits)
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["README.md", "SHA256SUMS", "config.json", "model.safetensors"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_is_read_as_it_is(architecture: str, tmp_path: Path) -> None:
    """Their rows are in transformers' order; biases and norms of heads come along."""
    config = AutoConfig.for_model(architecture, **{**TINY, "rms_norm_eps": EPSILON, "rope_theta": 10000.0})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    model.save_pretrained(tmp_path / "folder")
    write_tiny_gguf(tmp_path / "folder", tmp_path / "tiny.gguf", architecture=architecture)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        assert_close(headwise.load(tmp_path / "tiny.gguf")(ids).logits, model(ids).logits, 1e-6)


def test_a_tensor_without_a_place(tiny_llama_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(tiny_llama_folder, path)
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_v", b"blk.0.attn_z"))
    with pytest.raises(CheckpointError, match=r"^GGUF tensor = 'blk.0.attn_z.weight': has no place in a llama model"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_no_numbers_are_named_and_blocks_are_not_decoded_for_it(
    kind: str, tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    write_tiny_gguf(tiny_llama_folder, path, kind)
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensors:
        checkpoint.check_numbers(name)
    stored = read_gguf_header(path).tensors["blk.1.ffn_up.weight"]
    whole = bytearray(path.read_bytes())
    no_number = struct.pack("<f" if kind == "F32" else "<e", math.nan)
    at = stored.offset + (34 if kind == "Q8_0" else 32)  # the second block's scale
    whole[at : at + len(no_number)] = no_number
    path.write_bytes(whole)
    if kind == "Q8_0":
        monkeypatch.setattr("headwise.models.checkpoints.gguf_reader._decoded", None)
    with pytest.raises(CheckpointError, match=r"^tensor = 'model.layers.1.mlp.up_proj.weight': holds "):
        open_checkpoint(path).check_numbers("model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("shape", [(32, 0), (0, 32), (32, 7), (0, 0)])
def test_a_tensor_of_another_shape_is_read_or_refused(
    shape: tuple[int, int], tiny_llama_folder: Path, tmp_path: Path
) -> None:
    """Rows that are no pairs of heads, and shapes with a 0, which the gguf package cannot decode."""
    for kind in ("F32", "Q8_0"):
        path = tmp_path / f"{kind}.gguf"
        write_tiny_gguf(tiny_llama_folder, path, kind)
        whole, name = path.read_bytes(), b"blk.0.attn_q.weight"
        at = whole.index(name) + len(name) + 4
        path.write_bytes(whole[:at] + struct.pack("<QQ", *shape) + whole[at + 16 :])
        checkpoint = open_checkpoint(path)
        name = "model.layers.0.self_attn.q_proj.weight"
        if 0 in shape:
            assert checkpoint.read(name).shape == shape[::-1]
        else:
            with pytest.raises(CheckpointError, match=r"q_proj.weight shape = \(7, 32\): must have pairs of rows"):
                checkpoint.read(name)


def test_the_real_file_as_transformers_reads_it() -> None:
    path = bundled_gguf()
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization == "Q4_1"
    expected = theirs(path)
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.17.self_attn.v_proj.weight",
        "model.layers.29.self_attn.o_proj.weight",
        "model.layers.29.mlp.down_proj.weight",
        "model.layers.29.input_layernorm.weight",
    ):
        assert torch.equal(checkpoint.read(name), expected[name]), name


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_some_rows_are_those_of_the_whole(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tiny_llama, tmp_path / "model.gguf", kind)
    rows = torch.tensor([5, 0, 5, 31, 2])
    for source in (tiny_llama, tmp_path / "model.gguf"):
        checkpoint = open_checkpoint(source)
        for name, info in checkpoint.tensors.items():
            if len(info.shape) == 2:
                kept = rows % info.shape[0]
                assert torch.equal(checkpoint.read_rows(name, kept), checkpoint.read(name)[kept]), name
