"""A GGUF file is prepared in place: the scales of query and key rows change, and no other byte."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

import headwise
from headwise.conversion.preparation.stored import GgufLayers
from headwise.errors import CheckpointError, HeadwiseError
from headwise.models.checkpoints import open_checkpoint
from headwise.models.checkpoints.gguf_in_place import Rows
from headwise.models.specs import read_gguf_header
from headwise.models.specs.gguf_header import TYPES
from tests.models.checkpoints.split_gguf import split

NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
FLOATS = ("F32", "F16", "BF16")
BLOCKS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
)  # fmt: skip
E, H, K, D = 256, 4, 2, 64

pytestmark = pytest.mark.usefixtures("short_search")


def random_rows(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a matrix: any codes, and scales that are float16 numbers of about the usual size."""
    if kind in FLOATS:
        values = (rng.standard_normal((rows, columns)) / 16).astype("<f4")
        values *= 2.0 ** rng.integers(-2, 3, (rows, 1))
        stored: np.ndarray = {
            "F32": values, "F16": values.astype("<f2"), "BF16": (values.view("<u4") >> 16).astype("<u2")
        }[kind]  # fmt: skip
        return stored.view(np.uint8).reshape(rows, -1).copy()
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    blocks = raw.reshape(rows, -1, size)
    offsets = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
               "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}.get(kind, (0,))  # fmt: skip
    for offset in offsets:
        scales = (0.01 * 2.0 ** rng.uniform(-1, 1, blocks.shape[:2])).astype("<f2")
        blocks[:, :, offset : offset + 2] = scales[:, :, None].view(np.uint8)
    return raw


def values_of(raw: np.ndarray, kind: str) -> np.ndarray:
    number = GGMLQuantizationType[kind]
    seen = raw.view({"F32": "<f4", "F16": "<f2"}.get(kind, np.uint8))
    return dequantize(seen, number).astype(np.float64)


@pytest.mark.parametrize("kind", [*FLOATS, *BLOCKS])
def test_rows_are_multiplied_and_exchanged(kind: str) -> None:
    """Every type that the gguf package decodes, by what it decodes."""
    rng = np.random.default_rng(3)
    raw = random_rows(kind, 8, 512, rng)
    before = values_of(raw, kind)
    exponents, order = rng.integers(-3, 9, 8), rng.permutation(8)
    signs = rng.choice([-1, 1], 8)
    changed = raw.copy()
    rows = Rows(changed, NUMBERS[kind], (8, 512))
    rows.take(order, signs)
    rows.multiply(2.0**exponents)
    wanted = before[order] * signs[:, None] * 2.0 ** exponents[:, None]
    allowed = 2.0**-25 if kind == "F16" else 0.0  # numbers near zero, which are rounded
    assert np.abs(values_of(changed, kind) - wanted).max() <= allowed


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4", "IQ1_M"])
def test_types_without_such_scales_are_refused_by_name(kind: str) -> None:
    _, _, size = TYPES[NUMBERS[kind]]
    with pytest.raises(CheckpointError, match=kind):
        Rows(np.zeros((2, size), np.uint8), NUMBERS[kind], (2, TYPES[NUMBERS[kind]][1]))


