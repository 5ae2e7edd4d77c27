"""Folders of quantised weights are prepared through their scales: the same model, and nothing quantised anew."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import headwise
from headwise.conversion.preparation.change import powers
from headwise.errors import HeadwiseError
from headwise.models.checkpoints import QuantisedFolder, open_checkpoint
from tests.conversion.preparation.quantised_folders import (
    Quantiser,
    awq,
    by_compressed_tensors,
    edit,
    fp8,
    gptq,
    is_matrix,
    make,
    meant,
    model_of,
)
from tests.tiny_families import answer

TEXT = "The keys of a cache are rounded, and the text goes on. " * 40
CACHES = ["vllm:int4_per_token_head", "transformers:quanto4"]

BY_ROW: dict[str, Quantiser] = {
    "awq": awq(),
    "awq of whole rows": awq(256),
    "gptq": gptq(),
    "gptq 8 bits": gptq(8, 128),
    "gptq 2 bits, version 2": gptq(2, 32, "gptq_v2"),
    "gptq by activations": gptq(act_order=True),
    "fp8 by row": fp8(),
    "fp8 by row, blocks of one": fp8((1, 128), scale="weight_scale"),
    "ct int4": by_compressed_tensors(num_bits=4, strategy="group", group_size=64),
    "ct int4 with zeros": by_compressed_tensors(num_bits=4, strategy="group", group_size=64, symmetric=False),
    "ct int2 with zeros": by_compressed_tensors(num_bits=2, strategy="group", group_size=32, symmetric=False),
    "ct int4 by channel": by_compressed_tensors(num_bits=4, strategy="channel"),
    "ct int8 in groups": by_compressed_tensors(num_bits=8, strategy="group", group_size=64),
    "ct int8 by channel": by_compressed_tensors(num_bits=8, strategy="channel"),
    "ct int8 by channel with zeros": by_compressed_tensors(num_bits=8, strategy="channel", symmetric=False),
    "ct fp8 by channel": by_compressed_tensors(num_bits=8, type="float", strategy="channel"),
}
SHARED: dict[str, Quantiser] = {
    "fp8 of one scale": fp8(by="tensor"),
    "fp8 in blocks": fp8((128, 128)),
    "ct fp8 of one scale": by_compressed_tensors(num_bits=8, type="float", strategy="tensor"),
    "ct fp8 in blocks": by_compressed_tensors(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
    "ct int4 of one scale": by_compressed_tensors(num_bits=4, strategy="tensor"),
}
TURNED = ("awq", "awq of whole rows", "fp8 by row", "fp8 by row, blocks of one", "ct int4 with zeros",
          "ct int2 with zeros", "ct int8 by channel with zeros", "ct fp8 by channel")  # fmt: skip
"""Those whose codes can say that a row is negated."""

pytestmark = [
    pytest.mark.usefixtures("short_search"),
    pytest.mark.filterwarnings("ignore"),  # compressed-tensors and transformers deprecate names of their own
]


def quantise(quantiser: Quantiser, source: Path, folder: Path, name: str) -> Path:
    if name.startswith("ct"):
        pytest.importorskip("compressed_tensors")
    return quantiser(source, folder)


def same_but_for(old: Path, new: Path, changed: tuple[str, ...]) -> None:
    """Bytes of all other tensors are equal, and so is what is beside the weights."""
    before, after = (load_file(folder / "model.safetensors") for folder in (old, new))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.shape, tensor.dtype) == (after[name].shape, after[name].dtype)
        if not any(part in name for part in changed):
            assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    assert json.loads((old / "config.json").read_text()) == json.loads((new / "config.json").read_text())
    assert (old / "tokenizer.json").read_bytes() == (new / "tokenizer.json").read_bytes()
    assert sum(file.stat().st_size for file in old.glob("*.safetensors")) == sum(
        file.stat().st_size for file in new.glob("*.safetensors")
    )


MODELS = [("llama", name) for name in BY_ROW]
MODELS += [
    (family, name) for family in ("qwen2", "phi3") for name in ("awq", "gptq", "fp8 by row", "ct int4 with zeros")
]


@pytest.mark.parametrize(("family", "name"), MODELS)
def test_the_model_is_the_same(name: str, family: str, tmp_path: Path) -> None:
    dense = make(tmp_path / "float", family, torch.float32, num_hidden_layers=1)
    source = quantise(BY_ROW[name], dense, tmp_path / "source", name)
    out = tmp_path / "out"
    made = headwise.prepare(source, out, cache=CACHES)
    assert all(ratio <= 1.0 for layer in made.layers for ratio in layer.loss.values())
    assert min(ratio for layer in made.layers for ratio in layer.loss.values()) < 0.95
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = (answer(model_of(folder), ids) for folder in (source, out))
    assert (before - after).abs().max() < 1e-9
    same_but_for(source, out, ("qkv_proj",) if family == "phi3" else ("q_proj", "k_proj"))
    # Keys have other numbers, in which no mantissa is another.
    place = "model.layers.0.self_attn." + ("qkv_proj" if family == "phi3" else "k_proj")
    old, new = (meant(folder)[f"{place}.weight"] for folder in (source, out))
    assert not torch.equal(old, new)
    assert torch.equal(*(torch.frexp(part.abs())[0].sum(1).sort().values for part in (old, new)))
    if family == "phi3":
        rows = slice(6 * 64, None)
        assert torch.equal(old[rows], new[rows])  # values, in the same matrix


@pytest.mark.parametrize("name", {**BY_ROW, **SHARED})
def test_what_is_read_is_what_the_format_means(name: str, tmp_path: Path) -> None:
    source = quantise(
        {**BY_ROW, **SHARED}[name],
        make(tmp_path / "float", "llama", intermediate_size=192),
        tmp_path / "source",
        name,
    )
    checkpoint = open_checkpoint(source, quantised=True)
    assert isinstance(checkpoint, QuantisedFolder)
    wanted = meant(source)
    assert checkpoint.tensors.keys() == wanted.keys()
    for tensor, weight in wanted.items():
        assert checkpoint.tensors[tensor].shape == weight.shape
        read = checkpoint.read(tensor)
        if is_matrix(tensor):
            assert (read.double() - weight).abs().max() <= 2.0**-24 * weight.abs().max(), tensor
            rows = checkpoint.rows(tensor)
            for part, stored in checkpoint.written(tensor, rows).items():  # what is not changed is written as it was
                file, own = checkpoint.place(part)
                assert torch.equal(stored.contiguous().view(torch.uint8), load_file(file)[own].view(torch.uint8)), (
                    part
                )
    with pytest.raises(HeadwiseError, match="quantised weights are not read"):
        open_checkpoint(source)


@pytest.mark.parametrize("name", BY_ROW)
def test_rows_are_multiplied_exchanged_and_negated(name: str, tmp_path: Path) -> None:
    source = quantise(BY_ROW[name], make(tmp_path / "float", "llama"), tmp_path / "source", name)
    checkpoint = open_checkpoint(source, quantised=True)
    assert isinstance(checkpoint, QuantisedFolder)
    tensor = "model.layers.1.self_attn.q_proj.weight"
    rows, generator = checkpoint.rows(tensor), torch.Generator().manual_seed(5)
    assert rows.can_turn == (name in TURNED)
    order = torch.randperm(256, generator=generator)
    exponents = torch.randint(-2, 7, (256,), generator=generator)
    signs = torch.randint(0, 2, (256,), generator=generator) * 2 - 1 if rows.can_turn else torch.ones(256).long()
    if name.startswith("gptq"):  # is never turned, so that codes stay where they are
        order = torch.arange(256)
    stored = load_file(source / "model.safetensors")
    wanted = meant(source)[tensor][order] * torch.ldexp(signs.double(), exponents)[:, None]
    stored |= {
        part: new.contiguous()
        for part, new in checkpoint.written(
            tensor, rows.taken(order, signs).multiplied(powers(exponents.double()))
        ).items()
    }
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    assert torch.equal(meant(source)[tensor], wanted)


@pytest.mark.parametrize("name", SHARED)
def test_rows_that_share_a_scale_are_refused_by_name(name: str, tmp_path: Path) -> None:
    source = quantise(SHARED[name], make(tmp_path / "float", "llama"), tmp_path / "source", name)
    with pytest.raises(
        HeadwiseError, match=r"layers\.0\.self_attn\.q_proj\.weight'?: has one scale for \d+ rows"
    ) as e:
        headwise.prepare(source, tmp_path / "out", cache="vllm:fp8")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [*SHARED, "awq", "gptq", "ct int8 by channel"])
def test_norms_of_queries_and_keys_change_alone(name: str, tmp_path: Path) -> None:
    quantiser = {**BY_ROW, **SHARED}[name]
    source = quantise(quantiser, make(tmp_path / "float", "qwen3"), tmp_path / "source", name)
    headwise.prepare(source, tmp_path / "out", cache=CACHES)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = (answer(model_of(folder), ids) for folder in (source, tmp_path / "out"))
    assert (before - after).abs().max() < 1e-9
    same_but_for(source, tmp_path / "out", ("q_norm", "k_norm"))
    old, new = (meant(folder)["model.layers.0.self_attn.k_norm.weight"] for folder in (source, tmp_path / "out"))
    assert not torch.equal(old, new)


@pytest.mark.parametrize("name", ["awq", "gptq by activations", "fp8 by row", "ct int4"])
def test_a_text_is_fitted_on(name: str, tmp_path: Path) -> None:
    """The layers run with the weights that the codes mean."""
    source = quantise(BY_ROW[name], make(tmp_path / "float", "qwen2", num_hidden_layers=1), tmp_path / "source", name)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = {"cache": CACHES, "calibrate": text, "calibration_tokens": 256}
    made = headwise.prepare(source, tmp_path / "out", **options)
    model_of(source).float().save_pretrained(tmp_path / "dense")
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, tmp_path / "dense" / file.name)
    dense = headwise.prepare(tmp_path / "dense", tmp_path / "out-dense", **options)
    losses = [[tuple(layer.loss.values()) for layer in each.layers] for each in (made, dense)]
    if name in TURNED:  # else the dense model is turned too
        assert torch.allclose(*(torch.tensor(each) for each in losses), rtol=1e-3)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = (answer(model_of(folder), ids) for folder in (source, tmp_path / "out"))
    assert (before - after).abs().max() < 1e-9


def test_scales_without_room_cut_the_change(tmp_path: Path) -> None:
    """float16 scales near its smallest numbers lose less than it rounds any number by, and a note says so."""
    source = awq()(make(tmp_path / "float", "llama", num_hidden_layers=1), tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    names = [f"model.layers.0.self_attn.{side}_proj" for side in "qk"]
    for name in names:
        stored[f"{name}.scales"] = (stored[f"{name}.scales"].float() * 2.0**-8).half()
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    made = headwise.prepare(source, tmp_path / "out", cache=CACHES)
    assert made.layers[0].cut > 0
    assert any("too little room" in note for note in made.notes)
    for name in names:
        old, new = (meant(folder)[f"{name}.weight"] for folder in (source, tmp_path / "out"))
        norms = [torch.frexp(part.norm(dim=1))[0].sort().values for part in (old, new)]
        assert not torch.equal(old, new)
        assert (norms[0] - norms[1]).abs().max() < 2.0**-10


def test_shards_are_copied_with_their_index(tmp_path: Path) -> None:
    source = awq()(make(tmp_path / "float", "qwen2"), tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(stored)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: stored[name] for name in own}, source / file, {"format": "pt", "by": "a test"})
    weight_map = {name: file for file, own in files.items() for name in own}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    headwise.prepare(source, tmp_path / "out", cache=CACHES)
    for file, own in files.items():
        new = load_file(tmp_path / "out" / file)
        assert sorted(new) == own
        assert all(
            torch.equal(new[name], stored[name]) for name in own if "q_proj" not in name and "k_proj" not in name
        )
        heads = [(folder / file).read_bytes() for folder in (source, tmp_path / "out")]
        size = 8 + int.from_bytes(heads[0][:8], "little")
        assert heads[0][:size] == heads[1][:size]
    index = "model.safetensors.index.json"
    assert (source / index).read_bytes() == (tmp_path / "out" / index).read_bytes()


def config_of(field: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        given = json.loads((folder / "config.json").read_text())["quantization_config"]
        edit(folder, quantization_config={**given, field: value})

    return change


def tensor_of(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        new = change(stored.pop(name))
        save_file(stored | ({} if new is None else {name: new}), folder / "model.safetensors", {"format": "pt"})

    return edited


KEY = "model.layers.1.self_attn.k_proj."
REFUSED: list[tuple[str, Quantiser, Callable[[Path], None], str]] = [
    ("another layout of AWQ", awq(version="gemv"), lambda _: None, r"quantization_config\.version = 'gemv'"),
    ("no zeros", awq(), config_of("zero_point", False), r"quantization_config\.zero_point = False"),
    ("marlin", gptq(), config_of("checkpoint_format", "marlin"), r"checkpoint_format = 'marlin'"),
    ("another method", gptq(), config_of("quant_method", "hqq"), r"quant_method = 'hqq'.*awq, gptq"),
    ("a method that is no text", gptq(), config_of("quant_method", ["gptq"]), r"quant_method = \['gptq'\]"),
    ("a cache's scheme", fp8(), config_of("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme"),
    ("a block of three", fp8(), config_of("weight_block_size", [1, 2, 3]), "weight_block_size"),
    ("code", fp8(), config_of("attn_implementation", "owner/kernel"), "plain name"),
    ("no zeros stored", awq(), tensor_of(f"{KEY}qzeros", lambda _: None), r"k_proj\.qzeros'?: is missing"),
    (
        "a wrong shape",
        awq(),
        tensor_of(f"{KEY}scales", lambda t: t[:, :64].clone()),
        r"k_proj\.qweight = \(256, 16\)",
    ),
    ("a wrong group", gptq(), tensor_of(f"{KEY}g_idx", lambda t: t + 9), r"k_proj\.g_idx = 12"),
    (
        "wrong scales",
        fp8(),
        tensor_of(f"{KEY}weight_scale_inv", lambda t: t[:5].clone()),
        r"weight_scale_inv = \(5, 1\)",
    ),
    ("a wide weight", fp8(), tensor_of(f"{KEY}weight", lambda t: t.float()), r"k_proj\.weight dtype"),
    ("one dimension", fp8(), tensor_of(f"{KEY}weight", lambda t: t.flatten()), r"k_proj\.weight = \(32768,\)"),
    (
        "a sparsity that is none",
        by_compressed_tensors(num_bits=8, type="int", strategy="channel"),
        config_of("sparsity_config", "dense"),
        r"sparsity_config = 'dense': must be an object",
    ),
    ("int64 codes", gptq(), tensor_of(f"{KEY}qweight", lambda t: t.long()), r"k_proj\.qweight dtype"),
    ("three bits", gptq(), tensor_of(f"{KEY}qzeros", lambda t: t[:, :12].clone()), r"k_proj\.qzeros = \(4, 12\)"),
    ("infinite scales", awq(), tensor_of(f"{KEY}scales", lambda t: t * torch.inf), r"k_proj\.weight'?: holds"),
]


@pytest.mark.parametrize(
    ("quantiser", "change", "words"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_what_is_refused(quantiser: Quantiser, change: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    source = quantiser(make(tmp_path / "float", "llama"), tmp_path / "source")
    change(source)
    with pytest.raises(HeadwiseError, match=words) as error:
        headwise.prepare(source, tmp_path / "out", cache="vllm:int8_per_token_head")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scales_of_a_cache_are_refused(family: str, tmp_path: Path) -> None:
    source = fp8()(make(tmp_path / "float", family), tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    stored["model.layers.0.self_attn.k_scale"] = torch.tensor(0.1)
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(HeadwiseError, match=r"self_attn\.k_scale'?: was measured"):
        headwise.prepare(source, tmp_path / "out", cache="vllm:fp8")


def test_gemmas_norms_in_half_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "gemma3_text")
    with pytest.raises(HeadwiseError, match=r"q_norm\.weight dtype = 'bfloat16': has no room for powers of two"):
        headwise.prepare(source, tmp_path / "out", cache="llama.cpp:q4_0")


@pytest.mark.parametrize(
    "name", ["ct int4", "ct int4 with zeros", "ct int8 by channel", "ct fp8 by channel", "fp8 by row"]
)
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    """By its own quantisers; logits differ by the rounding of bfloat16 alone."""
    source = quantise(BY_ROW[name], make(tmp_path / "float", "qwen2"), tmp_path / "source", name)
    headwise.prepare(source, tmp_path / "out", cache=CACHES)
    how = {}
    if name.startswith("ct") and name != "ct int4":  # without the rounding of inputs; packed zeros it loads only so
        how["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    compare_in_transformers(source, tmp_path / "out", torch.bfloat16, **how)


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="GPTQModel is not installed")
@pytest.mark.parametrize("name", ["awq", "gptq", "gptq 8 bits", "gptq by activations"])
def test_gptqmodel_loads_what_is_written(name: str, tmp_path: Path) -> None:
    """By transformers on GPTQModel, whose reading of the layouts is its own."""
    source = BY_ROW[name](make(tmp_path / "float", "qwen2", torch.float16), tmp_path / "source")
    headwise.prepare(source, tmp_path / "out", cache=CACHES)
    compare_in_transformers(source, tmp_path / "out", torch.float16)


def compare_in_transformers(source: Path, out: Path, dtype: torch.dtype, **how: Any) -> None:
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = (
        answer(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how).eval(), ids).double()
        for folder in (source, out)
    )
    exact = answer(model_of(source), ids)
    rounding = float((before - exact).norm() / exact.norm())
    assert rounding < 0.1
    assert float((before - after).norm() / exact.norm()) < 1.5 * rounding


def test_autoawqs_layout_is_read_by_compressed_tensors_too(tmp_path: Path) -> None:
    """Its converter from AutoAWQ reads the same numbers."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    source = awq()(make(tmp_path / "float", "llama"), tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    converter = AutoAWQConverter(group_size=64)
    (args,) = (group.weights for group in converter.update_config(None).config_groups.values())
    checkpoint = open_checkpoint(source, quantised=True)
    for name in (name.removesuffix(".qweight") for name in stored if name.endswith("qweight")):
        parts = (stored[f"{name}.{part}"] for part in ("qweight", "scales", "qzeros"))
        codes, scales, zeros = converter._convert_gemm_module(*parts)
        assert torch.equal(checkpoint.read(f"{name}.weight"), dequantize(codes, scales.float(), zeros, args))


def test_what_convert_and_evaluate_refuse_they_refuse_still(tmp_path: Path) -> None:
    source = awq()(make(tmp_path / "float", "llama"), tmp_path / "source")
    for use in (
        lambda: headwise.convert(source, tmp_path / "out", to="mla", kv_budget=0.5),
        lambda: headwise.evaluate(source, text=__file__),
        lambda: headwise.load(source),
    ):
        with pytest.raises(HeadwiseError, match="quantised weights are not read"):
            use()
