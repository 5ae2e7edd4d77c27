"""Models as GGUF files: what is read back, tokenizers, and the refusals."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import headwise
from headwise.conversion import export_gguf
from headwise.errors import ArgumentError, CheckpointError, HeadwiseError, SpecError, StorageError
from headwise.models.checkpoints import (
    GGUF_TYPES,
    GgufFile,
    TensorInfo,
    load_tokenizer,
    open_checkpoint,
    tokenizer_fields,
)
from headwise.models.specs import read_spec
from tests.byte_level import SPLITS, TEXT, save_byte_level, save_sentencepiece
from tests.closeness import assert_close
from tests.real_models import save_character_tokenizer, tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama 3": ("llama", {"head_dim": 64, "rope_parameters": LLAMA3}),
    "llama, stretched": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}
WIDE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


def save_plain(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    """A tiny model without a tokenizer, in float32."""
    tiny_model(model_type, **overrides).float().save_pretrained(folder)
    return folder


@torch.inference_mode()
def logits(source: Path) -> torch.Tensor:
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    out: torch.Tensor = headwise.load(source, dtype="float32")(ids).logits
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_the_same_in_gguf(name: str, tmp_path: Path) -> None:
    model_type, overrides = FAMILIES[name]
    folder, file = save_plain(tmp_path / "folder", model_type, **overrides), tmp_path / "model.gguf"
    assert export_gguf(folder, file) == file.stat().st_size
    before, after = open_checkpoint(folder), open_checkpoint(file)
    for tensor in before.tensors:
        assert torch.equal(before.read(tensor), after.read(tensor)), tensor
    assert set(after.tensors) == set(before.tensors)
    assert read_spec(file).layers == read_spec(folder).layers
    assert_close(logits(file), logits(folder), 1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_transformers_reads_the_same_tensors(name: str, tmp_path: Path) -> None:
    """So that the two readers have no mistake in common."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model_type, overrides = FAMILIES[name]
    folder = save_plain(tmp_path / "folder", model_type, **overrides)
    export_gguf(folder, tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    ours = open_checkpoint(folder)
    for tensor in ours.tensors:
        assert torch.equal(ours.read(tensor), theirs[tensor]), tensor


@pytest.mark.parametrize("outtype", GGUF_TYPES)
def test_matrices_are_rounded_and_vectors_are_not(outtype: Any, tmp_path: Path) -> None:
    folder, file = save_plain(tmp_path / "folder", "qwen2", **WIDE), tmp_path / "model.gguf"
    export_gguf(folder, file, outtype=outtype)
    before, after = open_checkpoint(folder), open_checkpoint(file)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(outtype, torch.float32)
    for name in before.tensors:
        exact, own = before.read(name), after.read(name).float()
        if exact.dim() == 1 or outtype == "f32":
            assert torch.equal(own, exact), name
        elif outtype == "q8_0" and exact.shape[-1] % 32 == 0:
            blocks, exact_blocks = own.view(-1, 32), exact.view(-1, 32)
            step = exact_blocks.abs().amax(1, keepdim=True) / 127
            # Half a step, and the rounding of the scale to float16.
            assert bool(((blocks - exact_blocks).abs() <= step * (0.5 + 127 * 2**-11)).all()), name
        elif outtype != "q8_0":
            assert torch.equal(own, exact.to(dtype).float()), name
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in GGUFReader(file).tensors}
    assert {kind for name, kind in kinds.items() if "norm" in name or name.endswith("bias")} == {"f32"}
    assert {kind for name, kind in kinds.items() if "norm" not in name and name.endswith("weight")} == {outtype}