def write_model(path: Path, kind: str, architecture: str = "qwen2", *, seed: int = 0) -> None:
    """A model of random codes: two layers of 4 query heads and 2 key–value heads of 64 channels."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(E)
    writer.add_feed_forward_length(512)
    writer.add_head_count(H)
    writer.add_head_count_kv(K)
    writer.add_key_length(D)
    writer.add_value_length(D)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(96)

    def matrix(name: str, rows: int, columns: int) -> None:
        raw = random_rows(kind, rows, columns, rng)
        if kind in ("F32", "F16"):
            writer.add_tensor(name, raw.view({"F32": np.float32, "F16": np.float16}[kind]))
        else:
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])

    def vector(name: str, size: int, around: float) -> None:
        writer.add_tensor(name, (around + 0.3 * rng.standard_normal(size)).astype(np.float32))

    matrix("token_embd.weight", 96, E)
    vector("output_norm.weight", E, 1)
    for layer in range(2):
        place = f"blk.{layer}."
        vector(f"{place}attn_norm.weight", E, 1)
        vector(f"{place}ffn_norm.weight", E, 1)
        for name, heads in (("q", H), ("k", K), ("v", K)):
            matrix(f"{place}attn_{name}.weight", heads * D, E)
            if architecture == "qwen2":
                vector(f"{place}attn_{name}.bias", heads * D, 0)
            if architecture == "qwen3" and name != "v":
                uneven = (4.0 ** rng.integers(-1, 2, D)).astype(np.float32)
                writer.add_tensor(f"{place}attn_{name}_norm.weight", uneven)
        matrix(f"{place}attn_output.weight", E, H * D)
        for name in ("gate", "up"):
            matrix(f"{place}ffn_{name}.weight", 512, E)
        matrix(f"{place}ffn_down.weight", E, 512)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def scores(path: Path, index: int) -> torch.Tensor:
    """The products of queries and keys of a layer for random inputs, each at a position of its own, in float64."""
    checkpoint = open_checkpoint(path)
    layer: Any = checkpoint.spec.layers[index]
    state = checkpoint.family.read_attention(checkpoint.read, index, layer)
    inputs = torch.randn(5, E, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sides = []
    for side, heads in (("q", H), ("k", K)):
        states = inputs @ state[f"{side}_proj.weight"].double().T + state.get(f"{side}_proj.bias", torch.zeros(1))
        states = states.unflatten(-1, (heads, D)).transpose(0, 1)
        if (norm := state.get(f"{side}_norm.weight")) is not None:
            states = states / states.square().mean(-1, keepdim=True).sqrt() * norm.double()
        turned = torch.view_as_complex(torch.stack(states.chunk(2, -1), -1))
        angles = torch.arange(5)[:, None] * 1e4 ** (-torch.arange(0, D, 2) / D)
        sides.append(turned * torch.polar(torch.ones_like(angles), angles))
    queries, keys = sides[0], sides[1].repeat_interleave(H // K, 0)
    return (queries[:, :, None] * keys[:, None].conj()).sum(-1).real


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *((kind, "llama") for kind in ("F32", "BF16", "Q4_0", "Q6_K", "IQ2_S")),  # whose rows are interleaved
        *((kind, "qwen2") for kind in ("F32", "F16", "Q8_0", "Q4_K", "IQ4_XS")),
        ("Q4_K", "qwen3"),  # whose norms alone are changed, float32 in every file
    ],
)
def test_scores_stay_and_all_other_bytes_do(kind: str, architecture: str, tmp_path: Path) -> None:
    source, out = tmp_path / "model.gguf", tmp_path / "out.gguf"
    write_model(source, kind, architecture)
    made = headwise.prepare(source, out, cache="llama.cpp:q4_0")
    assert made.output == str(out)
    assert max(layer.loss["llama.cpp:q4_0"] for layer in made.layers) <= 1.0
    for index in range(2):
        before, after = scores(source, index), scores(out, index)
        # What float16 rounds the scales of a row by, where a power of two makes them too small for it.
        allowed = 1e-12 if kind in ("F32", "BF16") else 2.0**-10
        assert (before - after).norm() <= allowed * before.norm()
    old, new = source.read_bytes(), out.read_bytes()
    assert len(old) == len(new)
    kept = bytearray(old)
    parts = ("attn_q_norm", "attn_k_norm") if architecture == "qwen3" else ("attn_q.", "attn_k.")
    for tensor in gguf.GGUFReader(source).tensors:
        if any(part in tensor.name for part in parts):
            start = int(tensor.data_offset)
            kept[start : start + tensor.n_bytes] = new[start : start + tensor.n_bytes]
    assert bytes(kept) == new


def test_a_split_model(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    write_model(source, "Q8_0")
    parts = split(source, tmp_path / "parts", 9)
    made = headwise.prepare(parts[1], tmp_path / "out.gguf", cache="llama.cpp:q4_0")
    headwise.prepare(source, tmp_path / "whole.gguf", cache="llama.cpp:q4_0")
    assert made.output == str(tmp_path / f"out-00001-of-0000{len(parts)}.gguf")
    whole, joined = open_checkpoint(tmp_path / "whole.gguf"), open_checkpoint(made.output)
    assert len(read_gguf_header(Path(made.output)).files) == len(parts)
    assert all(torch.equal(whole.read(name), joined.read(name)) for name in whole.tensors)


def test_parts_that_are_links_to_several_folders(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "Q8_0")
    parts = split(tmp_path / "model.gguf", tmp_path / "parts", 9)
    for number, part in enumerate(parts, 1):
        name, folder = f"out-{number:05}-of-{len(parts):05}.gguf", tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        (folder / part.name).write_text("old")
        (tmp_path / name).symlink_to(folder / part.name)
    made = headwise.prepare(parts[0], tmp_path / "out.gguf", cache="llama.cpp:q4_0", overwrite=True)
    headwise.prepare(tmp_path / "model.gguf", tmp_path / "whole.gguf", cache="llama.cpp:q4_0")
    whole, joined = open_checkpoint(tmp_path / "whole.gguf"), open_checkpoint(made.output)
    assert all(torch.equal(whole.read(name), joined.read(name)) for name in whole.tensors)
    assert all(Path(made.output).with_name(f"out-{n:05}-of-{len(parts):05}.gguf").is_symlink() for n in (1, 2))
    there = {path.name for folder in "01" for path in (tmp_path / folder).iterdir()}
    assert there == {part.name + end for part in parts for end in ("", ".sha256")}


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    write_model(source, "Q8_0")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headwise.conversion.preparation.stored.GgufLayers.write", full)
    with pytest.raises(HeadwiseError, match="No space left"):
        headwise.prepare(source, tmp_path / "out.gguf", cache="llama.cpp:q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_source_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    write_model(source, "Q8_0")
    whole = source.read_bytes()
    for place, name in (
        (sys.modules["headwise.conversion.preparation.prepare"], "check_layers"),
        (GgufLayers, "write"),
    ):
        source.write_bytes(whole)
        original = getattr(place, name)

        def cut(*arguments: Any, original: Any = original, **others: Any) -> Any:
            for file in (source, *tmp_path.glob(".*/*.gguf")):
                os.truncate(file, len(whole) // 8)
            return original(*arguments, **others)

        with monkeypatch.context() as patched:
            patched.setattr(place, name, cut)
            with pytest.raises(CheckpointError, match=r"is cut short|has changed"):
                headwise.prepare(source, tmp_path / "out.gguf", cache="llama.cpp:q4_0")
        assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "Q8_0")
    (tmp_path / ".out.gguf.headwise-copies").mkdir()
    (tmp_path / ".out.gguf.headwise-copies" / "gigabytes").write_text("of a killed run")
    headwise.prepare(tmp_path / "model.gguf", tmp_path / "out.gguf", cache="llama.cpp:q4_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out.gguf", "out.gguf.sha256"]


def test_engines_that_load_no_such_file_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "Q8_0")
    for cache in ("mlx:8", "vllm:fp8", "vllm:turboquant_4bit_nc"):
        with pytest.raises(HeadwiseError, match=r"loads no \.gguf"):
            headwise.prepare(tmp_path / "model.gguf", tmp_path / "out.gguf", cache=cache)
    for cache in ("sglang:fp4", "transformers:quanto4"):
        headwise.prepare(tmp_path / "model.gguf", tmp_path / "out.gguf", cache=cache, overwrite=True)
