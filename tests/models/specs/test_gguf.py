from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import cost
from headwise.errors import CheckpointError, SpecError
from headwise.models.specs import (
    BodySpec,
    FeedForwardSpec,
    GroupedSpec,
    ModelSpec,
    RopeSpec,
    gguf_config,
    read_gguf_header,
    read_spec,
)
from headwise.models.specs.sources import bundled_gguf

TENSORS = {
    "token_embd.weight": np.arange(5 * 64, dtype=np.float32).reshape(5, 64),
    "blk.0.attn_q.weight": np.ones((64, 64), dtype=np.float16),
    "output_norm.weight": np.full(64, 2.0, dtype=np.float32),
}
FIELDS: dict[str, Any] = {
    "embedding_length": 64,
    "block_count": 2,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "context_length": 512,
    "feed_forward_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
}


def write(
    path: Path, arch: str = "llama", *, tokens: int = 5, eos: int = 2, turn: int | None = None, **fields: Any
) -> Path:
    """A GGUF file by the gguf package's own writer; None leaves a field out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**FIELDS, **{key.replace("__", "."): value for key, value in fields.items()}}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    writer.add_token_list([f"tök{i}" for i in range(tokens)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(tokens)])
    writer.add_eos_token_id(eos)
    if turn is not None:
        writer.add_eot_token_id(turn)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for name, tensor in TENSORS.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_header_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    header = read_gguf_header(path)
    assert header.architecture == "llama"
    assert header.metadata["llama.embedding_length"] == 64
    assert header.metadata["llama.rope.freq_base"] == 5e5
    assert header.metadata["tokenizer.ggml.tokens"] == [f"tök{i}" for i in range(5)]
    assert header.metadata["tokenizer.ggml.scores"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    data = path.read_bytes()
    assert set(header.tensors) == set(TENSORS)
    for name, array in TENSORS.items():
        tensor = header.tensors[name]
        assert tensor.shape == array.shape
        assert tensor.ggml_type == {"float32": 0, "float16": 1}[array.dtype.name]
        assert data[tensor.offset :].startswith(array.tobytes())


@pytest.mark.parametrize("tokens", [1024, 1025, 3000])
def test_a_long_array_is_stepped_over_and_what_follows_is_found(tmp_path: Path, tokens: int) -> None:
    path = write(tmp_path / "a.gguf", tokens=tokens)
    header = read_gguf_header(path)
    kept = header.metadata["tokenizer.ggml.tokens"]
    assert (len(kept) if tokens <= 1024 else kept) == tokens
    assert header.metadata["tokenizer.ggml.eos_token_id"] == 2
    offset = header.tensors["output_norm.weight"].offset
    assert path.read_bytes()[offset:].startswith(TENSORS["output_norm.weight"].tobytes())


def test_the_spec_and_the_config(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    layer = GroupedSpec(
        hidden_size=64,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        rope=RopeSpec(dim=8, theta=5e5, max_position_embeddings=512),
    )
    assert replace(read_spec(path), stored=None) == ModelSpec(
        model_type="llama",
        hidden_size=64,
        layers=(layer,) * 2,
        vocab_size=5,
        max_position_embeddings=512,
        dtype="float32",
        body=BodySpec(
            vocab_size=5,
            feed_forward=(FeedForwardSpec(hidden_size=64, intermediate_size=128),) * 2,
            tied=True,
        ),
    )
    config = gguf_config(read_gguf_header(path))
    assert config["rms_norm_eps"] == 1e-5
    assert config["intermediate_size"] == 128
    assert config["eos_token_id"] == 2
    assert "bos_token_id" not in config
    assert config["tie_word_embeddings"]


@pytest.mark.parametrize(("turn", "expected"), [(3, [2, 3]), (2, 2), (2**32 - 1, 2)])
def test_the_end_of_a_turn_ends_a_text_too(turn: int, expected: int | list[int], tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", turn=turn)
    assert gguf_config(read_gguf_header(path))["eos_token_id"] == expected


def test_a_special_token_beyond_the_vocabulary_is_none(tmp_path: Path) -> None:
    """As llama.cpp takes it: -1, its word for none, is 4294967295 in a file."""
    for token, expected in ((4, 4), (5, None), (2**32 - 1, None)):
        path = write(tmp_path / "a.gguf", eos=token)
        assert gguf_config(read_gguf_header(path)).get("eos_token_id") == expected


def test_head_width_and_bias_by_architecture(tmp_path: Path) -> None:
    wide = read_spec(write(tmp_path / "a.gguf", "qwen3", attention__key_length=16, attention__value_length=16))
    assert isinstance(wide.layers[0], GroupedSpec)
    assert (wide.layers[0].head_dim, wide.layers[0].qk_norm) == (16, "head")
    assert read_spec(write(tmp_path / "b.gguf", "qwen2")).layers[0].bias == ("q_proj", "k_proj", "v_proj")
    assert read_spec(write(tmp_path / "c.gguf", attention__head_count_kv=None)).mechanism == "mha"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embedding_length": None}, "hidden_size = None: is required"),
        ({"attention__head_count": None}, "num_attention_heads = None: is required"),
        ({"block_count": None}, "num_hidden_layers = None: is required"),
        ({"block_count": 0}, "num_hidden_layers = 0: must be a whole number"),
        ({"attention__head_count": 7}, "num_attention_heads = 7: must divide"),
        ({"attention__head_count_kv": 3}, "num_kv_heads = 3: must divide"),
        ({"attention__head_count_kv": [2, 4]}, r"num_key_value_heads = \[2, 4\]: must be a whole number"),
        ({"attention__head_count": "8"}, "num_attention_heads = '8': must be a whole number"),
        ({"attention__value_length": 16}, "llama.attention.value_length = 16: must equal"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count = 4: must equal"),
        ({"rope__freq_base": "big"}, "llama.rope.freq_base = 'big': must be a number"),
        ({"rope__freq_base": 0.0}, "rope_theta = 0.0: must be a number"),
        ({"attention__layer_norm_rms_epsilon": "tiny"}, "llama.attention.layer_norm_rms_epsilon = 'tiny': must be a"),
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.type = 'yarn': is not understood"),
        ({"expert_count": 8}, "llama.expert_count = 8: is not understood"),
    ],
)
def test_metadata_that_cannot_be_right_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        read_spec(write(tmp_path / "a.gguf", **fields))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "mamba")
    with pytest.raises(SpecError, match=r"^general.architecture = 'mamba': is not understood"):
        read_spec(path)


@pytest.mark.parametrize("start", [b"", b"GGU", b"\x80\x02}q\x00", b"ggjt" * 100, b"PK\x03\x04"])
def test_a_file_that_is_not_gguf(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(start)
    with pytest.raises(CheckpointError, match=r"a\.gguf = 'not GGUF': the file must begin"):
        read_spec(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^file = '.*none\.gguf': could not be read: No such file"):
        read_gguf_header(tmp_path / "none.gguf")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"^file = '.*a\.gguf': could not be read: must be a regular file$"):
        read_spec(tmp_path / "a.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_another_version_of_gguf(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(CheckpointError, match=rf"^GGUF version = {version}: must be 2 or 3$"):
        read_gguf_header(path)


def header_end(data: bytes, path: Path) -> int:
    """Where the tensor table ends: after the last tensor's name, dims, type and offset."""
    name = max(TENSORS, key=lambda name: data.rfind(name.encode()))
    return data.rfind(name.encode()) + len(name) + 4 + 8 * TENSORS[name].ndim + 4 + 8