def test_rows_that_are_no_whole_blocks_are_in_16_bits(tmp_path: Path) -> None:
    folder, file = save_plain(tmp_path / "folder"), tmp_path / "model.gguf"
    export_gguf(folder, file, outtype="q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert kinds["blk.0.attn_q.weight"] == "F16"  # 48 numbers
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"  # 64


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_conversion_to_mla_is_deepseek2_without_biases(model_type: str, tmp_path: Path) -> None:
    source, text = save_plain(tmp_path / "source", model_type), tmp_path / "text.txt"
    text.write_text(TEXT * 40)
    _give_tokenizer(source)
    sizes: dict[str, Any] = {"to": "mla", "kv_lora_rank": 16, "qk_rope_head_dim": 8, "evaluate": False}
    how: dict[str, Any] = {"calibrate": text, "calibration_tokens": 1024}
    headwise.convert(source, tmp_path / "stock", format="deepseek", bias_free=True, **sizes, **how)
    done = headwise.convert(source, tmp_path / "out", format="gguf", **sizes, **how)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "SHA256SUMS", "model.gguf"]
    assert (done.format, done.model_type, done.label) == ("gguf", "deepseek_v3", "MLA 16 + 8")
    file = tmp_path / "out" / "model.gguf"
    assert abs(done.disk_bytes - file.stat().st_size) < 100_000  # metadata
    header = GGUFReader(file)
    value = {key: field.contents() for key, field in header.fields.items()}
    assert value["general.architecture"] == "deepseek2"
    assert (value["deepseek2.attention.key_length"], value["deepseek2.attention.value_length"]) == (24, 16)
    assert not any(tensor.name.endswith("bias") for tensor in header.tensors)
    assert_close(logits(tmp_path / "out"), logits(tmp_path / "stock"), 1e-5)
    # And from the stock folder.
    export_gguf(tmp_path / "stock", tmp_path / "again.gguf")
    assert _tensors(tmp_path / "again.gguf") == _tensors(file)


@pytest.mark.parametrize("split", [*SPLITS, "sentencepiece"])
def test_the_tokenizer_of_an_mla_file_is_read(split: str, tmp_path: Path) -> None:
    """transformers reads no config of ``deepseek2``; evaluate and generate need its tokenizer all the same."""
    source, text = save_plain(tmp_path / "source", vocab_size=400), tmp_path / "text.txt"
    save_sentencepiece(source, 400) if split == "sentencepiece" else save_byte_level(source, 400, split)
    text.write_text(TEXT * 40)
    sizes: dict[str, Any] = {"to": "mla", "kv_lora_rank": 16, "qk_rope_head_dim": 8, "without": ["refine"]}
    how: dict[str, Any] = {"calibrate": text, "calibration_tokens": 512, "evaluate": False, "format": "gguf"}
    headwise.convert(source, tmp_path / "out", **sizes, **how)
    read, was = load_tokenizer(tmp_path / "out" / "model.gguf"), load_tokenizer(source)
    words = "the lazy dog jumps over 1,234.5 caf\u00e9s <tool> and so on"
    assert read(words)["input_ids"] == was(words)["input_ids"]
    assert read.decode(was(words)["input_ids"]) == was.decode(was(words)["input_ids"])
    assert headwise.evaluate(tmp_path / "out", text=text, windows=1, window=64).texts[0].perplexity > 1


def _give_tokenizer(folder: Path) -> None:
    """The character tokenizer, of a kind that GGUF has, in a vocabulary of 97."""
    vocab = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {chr(29 + index): index for index in range(3, 95)}
    vocab |= {"<|endoftext|>": 95, "th": 96}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": vocab,
            "merges": [["t", "h"]],
            "byte_fallback": False,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _tensors(file: Path) -> dict[str, bytes]:
    return {tensor.name: tensor.data.tobytes() for tensor in GGUFReader(file).tensors}


