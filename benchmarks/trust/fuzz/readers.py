"""What headwise reads: for each reader files that are whole, the way to spoil them, and the call that reads them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from benchmarks.trust.fuzz import mutations
from benchmarks.trust.fuzz.mutations import Mutation
from tests.byte_level import save_byte_level, save_sentencepiece
from tests.conversion.preparation import quantised_folders as quantised
from tests.conversion.preparation.test_gguf import write_model
from tests.costs.prediction.test_curves import measured_device
from tests.models.checkpoints.split_gguf import split
from tests.models.checkpoints.test_gguf_architectures import MODELS, random_model, write_gguf
from tests.models.specs.test_families import NAS, OPENELM_270M
from tests.models.specs.test_stored_weights import SCHEMES
from tests.models.specs.test_whisper import TINY as WHISPER
from tests.real_models import save_tiny
from tests.tiny_families import FAMILIES, save_family
from tests.toy_configs import TOYS

import headwise
from headwise.base.checksums import list_folder
from headwise.cli import main
from headwise.conversion.calibration.saved import ABOUT, open_statistics
from headwise.costs.prediction import devices
from headwise.costs.prediction import predict as predict_costs
from headwise.decide.report.sections import read_folder
from headwise.errors import CheckpointError
from headwise.measure.evaluation.choices import read_choices
from headwise.measure.points import read_measured
from headwise.measure.profiling import write_profile
from headwise.measure.texts import read_source
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from headwise.models.checkpoints.gguf_tokenizer import tokenizer_fields
from headwise.models.checkpoints.tokenizer import decode, tokenize
from headwise.models.specs.sources import catalog
from headwise.runtime.quantization.transform_code import read_codes
from headwise.serving.exports.gguf import export_gguf


@dataclass(frozen=True)
class Seed:
    """A folder that is whole, and the file of it that is spoiled."""

    folder: Path
    file: str
    spoil: Mutation


@dataclass(frozen=True)
class Reader:
    """Something that reads files.

    Attributes:
        seeds: makes the seeds in a folder.
        read: reads a seed's folder; the second path is an empty folder for what it writes.
        modules: the modules of headwise whose lines it is to reach, as `lines.files_of` takes them.
    """

    seeds: Callable[[Path], Iterator[Seed]]
    read: Callable[[Seed, Path], object]
    modules: tuple[str, ...]


class UncleanError(Exception):
    """A command ended with another status than 0 or 2, or complained in other than one line."""


def command(*words: object) -> str:
    """Run a command, and return what it prints; a refusal is raised as one.

    Raises:
        UncleanError: it ended in another way.
        CheckpointError: it ended with status 2.
    """
    said, complaint = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaint):
            main([str(word) for word in words])
    except SystemExit as stopped:
        line = complaint.getvalue()
        if stopped.code == 0:
            return said.getvalue()
        if stopped.code == 2 and line.startswith("headwise: ") and line.count("\n") == 1 and line[:-1].isprintable():
            raise CheckpointError("command", words[0], line) from None
        raise UncleanError(f"status {stopped.code}: {line[-2000:]}") from None
    raise UncleanError("no status")


# --- config.json -------------------------------------------------------------------------------------------------


SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 100}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BY_TYPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
STEP = {"head_dim": 8, "share_q_dim": 32, "share_expert_dim": 40, "moe_num_experts": 4, "moe_top_k": 2}
VARIANTS: tuple[dict[str, Any], ...] = (
    NAS,
    OPENELM_270M,
    WHISPER,
    {**SIZES, "model_type": "bert", "position_embedding_type": "absolute"},
    {"model_type": "distilbert", "dim": 64, "n_heads": 8, "n_layers": 2, "num_hidden_layers": 2},
    {"model_type": "RefinedWeb", "hidden_size": 64, "n_layer": 2, "n_head": 8, "n_head_kv": 2, "alibi": False},
    {**SIZES, **STEP, "model_type": "step3_text", "moe_intermediate_size": 24, "moe_layers_enum": "1, 3"},
    *(
        {**TOYS["llama"], "rope_scaling": {"rope_type": kind, "factor": 2.0}}
        for kind in ("linear", "dynamic", "llama3")
    ),
    {**TOYS["llama"], "rope_scaling": LONG, "partial_rotary_factor": 0.5},
    {**TOYS["phi3"], "rope_scaling": LONG, "partial_rotary_factor": 0.5},
    {**TOYS["deepseek_v3"], "rope_scaling": YARN},
    {**TOYS["gemma3_text"], "rope_parameters": BY_TYPE, "truncate": False},
    {**TOYS["gemma3_text"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {**TOYS["olmo3"], "rope_parameters": BY_TYPE},
    {**TOYS["deepseek_v4"], "rope_parameters": {"main": YARN, "compress": YARN}},
    {**TOYS["deepseek_v4"], "layer_types": None, "compress_ratios": None},
    {**TOYS["qwen2"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    {**TOYS["mistral"], "sliding_window": 8},
    {"model_type": "gemma3", "text_config": TOYS["gemma3_text"], "tie_word_embeddings": True},
    {"model_type": "llava", "text_config": TOYS["llama"]},
    *({**TOYS["llama"], "quantization_config": config} for config, _ in SCHEMES.values()),
    {**TOYS["llama"], "quantization_config": {"quant_method": "fbgemm_fp8"}},
    {**TOYS["gpt_oss"], "quantization_config": {"quant_method": "mxfp4"}},
)
"""What no toy has: model types without a class in transformers, scaled positions, a text part."""


def configs(folder: Path) -> Iterator[Seed]:
    known = {name: entry["config"] for name, entry in catalog().items()}
    for name, config in {**TOYS, **known, **{f"variant {n}": each for n, each in enumerate(VARIANTS)}}.items():
        place = folder / name
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config))
        yield Seed(place, "config.json", mutations.spoil_json)
    for name in ("llama", "whisper"):
        source, out = save_family(folder / "source" / name, name), folder / f"converted {name}"
        headwise.convert(source, out, to="mla", kv_budget=0.5, evaluate=False)
        yield Seed(out, "config.json", mutations.spoil_json)


def inspect(seed: Seed, _: Path) -> None:
    for path in (seed.folder, seed.folder / seed.file):
        headwise.inspect(path)
        headwise.compare(path, context=4096)
        headwise.complexity(path, 1, 4096)


# --- weights -----------------------------------------------------------------------------------------------------


def weights(folder: Path, file: str = "model.safetensors", spoil: Mutation = mutations.spoil_safetensors) -> Any:
    for name in FAMILIES:
        yield Seed(save_family(folder / name, name), file, spoil)


def quantised_weights(folder: Path) -> Iterator[Seed]:
    plain = quantised.make(folder / "plain", "llama")
    ways = {
        "awq": quantised.awq(),
        "gptq": quantised.gptq(),
        "fp8": quantised.fp8(),
        "blocks": quantised.fp8((64, 64)),
    }
    ways["packed"] = quantised.by_compressed_tensors(num_bits=4, type="int", strategy="group", group_size=64)
    for name, way in ways.items():
        made = way(plain, folder / name)
        yield Seed(made, "model.safetensors", mutations.spoil_safetensors)
        yield Seed(made, "config.json", mutations.spoil_json)


def indexes(folder: Path) -> Iterator[Seed]:
    for name in ("llama", "gemma3_text", "mixtral"):
        save_family(folder / "whole" / name, name)
        place = folder / name
        headwise.load(folder / "whole" / name).save_pretrained(place, max_shard_size="20KB")
        yield Seed(place, "model.safetensors.index.json", mutations.spoil_json)
        yield Seed(place, sorted(place.glob("*.safetensors"))[0].name, mutations.spoil_safetensors)


def read_weights(seed: Seed, _: Path, *, is_quantised: bool = False) -> None:
    checkpoint = open_checkpoint(seed.folder, quantised=is_quantised)
    for name, info in checkpoint.tensors.items():
        tensor = checkpoint.read(name)
        assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype), name
        assert tensor.isfinite().all() or not tensor.is_floating_point(), name
    headwise.inspect(seed.folder)


# --- GGUF --------------------------------------------------------------------------------------------------------


def gguf_files(folder: Path) -> Iterator[Seed]:
    for name, save, sizes in (
        ("llama", save_sentencepiece, {}),
        ("qwen2", partial(save_byte_level, split="qwen2"), {}),
        ("qwen3", save_byte_level, {"head_dim": 32}),
    ):
        source = folder / f"{name} source"
        save_family(
            source, name, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, vocab_size=600, **sizes
        )
        for file in source.glob("tokenizer*"):
            file.unlink()
        save(source, 590)
        for kind in ("f32", "q8_0"):
            (folder / f"{name} {kind}").mkdir()
            file = folder / f"{name} {kind}" / "model.gguf"
            export_gguf(source, file, outtype=kind)
            yield Seed(file.parent, file.name, mutations.spoil_gguf)
        parts = split(file, folder / f"{name} parts", 7)
        yield Seed(parts[0].parent, parts[0].name, mutations.spoil_gguf)
        yield Seed(parts[0].parent, parts[1].name, mutations.spoil_gguf)


def every_gguf(folder: Path) -> Iterator[Seed]:
    yield from gguf_files(folder)
    for name, (architecture, *_) in MODELS.items():
        (folder / name).mkdir()
        file = write_gguf(folder / name / "model.gguf", architecture, random_model(name))
        yield Seed(file.parent, file.name, mutations.spoil_gguf)


def blocks(folder: Path) -> Iterator[Seed]:
    folder.mkdir(parents=True)
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "Q2_K", "IQ4_XS"):
        for architecture in ("llama", "qwen2", "qwen3"):
            write_model(folder / f"{kind} {architecture}.gguf", kind, architecture)
            yield Seed(folder, f"{kind} {architecture}.gguf", mutations.spoil_blocks)


def read_gguf(seed: Seed, _: Path) -> None:
    path = seed.folder / seed.file
    headwise.inspect(path)
    checkpoint = open_checkpoint(path)
    for name, info in checkpoint.tensors.items():
        tensor = checkpoint.read(name)
        assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype), name
        assert tensor.isfinite().all(), name
    tokenize(load_tokenizer(path), "the quick brown fox")


def prepare(seed: Seed, scratch: Path) -> None:
    headwise.prepare(seed.folder / seed.file, scratch / "out.gguf", cache="llama.cpp:q8_0")


# --- tokenizers --------------------------------------------------------------------------------------------------


def tokenizers(folder: Path) -> Iterator[Seed]:
    for name, save in (
        ("bytes", save_byte_level),
        ("llama", partial(save_byte_level, split="llama-bpe")),
        ("qwen2", partial(save_byte_level, split="qwen2")),
        ("pieces", save_sentencepiece),
    ):
        place = save_tiny(folder / name, vocab_size=600)
        save(place, 590)
        (place / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        (place / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
            yield Seed(place, file, mutations.spoil_json)
        yield Seed(place, "chat_template.jinja", mutations.spoil_bytes)


def read_tokenizer(seed: Seed, scratch: Path) -> None:
    checkpoint = open_checkpoint(seed.folder)
    checkpoint.copy_companions(scratch)
    ids = tokenize(load_tokenizer(seed.folder), "the quick brown fox")["input_ids"]
    assert isinstance(decode(load_tokenizer(seed.folder), ids), str)
    tokenizer_fields(checkpoint, 600)


# --- what headwise wrote -----------------------------------------------------------------------------------------


def write_text(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog, and then it does so again. " * 40)
    return file


def codes(folder: Path) -> Iterator[Seed]:
    text = write_text(folder)
    source = save_tiny(folder / "source")
    study: dict[str, Any] = {"calibrate": text, "calibration_tokens": 512, "evaluate": False}
    headwise.convert(source, folder / "latents", to="mla", kv_bytes=0.25, **study)
    headwise.convert(source, folder / "heads", to="same", kv_bytes=0.25, **study)
    for name in ("latents", "heads"):
        yield Seed(folder / name, "kv_cache.safetensors", mutations.spoil_safetensors)


def use_codes(seed: Seed, _: Path) -> None:
    for code in read_codes(seed.folder, 2).values():
        assert code.offset.isfinite().all()
    model = headwise.load(seed.folder)
    with torch.inference_mode():
        out = model.generate(torch.tensor([[3, 4, 5, 6, 7]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 8)


def statistics(folder: Path) -> Iterator[Seed]:
    source = save_tiny(folder / "source")
    headwise.calibrate(source, folder / "of", calibrate=write_text(folder), calibration_tokens=512)
    yield Seed(folder, f"of/{ABOUT}", mutations.spoil_json)
    for file in sorted((folder / "of").rglob("*.safetensors")):
        yield Seed(folder, str(file.relative_to(folder)), mutations.spoil_safetensors)


def read_statistics(seed: Seed, scratch: Path) -> None:
    open_statistics(seed.folder / "of", open_checkpoint(seed.folder / "source"))
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "statistics": seed.folder / "of", "evaluate": False}
    headwise.convert(seed.folder / "source", scratch / "out", **options)


def results(folder: Path) -> Iterator[Seed]:
    source, text = save_tiny(folder / "source"), write_text(folder)
    exam = text.with_name("exam.txt")
    exam.write_text("a slow green turtle crawls under an eager cat; nobody has seen it do so before. " * 9)
    study: dict[str, Any] = {"calibrate": text, "calibration_tokens": 512}
    targets = ["int8", "mla:0.5"]
    headwise.frontier(source, folder / "out", targets=targets, evaluate=exam, window=16, windows=2, **study)
    headwise.quick_frontier(source, output=folder / "out", targets=["int8", "int4"], **study)
    yield Seed(folder / "out", "frontier.json", mutations.spoil_json)
    yield Seed(folder / "out", "predicted.json", mutations.spoil_json)
    options: dict[str, Any] = {"evaluation_windows": 2, "evaluate": exam}
    headwise.convert(source, folder / "half", to="mla", kv_budget=0.5, **study, **options)
    yield Seed(folder / "half", "measured.json", mutations.spoil_json)
    headwise.heal(folder / "half", folder / "healed", teacher=source, text=text, tokens=64, **options)
    yield Seed(folder / "healed", "healing.json", mutations.spoil_json)
    headwise.migrate(source, folder / "small", max_quality_loss=9, targets=["mla:0.5"], evaluate=exam, **study)
    yield Seed(folder / "small", "migration.json", mutations.spoil_json)
    printed = folder / "printed"
    printed.mkdir()
    list(questions(folder / "questions"))
    for name, words in {
        "compare": ("compare", source),
        "predict": ("predict", source, "--hardware", "h100"),
        "bench": ("bench", "decode", "--shape", "4/2/32", "--length", 64, "--quick"),
        "evaluate": ("evaluate", source, "--text", exam, "--window", 16, "--windows", 2, "--by-position"),
        "choices": ("evaluate", source, "--choices", folder / "questions" / "items.jsonl"),
    }.items():
        (printed / f"{name}.json").write_text(command(*words, "--json"))
        yield Seed(printed, f"{name}.json", mutations.spoil_json)


def report(seed: Seed, scratch: Path) -> None:
    if seed.file in ("frontier.json", "predicted.json", "measured.json"):
        read_measured([seed.folder])
    read_folder(seed.folder)
    if crc32((seed.folder / seed.file).read_bytes()) % 16 == 0:  # plots take a second
        command("report", seed.folder, "--html", scratch / "page.html")
        assert "<script>alert" not in (scratch / "page.html").read_text()


def again(seed: Seed, scratch: Path) -> None:
    """A frontier goes on in a folder whose kept results are damaged."""
    shutil.copytree(seed.folder, scratch / "out")
    words = ("--calibrate", seed.folder.parent / "text.txt", "--calibration-tokens", 512)
    words = (*words, "--evaluate", seed.folder.parent / "exam.txt", "--window", 16, "--windows", 2)
    command("frontier", seed.folder.parent / "source", "--output", scratch / "out", "--target", "int8", *words)


def kept_results(folder: Path) -> Iterator[Seed]:
    list(results(folder))
    for file in sorted((folder / "out" / "results").glob("int8*.json")):
        yield Seed(folder / "out", str(file.relative_to(folder / "out")), mutations.spoil_json)


def sums(folder: Path) -> Iterator[Seed]:
    for place in (folder, folder / "inner"):
        write_text(place)
        list_folder(place)
    yield Seed(folder, "SHA256SUMS", mutations.spoil_lines)
    yield Seed(folder, "inner/SHA256SUMS", mutations.spoil_bytes)


def verify(seed: Seed, _: Path) -> None:
    found = headwise.verify(seed.folder)
    assert found.is_whole is (not found.differing and not found.missing)


# --- tables and texts --------------------------------------------------------------------------------------------


def hardware(folder: Path) -> Iterator[Seed]:
    folder.mkdir(parents=True)
    own = 'label = "Mine"\nkind = "gpu"\nmemory_gib = 24\nbandwidth_gb = 900.5\nsource = "its sheet"\n'
    (folder / "plain.toml").write_text(f"[mine]\n{own}dense_tflops = {{ bfloat16 = 100, float32 = 20.5 }}\n")
    measured = replace(measured_device(), name="mine")
    write_profile(measured, folder / "curves.toml")
    for name in ("plain.toml", "curves.toml"):
        yield Seed(folder, name, mutations.spoil_lines)


def predict(seed: Seed, _: Path) -> None:
    for device in devices(seed.folder / seed.file).values():
        if device.name == "mine":
            predict_costs("llama-3-8b", hardware=device, dtype="bfloat16")


def texts(folder: Path) -> Iterator[Seed]:
    import pyarrow as pa
    from pyarrow import parquet

    file = write_text(folder)
    yield Seed(folder, file.name, mutations.spoil_bytes)
    rows = [{"text": f"row {row}: the quick brown fox", "n": row} for row in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield Seed(folder, "rows.jsonl", mutations.spoil_jsonl)
    for compression in ("none", "snappy"):
        name = f"{compression}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), folder / name, compression=compression)
        yield Seed(folder, name, mutations.spoil_bytes)


def read_texts(seed: Seed, _: Path) -> None:
    assert isinstance(read_source(seed.folder / seed.file), str)


def questions(folder: Path) -> Iterator[Seed]:
    folder.mkdir(parents=True)
    items = [{"question": f"is {n} even?", "choices": ["yes", "no"], "answer": n % 2} for n in range(9)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    yield Seed(folder, "items.jsonl", mutations.spoil_jsonl)


def read_questions(seed: Seed, _: Path) -> None:
    for choice in read_choices(seed.folder / seed.file):
        assert 0 <= choice.answer < len(choice.choices)


SPECS = "headwise.models.specs"
CHECKPOINTS = "headwise.models.checkpoints"

READERS: dict[str, Reader] = {
    "config": Reader(
        configs,
        inspect,
        (
            f"{SPECS}.readers",
            f"{SPECS}.sources: locate _single_gguf read_json read_spec",
            f"{SPECS}.quantizers",
            f"{SPECS}.huggingface: read_config text_part _reader _without_idle_window _body _read_hosted_layers",
        ),
    ),
    "safetensors": Reader(
        weights,
        read_weights,
        (
            f"{CHECKPOINTS}.folder",
            f"{SPECS}.sources: with_stored_head _ties_head _has_own_head _single_tensor _are_equal _folder_tensors"
            " stored_tensors",
        ),
    ),
    "quantised weights": Reader(
        quantised_weights,
        partial(read_weights, is_quantised=True),
        (f"{CHECKPOINTS}.quantised: QuantisedFolder is_quantised",),
    ),
    "index": Reader(indexes, read_weights, (f"{CHECKPOINTS}.folder",)),
    "gguf": Reader(
        every_gguf,
        read_gguf,
        (
            f"{SPECS}.gguf_header",
            f"{SPECS}.gguf_config: _Metadata gguf_config _is_beyond read_gguf_spec _heads _llama _llama3_rope"
            " llama3_factors _phi3 _is_default_factor _gemma3 _deepseek2 _deepseek_rope _shortest_float32",
            f"{CHECKPOINTS}.gguf_reader",
            f"{CHECKPOINTS}.tokenizer: load_gguf_tokenizer _read_gguf_tokenizer _gguf_tokenizer_class",
        ),
    ),
    "gguf blocks": Reader(
        blocks,
        prepare,
        (f"{CHECKPOINTS}.gguf_in_place: has_scales Rows _bfloat16",),
    ),
    "tokenizer": Reader(
        tokenizers,
        read_tokenizer,
        (
            f"{CHECKPOINTS}.tokenizer: load_tokenizer tokenize decode chat_text refuse_other_tokens refused_tokenizer"
            " max_length",
            f"{CHECKPOINTS}.gguf_tokenizer",
        ),
    ),
    "codes": Reader(
        codes,
        use_codes,
        ("headwise.runtime.quantization.transform_code: read_codes code_from __post_init__ blocks code_shape",),
    ),
    "statistics": Reader(
        statistics,
        read_statistics,
        (
            "headwise.conversion.calibration.saved: SavedCalibrator read_evidence open_statistics _check_begin _model"
            " _about_text _fault _squares _full_matrix",
        ),
    ),
    "results": Reader(
        results,
        report,
        (
            "headwise.measure.points",
            "headwise.decide.report.sections",
        ),
    ),
    "kept results": Reader(kept_results, again, ("headwise.base.documents: read_document load_json",)),
    "checksums": Reader(
        sums,
        verify,
        ("headwise.base.checksums: verify digest _read_list _lists_in _is_sum _list_of _compared _size _files_in",),
    ),
    "hardware": Reader(
        hardware,
        predict,
        (
            "headwise.costs.prediction.hardware",
            "headwise.costs.prediction.curves: Grid _place curves_of _grid",
        ),
    ),
    "texts": Reader(
        texts,
        read_texts,
        (
            "headwise.measure.texts.sources: read_text read_source read_jsonl local_path local_files _dataset_rows"
            " _text",
        ),
    ),
    "questions": Reader(questions, read_questions, ("headwise.measure.evaluation.choices: Choice read_choices",)),
}
"""By name."""