@pytest.mark.parametrize("tokens", [5, 1100])
def test_a_header_cut_short_anywhere_is_a_damaged_file(tmp_path: Path, tokens: int) -> None:
    data = write(tmp_path / "whole.gguf", tokens=tokens).read_bytes()
    end = header_end(data, tmp_path)
    path = tmp_path / "cut.gguf"
    for length in range(4, end, 1 if tokens < 100 else 97):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf = '\d+ bytes': the GGUF header is cut short"):
            read_gguf_header(path)
    path.write_bytes(data[:end])
    assert set(read_gguf_header(path).tensors) == set(TENSORS)


@pytest.mark.parametrize("item", [4, 8])
def test_a_long_array_at_the_end_of_the_header_is_missed_when_cut(tmp_path: Path, item: int) -> None:
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, item, 2000)
    whole = start + (bytes(8 * 2000) if item == 8 else bytes(4 * 2000))
    path = tmp_path / "a.gguf"
    path.write_bytes(whole)
    assert read_gguf_header(path).metadata == {"k": 2000}
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="the GGUF header is cut short"):
        read_gguf_header(path)


def test_arrays_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    path.write_bytes(start + struct.pack("<IQ", 9, 1) * 5000)
    with pytest.raises(CheckpointError, match="the GGUF header is cut short"):
        read_gguf_header(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_byte_is_read_or_refused_and_nothing_else(small: Path, data: st.DataObject) -> None:
    content = bytearray(small.read_bytes())
    end = header_end(bytes(content), small)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, end - 1))] = data.draw(st.integers(0, 255))
    path = small.with_name("damaged.gguf")
    path.write_bytes(content)
    # Not read_spec: a flipped layer count is a valid model, of four billion layers.
    with contextlib.suppress(CheckpointError, SpecError):
        gguf_config(read_gguf_header(path))


def test_the_bundled_model() -> None:
    model = read_spec("smollm2-135m")
    assert read_spec(bundled_gguf()) == model
    layer = GroupedSpec(
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope=RopeSpec(dim=64, theta=100000.0, max_position_embeddings=8192),
    )
    assert model.layers == (layer,) * 30
    assert (model.model_type, model.vocab_size) == ("llama", 49152)
    assert cost.parameters(layer) == 884736
    assert cost.model.cache_bytes_per_token(model) == 2 * 30 * 3 * 64 * 2 == 23040


def test_the_bundled_header_names_the_weights_the_spec_counts() -> None:
    header = read_gguf_header(bundled_gguf())
    names = [name for name in header.tensors if name.startswith("blk.0.attn_") and "norm" not in name]
    assert sum(int(np.prod(header.tensors[name].shape)) for name in names) == 884736
    reader = gguf.GGUFReader(bundled_gguf())
    assert {t.name: t.data_offset for t in reader.tensors} == {t.name: t.offset for t in header.tensors.values()}