def test_fewer_heads_are_the_familys_own(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source", "qwen2")
    headwise.convert(source, tmp_path / "stock", to="mqa", evaluate=False)
    headwise.convert(source, tmp_path / "out", to="mqa", evaluate=False, format="gguf-q8_0")
    export_gguf(tmp_path / "stock", tmp_path / "again.gguf", outtype="q8_0")
    assert _tensors(tmp_path / "again.gguf") == _tensors(tmp_path / "out" / "model.gguf")
    assert read_spec(tmp_path / "out").mechanism == "mqa"


@pytest.mark.parametrize("split", SPLITS)
def test_a_byte_level_tokenizer(split: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "folder", vocab_size=400)
    save_byte_level(folder, 400, split)
    fields = {field.key: field.value for field in tokenizer_fields(open_checkpoint(folder), 400)}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", split)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 400
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert set(types[len(tokenizer) :]) == {5}  # unused
    assert types[tokenizer.convert_tokens_to_ids("<s>")] == 3  # control
    assert types[tokenizer.convert_tokens_to_ids("<tool>")] == 4  # of the user
    assert fields["tokenizer.ggml.bos_token_id"] == tokenizer.bos_token_id
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    export_gguf(folder, tmp_path / "model.gguf")
    # A file's own metadata are copied.
    copied = {field.key: field.value for field in tokenizer_fields(open_checkpoint(tmp_path / "model.gguf"), 400)}
    assert copied == fields


def merged(text: str, tokens: list[str], scores: list[float], types: list[int]) -> list[int]:
    """llama.cpp's merging by scores, written a second time: the best pair first, bytes for what is no token."""
    number = {token: index for index, token in enumerate(tokens)}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[number[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in number]
        if not pairs:
            break
        _, at = max(pairs)
        pieces[-at : 2 - at] = [pieces[-at] + pieces[1 - at]]
    out: list[int] = []
    for piece in pieces:
        as_bytes = [number[f"<0x{byte:02X}>"] for byte in piece.encode()]
        assert all(types[index] == 6 for index in as_bytes)
        out += [number[piece]] if piece in number else as_bytes
    return out


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    folder = save_plain(tmp_path_factory.mktemp("pieces"), vocab_size=400)
    save_sentencepiece(folder, 400)
    fields = {field.key: field.value for field in tokenizer_fields(open_checkpoint(folder), 400)}
    return AutoTokenizer.from_pretrained(folder), fields


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("the quick lazy dog; ï1,2.\n√"), max_size=30).filter(lambda text: text.strip()))
def test_sentencepieces_scores_give_its_tokens(text: str, sentencepiece: tuple[Any, dict[str, Any]]) -> None:
    tokenizer, fields = sentencepiece
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"] is True
    names = ("tokens", "scores", "token_type")
    expected = merged(text, *(fields[f"tokenizer.ggml.{name}"] for name in names))
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected


def test_a_kind_that_llama_cpp_does_not_know_is_refused_before_any_work(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source")
    save_character_tokenizer(source, 97)
    with pytest.raises(CheckpointError, match=r"tokenizer model = 'WordLevel': is not written as GGUF"):
        headwise.convert(source, tmp_path / "out", to="mqa", format="gguf", evaluate=False)
    with pytest.raises(CheckpointError, match=r"tokenizer model = 'WordLevel'"):
        export_gguf(source, tmp_path / "out.gguf")
    save_byte_level(source, 400)
    with pytest.raises(CheckpointError, match=r"tokenizer token = 332: must be below 97"):
        export_gguf(source, tmp_path / "out.gguf")
    changed = json.loads((source / "tokenizer.json").read_text())
    changed["pre_tokenizer"]["add_prefix_space"] = True
    (source / "tokenizer.json").write_text(json.dumps(changed))
    wide = save_plain(tmp_path / "wide", vocab_size=400)
    (wide / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"tokenizer pre_tokenizer = 'ByteLevel': splits a text in a way"):
        export_gguf(wide, tmp_path / "out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "wide"]


@pytest.mark.parametrize(
    ("model_type", "overrides", "rule"),
    [
        ("mistral", {"sliding_window": 7}, r"sliding_window = 7: has no place in llama\.cpp's mistral"),
        ("gpt_neox", {}, r"model_type = '(headwise_)?gpt_neox': is not written as GGUF; can: llama, mistral"),
        ("qwen3", {"attention_bias": True}, r"attention_bias = True: has no place"),
        ("llama", {"mlp_bias": True}, r"mlp_bias = True: has no place"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type = 'dyna",
        ),
    ],
)
def test_models_that_llama_cpp_does_not_have(
    model_type: str, overrides: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    source = save_plain(tmp_path / "source", model_type, **overrides)
    with pytest.raises(SpecError, match=rule):
        export_gguf(source, tmp_path / "out.gguf")
    with pytest.raises(HeadwiseError, match=rule):
        headwise.convert(source, tmp_path / "out", to="gqa:1", format="gguf", evaluate=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_mla_with_biases_or_sizes_of_its_own(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source")
    rules = {
        "deepseek": r"biases = '.*kv_a_proj_with_mqa.*': have no place .* --bias-free",
        "deepseek-longrope": r"rope_type = 'longrope': is not written as GGUF",
    }
    for layout, rule in rules.items():
        sizes: dict[str, Any] = {"to": "mla", "kv_lora_rank": 16, "qk_rope_head_dim": 8, "evaluate": False}
        headwise.convert(source, tmp_path / layout, format=layout, **sizes)
        with pytest.raises(SpecError, match=rule):
            export_gguf(tmp_path / layout, tmp_path / "out.gguf")
    with pytest.raises(ArgumentError, match=r"format = 'gguf': needs a text to calibrate on"):
        headwise.convert(source, tmp_path / "out", to="mla", kv_budget=0.5, format="gguf")
    with pytest.raises(ArgumentError, match=r"bias_free = True: goes with mla in format deepseek or gguf"):
        headwise.convert(source, tmp_path / "out", to="mqa", bias_free=True, format="gguf")


def test_the_output_is_replaced_when_asked_and_never_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = save_plain(tmp_path / "source"), tmp_path / "out.gguf"
    with pytest.raises(ArgumentError, match=r"must end in \.gguf"):
        export_gguf(source, tmp_path / "out.bin")
    file.write_bytes(b"mine")
    with pytest.raises(ArgumentError, match=r"exists; say --overwrite"):
        export_gguf(source, file)
    with monkeypatch.context() as patch:
        patch.setattr("headwise.models.checkpoints.gguf_writer.GgufFile.write", _full_disk)
        with pytest.raises(StorageError, match=r"output = .*out\.gguf.*: could not be written: No space left"):
            export_gguf(source, file, overwrite=True)
    assert file.read_bytes() == b"mine"
    export_gguf(source, file, overwrite=True)
    with pytest.raises(ArgumentError, match=r"must not be the source"):
        export_gguf(file, file, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "out.gguf.sha256", "source"]
    export_gguf(file, tmp_path / "half.gguf", outtype="q8_0")  # from GGUF to GGUF
    assert (tmp_path / "half.gguf").stat().st_size < file.stat().st_size


def _full_disk(self: object, path: Path, tensors: object) -> None:
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


def test_numbers_beyond_float16(tmp_path: Path) -> None:
    model = tiny_model().float()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = 1e7
    model.save_pretrained(tmp_path / "source")
    for outtype in ("f16", "q8_0"):
        with pytest.raises(CheckpointError, match=rf"tensor = 'blk\.1\.ffn_down\.weight': does not fit in {outtype}"):
            export_gguf(tmp_path / "source", tmp_path / "out.gguf", outtype=outtype)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_is_no_number_has_no_type(tmp_path: Path) -> None:
    info = {"model.norm.weight": TensorInfo((32,), torch.float32)}
    file = GgufFile(tiny_model().config.to_dict(), info, "f32")
    with pytest.raises(CheckpointError, match=r"tensor = 'output_norm\.weight': does not fit in f32"):
        file.write(tmp_path / "out.gguf", [("model.norm.weight", torch.full((32,), torch.nan))])


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    source, folder = save_plain(tmp_path / "source"), tmp_path / "folder"
    folder.mkdir()
    export_gguf(source, folder / "model.gguf")
    assert_close(logits(folder), logits(source), 1e-6)
    export_gguf(source, folder / "second.gguf")
    with pytest.raises(HeadwiseError, match=r"config\.json"):
        headwise.load(folder)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu': must be silu"),
        ({"max_position_embeddings": 2**33}, r"context_length = 8589934592: must fit in the 32 bits"),
        ({"rms_norm_eps": 1e-60}, r"attention\.layer_norm_rms_epsilon = 1e-60: must fit in the 32 bits"),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            r"high_freq_factor = 1\.0: must be above low_freq_factor",
        ),
    ],
)
def test_configs_that_gguf_cannot_hold(change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SpecError, match=rule):
        export_gguf(source, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_fields_that_transformers_has_defaults_for(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source", intermediate_size=11_008, max_position_embeddings=2048)
    config = json.loads((source / "config.json").read_text())
    for name in ("intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        del config[name]
    (source / "config.json").write_text(json.dumps(config))
    export_gguf(source, tmp_path / "out.gguf")
    assert_close(logits(tmp_path / "out.gguf"), logits(source), 1e-6)


def test_a_head_that_is_stored_beside_tied_embeddings_is_kept(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    export_gguf(source, tmp_path / "out.gguf")
    assert_close(logits(tmp_path / "out.gguf"), logits(source), 1e-6)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"end_of_word_suffix": "</w>"}, r"tokenizer end_of_word_suffix = '</w>'"),
        ({"dropout": 0.5}, r"tokenizer dropout = 0\.5"),
    ],
)
def test_tokenizers_that_gguf_cannot_hold(change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source", vocab_size=400)
    save_byte_level(source, 400)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"] |= change
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=rule):
        export_gguf(source, tmp_path / "out.gguf")


@pytest.mark.parametrize("part", ["content", "pattern"])
def test_spaces_that_are_written_in_another_way(part: str, tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source", vocab_size=400)
    save_sentencepiece(source, 400)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["normalizer"]["normalizers"][1][part] = {"content": "_", "pattern": {"String": "-"}}[part]
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"tokenizer normalizer = .*: must be SentencePiece's"):
        export_gguf(source, tmp_path / "out.gguf")


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source", vocab_size=400)
    save_byte_level(source, 400)
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "\ud800"}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template = .*: must be text that UTF-8 can hold"):
        export_gguf(source, tmp_path / "out.gguf")


def test_other_files_beside_the_model_are_not_replaced(tmp_path: Path) -> None:
    source, out = save_plain(tmp_path / "source"), tmp_path / "out"
    headwise.convert(source, out, to="mqa", evaluate=False, format="gguf")
    headwise.convert(source, out, to="gqa:1", evaluate=False, format="gguf", overwrite=True)
    (out / "other.gguf").write_bytes(b"mine")
    with pytest.raises(ArgumentError, match=r"holds other\.gguf too, so --overwrite will not replace it"):
        headwise.convert(source, out, to="mqa", evaluate=False, format="gguf", overwrite=True)
    assert (out / "other.gguf").read_bytes() == b"mine"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source")
    (tmp_path / "real.gguf").write_bytes(b"old")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "real.gguf")
    export_gguf(source, tmp_path / "link.gguf", overwrite=True)
    assert (tmp_path / "link.gguf").is_symlink()
    assert_close(logits(tmp_path / "real.gguf"), logits(source), 1e-6)
    with pytest.raises(ArgumentError, match=r"output = .*: cannot be written"):
        export_gguf(source, tmp_path / ("x" * 300 + ".gguf"))


def test_tokens_have_the_numbers_that_transformers_gives_them(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "source", vocab_size=400)
    save_byte_level(source, 400)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": 399, "content": "<later>", **more})
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    loaded = AutoTokenizer.from_pretrained(source)
    fields = {field.key: field.value for field in tokenizer_fields(open_checkpoint(source), 400)}
    number = loaded.convert_tokens_to_ids("<later>")
    assert fields["tokenizer.ggml.tokens"][number] == "<later>"
    assert fields["tokenizer.ggml.token_type"][number] == 3


def test_a_file_is_compared_with_llama_cpps_own_caches(tmp_path: Path) -> None:
    """int8/int4 does not exist where the file is served: q8_0 and q4_0 do."""
    source = save_plain(tmp_path / "source", head_dim=32)
    _give_tokenizer(source)
    (tmp_path / "text.txt").write_text(TEXT * 40)
    done = headwise.convert(source, tmp_path / "out", to="mqa", format="gguf", evaluate=tmp_path / "text.txt")
    assert done.plain is not None
    assert [each.format for each in done.plain.formats] == ["llama.cpp:q4_0", "llama.cpp:q8_0"]
    assert "of llama.cpp's own caches of the source, llama.cpp:q4_0 loses" in done.plain.line
