"""Bad input ends with status 2 and one line that names the field, the value and the rule; nothing is left behind."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Result
from tests.conftest import TINY

Refused = Callable[..., str]
Edit = Callable[..., None]

MLA = ("--to", "mla", "--kv-budget", "0.5")
SMALL = ("--window", "16", "--windows", "2", "--context", "8")
Q, UP, EMBED = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.embed_tokens.weight",
)
READERS = {
    "convert": ("convert", "tiny", "out", *MLA),
    "evaluate": ("evaluate", "tiny", "--text", "text.txt", *SMALL),
    "generate": ("generate", "tiny", "--prompt", "hello", "--max-new-tokens", "2"),
}
every_reader = pytest.mark.parametrize("command", READERS.values(), ids=READERS)
describers = pytest.mark.parametrize(
    "command", [*READERS.values(), ("inspect", "tiny"), ("compare", "tiny")], ids=[*READERS, "inspect", "compare"]
)


# --- config.json ---------------------------------------------------------------------------------------------


@describers
@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "config.json"),
        (b"", "is not valid JSON"),
        (b"{not json", "is not valid JSON"),
        (b"[1, 2]", "must hold a JSON object"),
        (b'{"model_type": "\xff"}', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"{}", "model_type = None"),
    ],
)
def test_a_config_of_another_form_is_refused(
    refused: Refused, tiny_llama: Path, command: tuple[str, ...], content: bytes | None, rule: str
) -> None:
    config = tiny_llama / "config.json"
    config.unlink() if content is None else config.write_bytes(content)
    assert rule in refused(*command)


SIZES = ("num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim", "num_hidden_layers")
NO_SIZES = (0, -4, "4", 4.0, True, [], {}, 2**63, 10**400, float("nan"), float("inf"))


@pytest.mark.parametrize("field", [*SIZES, "vocab_size", "max_position_embeddings"])
def test_a_number_that_is_no_size(refused: Refused, edit_config: Edit, tiny_llama: Path, field: str) -> None:
    """Each field by each command and each value once: all commands read a config by one function."""
    commands = (READERS["convert"], READERS["evaluate"], ("inspect", "tiny"))
    for number, value in enumerate(NO_SIZES):
        edit_config(**{field: value})
        line = refused(*commands[number % len(commands)])
        assert line.startswith(f"headwise: {field} = "), (value, line)
        assert "must be" in line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_attention_heads": 5}, "num_kv_heads = 2: must divide num_heads = 5"),
        ({"num_attention_heads": 5, "head_dim": None}, "num_attention_heads = 5: must divide hidden_size = 32"),
        ({"num_key_value_heads": 3}, "num_kv_heads = 3: must divide num_heads = 4"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers = 10001: must be at most 10000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a number above 0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta = inf: must be a number"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta = 'x': must be a number"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": float("nan")}}, "rope factor = nan: must be a number"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1e300}},
            "partial_rotary_factor = 1e+300: must be above 0",
        ),
        ({"rope_parameters": "x"}, "rope_parameters = 'x': must be a JSON object"),
        ({"intermediate_size": -1}, "intermediate_size = -1: must be a whole number of at least 1"),
        ({"intermediate_size": "48"}, "intermediate_size = '48': must be a whole number of at least 1"),
        ({"intermediate_size": 10**30}, f"intermediate_size = {10**30}: must be at most"),
        ({"model_type": 5}, "model_type = 5: must be present"),
        ({"model_type": "headwise_llama"}, "headwise = None: must hold the attention specs"),
        ({"model_type": "nonsense"}, "model_type = 'nonsense': is not understood"),
    ],
)
def test_a_config_that_says_what_cannot_be(
    refused: Refused, edit_config: Edit, changes: dict[str, Any], line: str
) -> None:
    edit_config(**changes)
    for command in (READERS["convert"], READERS["evaluate"], ("inspect", "tiny")):
        assert f"headwise: {line}" in refused(*command)


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": None},
        {"hidden_act": "nonsense"},
        {"dtype": "int8"},
        {"dtype": "float8_e4m3fn"},
        {"pad_token_id": 1000},
        {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0}},
        {"text_config": {}},
        {"attn_implementation": "nonsense"},
    ],
    ids=str,
)
def test_a_config_that_transformers_cannot_build(
    refused: Refused, edit_config: Edit, changes: dict[str, Any]
) -> None:
    edit_config(**changes)
    for command in READERS.values():
        assert "headwise: config.json = 'llama': is refused by transformers: " in refused(*command)


@pytest.mark.parametrize("field", ["num_hidden_layers", "intermediate_size", "vocab_size", "head_dim"])
def test_sizes_of_another_model(refused: Refused, edit_config: Edit, field: str) -> None:
    edit_config(**{field: 4096})
    for command in READERS.values():
        line = refused(*command)
        assert "by the config" in line or "is more than the 21 tensors" in line


# --- what is never read --------------------------------------------------------------------------------------


@every_reader
@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "bitsandbytes"])
def test_quantised_weights(refused: Refused, edit_config: Edit, command: tuple[str, ...], method: str) -> None:
    edit_config(quantization_config={"quant_method": method})
    assert f"quantization_config = '{method}': quantised weights are not read" in refused(*command)


@every_reader
def test_other_ways_to_say_quantised(refused: Refused, edit_config: Edit, command: tuple[str, ...]) -> None:
    edit_config(compression_config={"quant_method": "compressed-tensors"})
    assert "compression_config = 'compressed-tensors': quantised" in refused(*command)
    edit_config(compression_config=..., transformers_weights="../other.safetensors")
    assert "transformers_weights = '../other.safetensors': " in refused(*command)


@every_reader
@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_of_the_folder_is_never_run(
    cli: Callable[..., Result],
    edit_config: Edit,
    here: Path,
    tiny_llama: Path,
    command: tuple[str, ...],
    model_type: str,
) -> None:
    """transformers' own class is used in its place; where it has none, the folder is refused."""
    (tiny_llama / "modeling_evil.py").write_text(f"open({str(here / 'ran')!r}, 'w')")
    edit_config(auto_map={"AutoModelForCausalLM": "modeling_evil.Model", "AutoConfig": "modeling_evil.Config"})
    edit_config(model_type=model_type)
    done = cli(*command)
    assert done.status == (0 if model_type == "llama" else 2)
    assert ("asks to run code" in done.err) == (model_type == "evil")
    assert not (here / "ran").exists()


@every_reader
def test_a_kernel_of_the_hub_is_never_fetched(
    refused: Refused, edit_config: Edit, tiny_llama: Path, command: tuple[str, ...]
) -> None:
    for field in ("_attn_implementation", "attn_implementation", "experts_implementation"):
        edit_config(**{field: "owner/kernel@main:function"})
        line = refused(*command)
        assert f"{field} = 'owner/kernel@main:function': must be a plain name such as sdpa: a kernel of the" in line
        edit_config(**{field: ...})


def test_code_of_a_tokenizer_is_never_run(cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    path = tiny_llama / "tokenizer_config.json"
    asks = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    path.write_text(json.dumps(json.loads(path.read_text()) | asks))
    (tiny_llama / "evil.py").write_text(f"open({str(here / 'ran')!r}, 'w')\nclass Evil: pass\n")
    for command in READERS.values():
        assert cli(*command).status in (0, 2)
        assert not (here / "ran").exists()


@every_reader
def test_pickles(refused: Refused, tiny_llama: Path, command: tuple[str, ...]) -> None:
    (tiny_llama / "model.safetensors").rename(tiny_llama / "pytorch_model.bin")
    assert "weights = 'pytorch_model.bin': is a pickle, which can run code" in refused(*command)
    pickle = ("tiny/pytorch_model.bin", *command[2:])
    assert " = 'tiny/pytorch_model.bin': is a pickle" in refused(command[0], *pickle)


# --- safetensors ---------------------------------------------------------------------------------------------


@every_reader
def test_no_weights(refused: Refused, tiny_llama: Path, command: tuple[str, ...]) -> None:
    (tiny_llama / "model.safetensors").unlink()
    assert "folder = 'tiny': has no weights: neither model.safetensors nor" in refused(*command)


@every_reader
def test_a_cut_file_at_any_offset(refused: Refused, tiny_llama: Path, command: tuple[str, ...]) -> None:
    weights = tiny_llama / "model.safetensors"
    whole = weights.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, *range(1000, len(whole), len(whole) // 9), len(whole) - 1]:
        weights.write_bytes(whole[:length])
        assert "file = 'tiny/model.safetensors': is not a whole safetensors file" in refused(*command)
    weights.write_bytes(b"\xff" * 8 + whole[8:])  # a header of 2⁶⁴ − 1 bytes
    assert "is not a whole safetensors file" in refused(*command)


@every_reader
def test_a_file_without_tensors(refused: Refused, edit_weights: Edit, command: tuple[str, ...]) -> None:
    edit_weights(lambda tensors: {"model.layers.0.self_attn.rotary_emb.inv_freq": tensors[Q][:1]})
    assert "folder = 'tiny': has no tensors in its files of weights" in refused(*command)


@every_reader
@pytest.mark.parametrize("dtype", ["I8", "U8", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"])
def test_a_dtype_that_is_not_read(refused: Refused, tiny_llama: Path, command: tuple[str, ...], dtype: str) -> None:
    weights = tiny_llama / "model.safetensors"
    whole = weights.read_bytes()
    (size,) = struct.unpack_from("<Q", whole)
    header = json.loads(whole[8 : 8 + size])
    bits = {"I64": 64, "F4": 4}.get(dtype, 8)
    # One tensor in 32 bits a number becomes one of as many bytes in the other dtype.
    header[UP] |= {"dtype": dtype, "shape": [48 * 32 * 32 // bits]}
    text = json.dumps(header).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    line = refused(*command)
    assert f"{UP} dtype = '{dtype}': must be one of F64, F32, F16, BF16" in line or "safetensors file" in line


@every_reader
@pytest.mark.parametrize("name", [Q, UP, EMBED, "model.norm.weight"])
def test_a_tensor_that_is_missing(refused: Refused, edit_weights: Edit, command: tuple[str, ...], name: str) -> None:
    edit_weights(lambda tensors: {key: t for key, t in tensors.items() if key != name})
    assert f"tensor = '{name}': is missing from tiny" in refused(*command)


@every_reader
@pytest.mark.parametrize("name", [Q, UP, EMBED])
def test_a_tensor_of_another_shape(refused: Refused, edit_weights: Edit, command: tuple[str, ...], name: str) -> None:
    for change in (
        lambda t: t[:-1],
        lambda t: t[:, :-1],
        lambda t: t.flatten(),
        lambda t: t[:0],
    ):
        shapes = {}

        def edit(tensors: dict[str, Any], change: Any = change, shapes: dict[str, Any] = shapes) -> dict[str, Any]:
            shapes["old"], changed = tuple(tensors[name].shape), change(tensors[name])
            shapes["new"] = tuple(changed.shape)
            shapes["tensor"] = tensors[name].clone()
            return tensors | {name: changed}

        edit_weights(edit)
        assert f"{name} shape = {shapes['new']}: must be {shapes['old']} by the config" in refused(*command)
        edit_weights(lambda tensors, shapes=shapes: tensors | {name: shapes["tensor"]})


@every_reader
@pytest.mark.parametrize("name", [Q, UP, EMBED, "model.norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number(
    refused: Refused, edit_weights: Edit, command: tuple[str, ...], name: str, value: float
) -> None:
    edit_weights(lambda tensors: tensors[name].view(-1)[3].fill_(value) and None)
    line = refused(*command)
    assert f"tensor = '{name}': holds " in line
    assert ("NaN" if math.isnan(value) else "infinite") in line


@pytest.mark.parametrize(
    ("name", "place", "dtype"), [(EMBED, 0, torch.bfloat16), (UP, -1, torch.float16)], ids=["first", "last"]
)
def test_a_weight_that_is_no_number_anywhere(
    refused: Refused, edit_weights: Edit, here: Path, tiny_llama: Path, name: str, place: int, dtype: Any
) -> None:
    """By each command that writes or measures, in the first and the last place of a tensor, in each dtype."""
    shutil.copytree(tiny_llama, here / "good")
    (here / "exam.txt").write_text("pack my box with five dozen liquor jugs and more. " * 20)

    def spoil(tensors: dict[str, Any]) -> dict[str, Any]:
        changed = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        changed[name].view(-1)[place] = math.nan
        return changed

    edit_weights(spoil)
    calibrated = ("--calibrate", "text.txt", "--calibration-tokens", "256")
    exam, healed = ("--evaluate", "exam.txt"), ("--window", "32", "--batch", "2", "--no-evaluate")
    for command in (
        ("convert", "tiny", "out", "--to", "mqa", *calibrated),
        ("prepare", "tiny", "out", "--for", "vllm:fp8"),
        ("calibrate", "tiny", "out", *calibrated),
        ("frontier", "tiny", "--quick", *calibrated, "--target", "int4", "--output", "out"),
        ("migrate", "tiny", "out", "--max-quality-loss", "1", "--target", "mqa", *calibrated, *exam),
        ("heal", "tiny", "out", "--teacher", "good", "--text", "text.txt", "--tokens", "128", *healed),
        ("heal", "good", "out", "--teacher", "tiny", "--text", "text.txt", "--tokens", "128", *healed),
        ("evaluate", "good", "--against", "tiny", "--text", "text.txt", *SMALL),
    ):
        assert f"tensor = '{name}': holds NaN" in refused(*command), command


@pytest.mark.parametrize("name", [Q, UP])
def test_a_weight_too_large_for_the_output(refused: Refused, edit_weights: Edit, name: str) -> None:
    edit_weights(lambda tensors: tensors[name].view(-1)[3].fill_(1e6) and None)
    for to in (MLA, ("--to", "mqa")):
        assert f"tensor = '{name}': does not fit in float16" in refused(
            "convert", "tiny", "out", *to, "--dtype", "float16"
        )
    for command in (READERS["evaluate"], READERS["generate"]):
        assert f"tensor = '{name}': holds NaN or infinite values in float16" in refused(
            *command, "--dtype", "float16"
        )


def test_a_model_that_computes_no_numbers(refused: Refused, edit_weights: Edit) -> None:
    edit_weights(lambda tensors: {key: t * 0 + 3e38 if key == UP else t for key, t in tensors.items()})
    for command in (READERS["evaluate"], READERS["generate"]):
        assert "model = 'tiny': computes NaN or infinite logits in float32" in refused(*command)
    edit_weights(lambda tensors: {key: t * 0 + 3e38 if "up_proj" in key else t for key, t in tensors.items()})
    line = refused(*READERS["convert"], "--calibrate", "text.txt")
    assert "tokens': make the model compute NaN or infinite values before layer 1" in line


def test_a_model_whose_numbers_leave_their_range(refused: Refused, edit_weights: Edit) -> None:
    """The weights themselves are finite."""
    calibrated = (*READERS["convert"], "--calibrate", "text.txt", "--calibration-tokens", "256")
    edit_weights(lambda tensors: {k: t.sign() * 1e38 if k == "lm_head.weight" else t for k, t in tensors.items()})
    assert "tokens': make the model compute NaN or infinite values before layer 2" in refused(*calibrated)


def test_a_matrix_that_cannot_be_decomposed(
    refused: Refused, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    for command in (READERS["convert"], (*READERS["convert"], "--dry-run"), ("calibrate", "tiny", "out")):
        line = refused(*command, "--calibrate", "text.txt", "--calibration-tokens", "256")
        assert "weights = 'tiny': are so large or so small that matrices made of them cannot be decomposed" in line


def test_a_layer_that_cannot_be_decomposed_is_named(
    refused: Refused, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")

    monkeypatch.setattr("headwise.conversion.write_folder.select", refuse)
    assert refused(*READERS["convert"]).endswith("cannot be decomposed, in layer 0\n")


# --- targets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--to", "mlaa"), "--to = 'mlaa': must be mha, gqa:K, mqa, mla or same"),
        (("--to", "gqa"), "--to = 'gqa': must be"),
        (("--to", ""), "--to = '': must be"),
        (("--to", "gqa:0"), "num_kv_heads = 0: must divide the 4 query heads"),
        (("--to", "gqa:3"), "num_kv_heads = 3: must divide the 4 query heads"),
        (("--to", "gqa:7"), "num_kv_heads = 7: must divide"),
        (("--to", "gqa:-1"), "--to = 'gqa:-1': must be"),
        (("--to", "gqa:x"), "--to = 'gqa:x': must be"),
        (("--to", "gqa:" + "9" * 5000), "--to = 'gqa:999"),
        (("--to", "gqa:٢"), "--to = 'gqa:٢': must be"),
        (
            ("--to", "mla"),
            "--kv-budget = None: mla needs --kv-budget, --kv-bytes, or --kv-lora-rank and --qk-rope-head-dim",
        ),
        (("--to", "mla", "--kv-budget", "0"), "--kv-budget = 0.0: must be a fraction above 0 and at most 1"),
        (("--to", "mla", "--kv-budget", "2"), "--kv-budget = 2.0: must be"),
        (("--to", "mla", "--kv-budget", "-1"), "--kv-budget = -1.0: must be"),
        (("--to", "mla", "--kv-budget", "nan"), "--kv-budget = nan: must be"),
        (("--to", "mla", "--kv-budget", "inf"), "--kv-budget = inf: must be"),
        (("--to", "mla", "--kv-budget", "abc"), "--kv-budget = 'abc': "),
        (("--to", "mla", "--kv-budget", "0.01"), "--kv-budget = 0.01: leaves 0 of the 32 values a layer caches"),
        (("--to", "mqa", "--kv-budget", "0.5"), "--kv-budget = 0.5: goes with mla"),
        (("--to", "mqa", "--kv-lora-rank", "5"), "--kv-lora-rank = 5: goes with mla"),
        (("--to", "gqa:2", "--qk-rope-head-dim", "4"), "--qk-rope-head-dim = 4: goes with mla"),
        (("--to", "mla", "--kv-lora-rank", "8"), "--kv-lora-rank = 8: and --qk-rope-head-dim are given together"),
        (
            ("--to", "mla", "--qk-rope-head-dim", "8"),
            "--kv-lora-rank = None: and --qk-rope-head-dim are given",
        ),
        ((*MLA, "--kv-lora-rank", "8", "--qk-rope-head-dim", "4"), "--kv-budget = 0.5: cannot be used with"),
        (("--to", "mla", "--kv-lora-rank", "8", "--qk-rope-head-dim", "3"), "--qk-rope-head-dim = 3: must be even"),
        (("--to", "mla", "--kv-lora-rank", "8", "--qk-rope-head-dim", "0"), "--qk-rope-head-dim = 0: must be even"),
        (("--to", "mla", "--kv-lora-rank", "8", "--qk-rope-head-dim", "18"), "--qk-rope-head-dim = 18: must be even"),
        (("--to", "mla", "--kv-lora-rank", "0", "--qk-rope-head-dim", "4"), "--kv-lora-rank = 0: must be at least 1"),
        (("--to", "mla", "--kv-lora-rank", "29", "--qk-rope-head-dim", "4"), "--kv-lora-rank = 29: must be"),
        (("--to", "mla", "--kv-lora-rank", "x", "--qk-rope-head-dim", "4"), "--kv-lora-rank = 'x': "),
        (
            ("--to", "mqa", "--method", "mean", "--calibrate", "text.txt"),
            "--calibrate = 'text.txt': goes with mla and aligned heads, not with mean",
        ),
        (("--to", "mqa", "--method", "x"), "--method = 'x': must be one of aligned, first_head, mean, random"),
        (("--to", "mha", "--method", "mean"), "--method = 'mean': merges key–value heads, and none are merged here"),
        (
            (*MLA, "--without", "x"),
            "--without = 'x': must be one of recall, starts, sensitivity, spread, channels, sequence, refine, refit",
        ),
        ((*MLA, "--calibration-tokens", "1"), "--calibration-tokens = 1: must be at least 2"),
        ((*MLA, "--calibration-window", "99"), "--calibration-window = 99: goes with calibrate"),
        ((*MLA, "--calibration-tokens", "99"), "--calibration-tokens = 99: goes with calibrate"),
        ((*MLA, "--calibration-tokens", "x"), "--calibration-tokens = 'x': "),
        ((*MLA, "--dtype", "nonsense"), "--dtype = 'nonsense': must be float64"),
        ((*MLA, "--format", "onnx"), "--format = 'onnx': must be headwise or deepseek"),
        (
            ("--to", "mqa", "--format", "deepseek"),
            "--format = 'deepseek': goes with mla; mqa results are stock already",
        ),
        ((*MLA, "--evaluate", "nowhere"), "--evaluate = 'nowhere': could not be read: No such file"),
        (
            (*MLA, "--evaluate", "text.txt", "--no-evaluate"),
            "--evaluate = 'text.txt': cannot be used with --no-evaluate",
        ),
        ((*MLA, "--evaluation-windows", "0"), "--evaluation-windows = 0: must be at least 1"),
        ((*MLA, "--dtype", "int8"), "--dtype = 'int8': must be float64"),
        ((), "Missing option '--to'"),
    ],
    ids=str,
)
def test_targets_and_sizes(refused: Refused, tiny_llama: Path, options: tuple[str, ...], line: str) -> None:
    for extra in ((), ("--dry-run",)):
        assert f"headwise: {line}" in refused("convert", "tiny", "out", *options, *extra)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "--calibrate = 'study.txt': could not be read: No such file"),
        (b"", "calibrate study.txt = '0 tokens': must be at least one window of 2 tokens"),
        (b"a", "calibrate study.txt = '1 tokens': must be at least one window of 2 tokens"),
        (b"\xff\xfe\x00", "--calibrate = 'study.txt': must be UTF-8 text"),
    ],
)
def test_calibration_texts(refused: Refused, here: Path, tiny_llama: Path, content: bytes | None, line: str) -> None:
    if content is not None:
        (here / "study.txt").write_bytes(content)
    assert line in refused("convert", "tiny", "out", *MLA, "--calibrate", "study.txt")
    if content is None:
        assert line in refused("convert", "tiny", "out", *MLA, "--calibrate", "study.txt", "--dry-run")


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (("convert", "tiny", "out", *MLA, "--calibrate"), "calibrate"),
        (("convert", "tiny", "out", *MLA, "--evaluate"), "evaluate"),
        (("calibrate", "tiny", "out", "--calibrate"), "calibrate"),
        (("frontier", "tiny", "--output", "out", "--no-plot", "--calibrate"), "calibrate"),
        (
            (
                "frontier",
                "tiny",
                "--output",
                "out",
                "--no-plot",
                "--calibrate",
                "other.txt",
                *SMALL[:4],
                "--evaluate",
            ),
            "evaluate",
        ),
        (("evaluate", "tiny", *SMALL, "--text"), "text"),
    ],
    ids=lambda value: f"{value[0]}{value[-1]}" if isinstance(value, tuple) else value,
)
def test_a_text_counts_once_and_has_a_name(
    refused: Refused, here: Path, tiny_llama: Path, command: tuple[str, ...], field: str
) -> None:
    """Whatever it is called the second time."""
    (here / "other.txt").write_text("another text, as short as the first. " * 20)
    shutil.copy(here / "text.txt", here / "copy.txt")
    for again in ("text.txt", "./text.txt", "copy.txt"):
        line = refused(*command, "text.txt", command[-1], again)
        assert f"{field} = '{again}': is the same text as text.txt; name it once" in line
    line = refused(*command, "")
    assert f"{field} = ''" in line
    assert "is empty" in line or field == "text"


def test_statistics_have_a_name(refused: Refused, tiny_llama: Path) -> None:
    line = refused("convert", "tiny", "out", *MLA, "--statistics", "")
    assert "--statistics = '': is empty; it must name a folder" in line


def test_a_model_of_one_position_reads_no_text(refused: Refused, tiny_llama: Path, edit_config: Edit) -> None:
    edit_config(max_position_embeddings=1)
    for command in (
        ("convert", "tiny", "out", *MLA, "--calibrate", "text.txt"),
        ("convert", "tiny", "out", *MLA, "--evaluate", "text.txt"),
        ("calibrate", "tiny", "out", "--calibrate", "text.txt"),
        ("evaluate", "tiny", "--text", "text.txt"),
    ):
        assert "max_position_embeddings = 1: must be at least 2" in refused(*command)


@describers
def test_a_rope_factor_divides(
    refused: Refused, tiny_llama: Path, command: tuple[str, ...], edit_config: Edit
) -> None:
    edit_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0})
    assert "rope factor = 0: must be a number above 0" in refused(*command)


# --- the output folder ---------------------------------------------------------------------------------------


def test_an_output_that_is_taken(refused: Refused, here: Path, tiny_llama: Path) -> None:
    (here / "full").mkdir()
    (here / "full" / "notes").write_text("mine")
    assert "exists and is not empty; say --overwrite" in refused("convert", "tiny", "full", *MLA)
    assert "is not a model folder, so --overwrite" in refused("convert", "tiny", "full", *MLA, "--overwrite")
    (here / "dangling").symlink_to("nowhere")
    (here / "linked").symlink_to("full")
    (here / "loop").symlink_to("loop")
    for taken in ("text.txt", "dangling", "linked", "loop"):
        for extra in ((), ("--overwrite",)):
            assert f"output = '{taken}': is a file or a link" in refused("convert", "tiny", taken, *MLA, *extra)
    for within in ("text.txt/out", "text.txt/a/b"):
        line = refused("convert", "tiny", within, *MLA)
        assert f"output = '{within}': cannot be made: {here / 'text.txt'} is a file" in line


def test_statistics_take_the_place_of_statistics(
    cli: Callable[..., Result], refused: Refused, here: Path, tiny_llama: Path
) -> None:
    study = ("calibrate", "tiny", "st", "--calibrate", "text.txt", "--calibration-tokens", "64")
    assert cli(*study).status == 0
    assert "exists and is not empty; say --overwrite to replace it" in refused(*study)
    before = (here / "st" / "statistics.json").read_text()
    (here / "text.txt").write_text("some other text to study the model on. " * 20)
    assert cli(*study, "--overwrite").status == 0
    assert (here / "st" / "statistics.json").read_text() != before
    assert "--calibration-window = 129: must be at most 128" in refused(
        *study, "--calibration-window", "129", "--overwrite"
    )
    rule = "has no statistics.json, so --overwrite will not replace it"
    assert rule in refused("calibrate", "tiny", "tiny", "--calibrate", "text.txt", "--overwrite")
    assert "is not a model folder, so --overwrite" in refused("convert", "tiny", "st", *MLA, "--overwrite")


def test_an_output_that_would_eat_its_source(refused: Refused, here: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, here / "holder" / "inner")
    shutil.copy(tiny_llama / "config.json", here / "holder")
    (here / "link").symlink_to("tiny")
    rule = "must not be the source, or a folder that holds it"
    assert rule in refused("convert", "tiny", "tiny", *MLA, "--overwrite")
    assert rule in refused("convert", "tiny", "holder/../tiny", *MLA, "--overwrite")
    assert rule in refused("convert", "link", "tiny", *MLA, "--overwrite")
    assert rule in refused("convert", "holder/inner", "holder", *MLA, "--overwrite")
    for output in (".", "..", "/", "holder/.."):
        assert "must name a folder" in refused("convert", "tiny", output, *MLA, "--overwrite")


def test_an_output_that_would_eat_its_texts(
    cli: Callable[..., Result], refused: Refused, here: Path, tiny_llama: Path
) -> None:
    shutil.copytree(tiny_llama, here / "out")
    (here / "study").symlink_to("out/texts")
    (here / "out" / "texts").mkdir()
    shutil.copy("text.txt", "out/texts/a.txt")
    convert = ("convert", "tiny", "out", *MLA, "--overwrite")
    for option in ("calibrate", "evaluate"):
        rule = f"output = 'out': must not be a text of {option}, or a folder that holds it"
        for text in ("out/texts/a.txt", "out/texts", "study"):
            assert rule in refused(*convert, f"--{option}", text)
    collect = ("calibrate", "--calibrate", "text.txt", "--calibration-tokens", "64")
    assert cli(*collect, "tiny", "out/statistics").status == 0
    assert "must not be the statistics, or a folder that holds it" in refused(
        *convert, "--statistics", "out/statistics"
    )


def test_statistics_that_would_eat_their_inputs(
    cli: Callable[..., Result], refused: Refused, here: Path, tiny_llama: Path
) -> None:
    assert cli("calibrate", "tiny", "out", "--calibrate", "text.txt", "--calibration-tokens", "64").status == 0
    shutil.copytree(tiny_llama, here / "out" / "tiny")
    shutil.copy("text.txt", "out/a.txt")
    collect = ("calibrate", "--calibration-tokens", "64", "--overwrite")
    rule = "output = 'out': must not be the source, or a folder that holds it"
    assert rule in refused(*collect, "out/tiny", "out", "--calibrate", "text.txt")
    rule = "output = 'out': must not be a text of calibrate, or a folder that holds it"
    assert rule in refused(*collect, "tiny", "out", "--calibrate", "out/a.txt")


def test_an_output_that_cannot_be_made(refused: Refused, tiny_llama: Path) -> None:
    for output in ("text.txt/out", "/proc/headwise/out", "x" * 250):
        assert f"output = '{output}'"[:150] in refused("convert", "tiny", output, *MLA)
    assert "File name too long" in refused("convert", "tiny", "x" * 300, *MLA)


def test_a_failure_leaves_what_was_to_be_overwritten(
    refused: Refused, cli: Callable[..., Result], here: Path, tiny_llama: Path, edit_weights: Edit
) -> None:
    shutil.copytree(tiny_llama, here / "out")
    (here / "out" / "notes").write_text("mine")
    edit_weights(lambda tensors: tensors["model.norm.weight"][3].fill_(float("nan")) and None)  # the last one read
    assert "holds NaN" in refused("convert", "tiny", "out", *MLA, "--overwrite")
    assert "holds NaN" in refused("convert", "tiny", "new/deeper/out", *MLA)
    edit_weights(lambda tensors: tensors["model.norm.weight"][3].fill_(1.0) and None)
    assert cli("convert", "tiny", "out", *MLA, "--overwrite").status == 0
    assert not (here / "out" / "notes").exists()
    assert cli("convert", "tiny", "new/deeper/out", *MLA).status == 0
    assert sorted(path.name for path in here.iterdir()) == ["new", "out", "text.txt", "tiny"]


# --- sources -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("nowhere", "is no file, folder or catalog name"),
        ("", "is no file, folder or catalog name"),
        ("owner/name", "did you mean hf://owner/name?"),
        ("https://huggingface.co/owner/name/", "did you mean hf://owner/name?"),
        ("llama3-8b", "did you mean llama-3-8b?"),
        ("hf://", "a hub model is written hf://owner/name"),
        ("hf://name", "a hub model is written hf://owner/name"),
        ("hf:///name", "a hub model is written hf://owner/name"),
        ("hf://a/b/c", "a hub model is written hf://owner/name"),
        ("hf://a b/c", "could not be fetched"),
        ("text.txt", "must be a model folder, a .gguf file or a config.json"),
        ("x" * 5000, "is no file"),
    ],
    ids=lambda text: text[:24],
)
def test_sources(refused: Refused, tiny_llama: Path, source: str, rule: str) -> None:
    healing = ("--text", "text.txt")
    for name, command in (
        ("source", ("convert", source, "out", *MLA)),
        ("source", ("prepare", source, "out", "--for", "mlx:8")),
        ("model", ("evaluate", source, "--text", "text.txt")),
        ("against", ("evaluate", "tiny", "--against", source, "--text", "text.txt")),
        ("model", ("heal", source, "out", "--teacher", "tiny", *healing)),
        ("teacher", ("heal", "tiny", "out", "--teacher", source, *healing)),
        ("source", ("generate", source, "--prompt", "a")),
        ("source", ("inspect", source)),
        ("source", ("compare", source)),
    ):
        line = refused(*command)
        assert f"{name} = '{source}'"[:60] in line
        assert rule in line


def test_sources_without_weights(refused: Refused, tiny_llama: Path) -> None:
    for source in ("llama-3-8b", "tiny/config.json"):
        for command, *rest in (
            ("convert", "out", *MLA),
            ("evaluate", "--text", "text.txt"),
            ("generate", "--prompt=a"),
        ):
            assert f" = '{source}': has no weights" in refused(command, source, *rest)


# --- evaluate, generate, compare -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "--text = 'exam.txt': could not be read: No such file"),
        (b"", "text exam.txt = '0 tokens': must be at least one window of 16 tokens"),
        (b"abc", "exam.txt = '3 tokens': must be at least one window of 16 tokens; a longer text, or --window 3"),
        (b"\xff\xfe\x00", "--text = 'exam.txt': must be UTF-8 text"),
    ],
)
def test_texts(refused: Refused, here: Path, tiny_llama: Path, content: bytes | None, line: str) -> None:
    if content is not None:
        (here / "exam.txt").write_bytes(content)
    assert line in refused("evaluate", "tiny", "--text", "exam.txt", *SMALL)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--window", "0"), "--window = 0: must be at least 2 and"),
        (("--window", "1"), "--window = 1: must be at least 2 and"),
        (("--window", "-5"), "--window = -5: must be at least 2 and"),
        (("--window", "10000"), "--window = 10000: must be at least 2 and at most 128, by the models' positions"),
        (("--window", "x"), "--window = 'x': "),
        (("--windows", "0"), "--windows = 0: must be at least 1"),
        (("--context", "0"), "--context = 0: must be at least 1 and"),
        (("--context", "129"), "--context = 129: must be at least 1 and at most 127, by the models' positions"),
        (("--context", str(10**30)), "must be at least 1 and at most 127"),
        (("--dtype", "nonsense"), "--dtype = 'nonsense': must be float64"),
    ],
    ids=str,
)
def test_numbers_of_evaluate(refused: Refused, tiny_llama: Path, options: tuple[str, ...], line: str) -> None:
    assert line in refused(*READERS["evaluate"], *options)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("generate", "tiny"), "Missing option '--prompt'"),
        (("generate", "tiny", "--prompt", ""), "--prompt = '': must hold at least one token"),
        (("generate", "tiny", "--prompt", "\udcff"), "--prompt = '\\udcff': must be UTF-8 text"),
        (("generate", "tiny", "--prompt", "a", "--max-new-tokens", "0"), "--max-new-tokens = 0: must be at least 1"),
        (
            ("generate", "tiny", "--prompt", "abc", "--max-new-tokens", "126"),
            "--max-new-tokens = 126: and the prompt's 3 tokens must be at most 128 together, the model's positions",
        ),
        (("generate", "tiny", "--prompt", "a", "--dtype", "x"), "--dtype = 'x': must be float64"),
        (("compare", "tiny", "--context", "0"), "--context = 0: must be a whole number of at least 1"),
        (("compare", "tiny", "--batch", "-1"), "--batch = -1: must be a whole number of at least 1"),
        (("compare", "tiny", "--batch", str(10**400)), "must be at most"),
        (("compare", "tiny", "--dtype", "x"), "--dtype = 'x': must be one of"),
        (("inspect", "tiny", "--dtype", "x"), "--dtype = 'x': must be one of"),
        (("inspect",), "source = None: is required"),
        (("inspect", "tiny", "another"), "unexpected extra argument"),
        (("nonsense",), "No such command 'nonsense'"),
        (("inspect", "--nonsense"), "--nonsense"),
    ],
    ids=ascii,
)
def test_arguments(refused: Refused, tiny_llama: Path, arguments: tuple[str, ...], line: str) -> None:
    assert line in refused(*arguments)


def test_no_room_in_memory_is_a_failure_and_no_stack(refused: Refused, tiny_llama: Path) -> None:
    assert "out of memory" in refused("compare", "tiny", "--measure", "--context", str(2**40), status=1)


def test_a_gpu_without_room_is_told_alike(
    refused: Refused, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has 139 GiB in all.")

    monkeypatch.setattr(importlib.import_module("headwise.conversion.healing.heal"), "_train", full)
    (tiny_llama.parent / "text.txt").write_text("a text to train on. " * 40)
    command = ("heal", "tiny", "out", "--teacher", "tiny", "--text", "text.txt", "--no-evaluate")
    assert "out of memory" in refused(*command, status=1)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b"garbage", b"\xff"])
def test_tokenizers(refused: Refused, tiny_llama: Path, content: bytes | None) -> None:
    path = tiny_llama / "tokenizer.json"
    path.unlink() if content is None else path.write_bytes(content)
    for command in (READERS["evaluate"], READERS["generate"], (*READERS["convert"], "--calibrate", "text.txt")):
        assert "tokenizer = 'tiny': could not be loaded: " in refused(*command)


@pytest.mark.parametrize("twice", ["number", "name", "special"])
def test_a_vocabulary_entry_twice(cli: Callable[..., Result], here: Path, tiny_llama: Path, twice: str) -> None:
    path = tiny_llama / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if twice == "number":
        tokenizer["model"]["vocab"]["a"] = tokenizer["model"]["vocab"]["b"]
    elif twice == "special":
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 5})
    text = json.dumps(tokenizer)
    path.write_text(text.replace('"vocab": {', '"vocab": {"a": 7, ', 1) if twice == "name" else text)
    for command in (*READERS.values(), (*READERS["convert"], "--format", "deepseek", "--overwrite")):
        assert cli(*command).status in (0, 2)
        assert sorted({path.name for path in here.iterdir()} - {"out"}) == ["text.txt", "tiny"]


def test_a_tokenizer_that_gives_no_mask(cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    plain = cli(*READERS["generate"]).out
    path = tiny_llama / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": ["input_ids"]}))
    result = cli(*READERS["generate"])
    assert (result.status, result.out) == (0, plain), result


def test_a_tokenizer_that_panics_as_it_writes(
    refused: Refused, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's Rust code raises a BaseException that is no Exception."""

    class PanicException(BaseException):
        pass

    def panic(*_: Any, **__: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.decode", panic)
    assert "tokenizer = 'tiny': could not write the text: index out of bounds" in refused(*READERS["generate"])
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__call__", panic)
    for command in (READERS["evaluate"], READERS["generate"], (*READERS["convert"], "--calibrate", "text.txt")):
        assert "tokenizer = 'tiny': could not read the text: index out of bounds" in refused(*command)


def test_a_tokenizer_of_another_model(refused: Refused, edit_config: Edit, edit_weights: Edit) -> None:
    edit_config(vocab_size=10)
    edit_weights(lambda tensors: {k: t[:10] if t.shape[0] == 64 else t for k, t in tensors.items()})
    for command in (READERS["evaluate"], READERS["generate"], (*READERS["convert"], "--calibrate", "text.txt")):
        assert "is outside the model's vocabulary of 10" in refused(*command)


def test_a_reference_of_another_vocabulary(
    refused: Refused, here: Path, tiny_llama_folder: Path, edit_config: Edit, edit_weights: Edit
) -> None:
    shutil.copytree(tiny_llama_folder, here / "other")
    edit_config(vocab_size=60)
    edit_weights(lambda tensors: {k: t[:60] if t.shape[0] == 64 else t for k, t in tensors.items()})
    assert "--against = 64: has another vocabulary than the model's 60" in refused(
        *READERS["evaluate"], "--against", "other"
    )


def test_settings_for_generation(cli: Callable[..., Result], refused: Refused, tiny_llama: Path) -> None:
    plain = cli(*READERS["generate"]).out
    path = tiny_llama / "generation_config.json"
    # Greedy is greedy: neither beams nor penalties, good or bad, matter.
    for settings in ({"num_beams": -3}, {"repetition_penalty": -1}, {"num_beams": 4}, {"penalty_alpha": 3}):
        path.write_text(json.dumps(settings))
        assert cli(*READERS["generate"]).out == plain
    for stop in ("x", 10**30, 2**63, -1, 1.5, True, [2, 10**30], [None], {}):
        path.write_text(json.dumps({"eos_token_id": stop}))
        assert f"eos_token_id = {stop!r}: must be a token's number" in refused(*READERS["generate"])
    for stop in (None, [], 2**63 - 1, [0, 1]):
        path.write_text(json.dumps({"eos_token_id": stop}))
        assert cli(*READERS["generate"]).status == 0
    path.write_text("[]")
    assert "is refused by transformers" in refused(*READERS["generate"])


def test_settings_of_what_a_call_returns(cli: Callable[..., Result], here: Path, edit_config: Edit) -> None:
    """Such fields are ignored, because the caller decides."""
    plain = {name: cli(*READERS[name]).out.splitlines()[0] for name in ("evaluate", "generate")}
    fields = ("return_dict", "output_hidden_states", "output_attentions")
    for value in (False, True, 0.5, ["x"]):
        edit_config(**dict.fromkeys(fields, value))
        for name, first in plain.items():
            result = cli(*READERS[name])
            assert (result.status, result.out.splitlines()[0]) == (0, first), (value, result)
        assert cli(*READERS["convert"], "--overwrite", "--calibrate", "text.txt", "--no-evaluate").status == 0


# --- families ------------------------------------------------------------------------------------------------


def _save(kind: str, folder: Path, **config: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    auto.from_config(AutoConfig.for_model(kind, **(TINY | config))).save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "config", "line"),
    [
        ("gemma2", {}, "model_type = 'gemma2': cannot be converted, or read from GGUF, yet; can: "),
        (
            "gpt_bigcode",
            {"n_embd": 32, "n_layer": 2, "n_head": 4},
            "model_type = 'gpt_bigcode': cannot be converted, or read from GGUF, yet; can: ",
        ),
        ("roberta", {}, "model_type = 'roberta': cannot be converted, or read from GGUF, yet; can: "),
        (
            "deepseek_v3",
            {
                "num_key_value_heads": 4,
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "n_routed_experts": 2,
                "num_experts_per_tok": 1,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 16,
            },
            "source attention = 'MLA 8 + 4': converting from MLA is not supported",
        ),
    ],
)
def test_families_that_are_not_converted(
    refused: Refused, here: Path, kind: str, config: dict[str, Any], line: str
) -> None:
    _save(kind, here / "other", **config)
    for to in (MLA, ("--to", "mqa")):
        assert line in refused("convert", "other", "out", *to)


def test_a_converted_model_is_no_source(refused: Refused, cli: Callable[..., Result], tiny_llama: Path) -> None:
    assert cli("convert", "tiny", "mla", *MLA).status == 0
    assert "converting from MLA is not supported" in refused("convert", "mla", "out", "--to", "mqa")


def test_encoders(refused: Refused, cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    _save("bert", here / "bert")
    shutil.copy(tiny_llama / "tokenizer.json", here / "bert")
    assert "model_type = 'bert': is an encoder" in refused("compare", "bert")
    for command in (READERS["evaluate"], READERS["generate"]):
        assert "model_type = 'bert': is an encoder" in refused(command[0], "bert", *command[2:])
    assert cli("inspect", "bert").status == 0


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mistral", {"sliding_window": 5}),
        ("olmoe", {"num_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_models_that_are_run_and_not_converted(
    cli: Callable[..., Result], here: Path, tiny_llama: Path, kind: str, config: dict[str, Any]
) -> None:
    """A window shorter than the context, and weights that transformers fuses as it loads."""
    torch.manual_seed(0)
    _save(kind, here / "other", **config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, here / "other")
    command = READERS["evaluate"]
    result = cli(command[0], "other", *command[2:])
    assert (result.status, result.err) == (0, "")


def test_a_number_that_only_an_initialisation_reads(refused: Refused, here: Path, tiny_llama: Path) -> None:
    """A class may check it (Llama's) or not (Qwen's); it is met when the two formats are compared."""
    _save("qwen2", here / "qwen", layer_types=None)
    for file in tiny_llama.glob("tokenizer*.json"):
        shutil.copy(file, here / "qwen")
    path = here / "qwen" / "config.json"
    config = json.loads(path.read_text())
    for value in (float("-inf"), float("nan"), -1.0, "-inf", [0.02]):
        path.write_text(json.dumps(config | {"initializer_range": value}))
        line = refused("convert", "qwen", "out", *MLA, "--format", "deepseek")
        assert "qwen2': is refused by transformers: " in line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"layer_types": ["None", "None"]}, "config.json = 'headwise_llama': is refused by transformers: KeyError"),
        ({"sliding_window": 10**30, "layer_types": ["sliding_attention"] * 2}, "is refused by transformers: "),
        ({"rope_channels": [["x"], [0]]}, "headwise.rope_channels = ['x']: must list some of the 4 frequencies"),
        ({"rope_channels": [[None], [0]]}, "headwise.rope_channels = [None]: must list some of the 4 frequencies"),
        ({"rope_channels": [[4], [0]]}, "headwise.rope_channels = [4]: must list some of the 4 frequencies"),
        ({"rope_channels": [[-1], [0]]}, "headwise.rope_channels = [-1]: must list some of the 4 frequencies"),
        ({"rope_channels": [[0]]}, "headwise.rope_channels = [[0]]: must list the frequencies of 2 layers"),
    ],
    ids=str,
)
def test_configs_of_converted_folders(
    refused: Refused,
    cli: Callable[..., Result],
    here: Path,
    tiny_llama: Path,
    changes: dict[str, Any],
    line: str,
) -> None:
    assert cli("convert", "tiny", "mla", *MLA, "--no-evaluate").status == 0
    path = here / "mla" / "config.json"
    config = json.loads(path.read_text())
    if "rope_channels" in changes:
        changes = {"headwise": config["headwise"] | changes}
    path.write_text(json.dumps(config | changes))
    for command in (READERS["evaluate"], READERS["generate"]):
        assert line in refused(command[0], "mla", *command[2:])


# --- GGUF ----------------------------------------------------------------------------------------------------


def test_damaged_gguf(refused: Refused, here: Path, tiny_llama_folder: Path) -> None:
    from tests.models.checkpoints.tiny_gguf import write_tiny_gguf

    path = here / "tiny.gguf"
    write_tiny_gguf(tiny_llama_folder, path)
    whole = path.read_bytes()
    for length in [0, 2, *range(4, 1500, 151), *range(1500, len(whole), len(whole) // 9), len(whole) - 1]:
        path.write_bytes(whole[:length])
        line = refused("convert", "tiny.gguf", "out", *MLA)
        assert "cut short" in line or "must begin with the bytes GGUF" in line
    at = whole.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight")
    for kind, rule in ((24, "that the gguf package can dequantise"), (12, "multiple of 256"), (99, "does not know")):
        path.write_bytes(whole[: at + 20] + struct.pack("<I", kind) + whole[at + 24 :])
        line = refused("convert", "tiny.gguf", "out", *MLA)
        assert "blk.1.ffn_up.weight" in line
        assert rule in line
    for command in READERS.values():  # a file that says it has no tensors
        path.write_bytes(whole[:8] + struct.pack("<Q", 0) + whole[16:])
        assert "file = 'tiny.gguf': has no tensors" in refused(command[0], "tiny.gguf", *command[2:])
    for size in (0, 2**32, 2**63):  # products of such sizes overflow 64 bits
        path.write_bytes(whole[: at + 4] + struct.pack("<QQ", size, size) + whole[at + 20 :])
        line = refused("convert", "tiny.gguf", "out", *MLA)
        assert "cut short" in line or "by the config" in line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--output", "taken"), "output = 'taken': cannot be written"),
        (("--windows", "0"), "--windows = 0: must be at least 1"),
    ],
)
def test_demo_is_refused_before_it_begins(refused: Refused, here: Path, options: tuple[str, ...], line: str) -> None:
    (here / "taken").write_text("a file")
    assert line in refused("demo", *options)


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99", ""])
def test_a_device_that_is_not_there_is_named(refused: Refused, tiny_llama: Path, device: str) -> None:
    line = refused(*READERS["generate"], "--device", device)
    assert f"--device = {device!r}: must be a device that torch has here" in line


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (("--html", "/dev/null"), "--html = '/dev/null': must be a file, or not exist"),
        (
            ("--html", "no/such/page.html"),
            "--html = 'no/such/page.html': cannot be written: No such file or directory: there is no folder no/such",
        ),
        (("--length", "99999999999999999999"), "length = 99999999999999999999: must be at least 1, and at most"),
        (("--shape", "4000000000000000000/1/8"), "shape = 4000000000000000000: must be at least 1, and at most"),
        (("--threads", "100000"), "threads"),
    ],
)
def test_a_bench_is_refused_before_it_measures(refused: Refused, options: tuple[str, ...], rule: str) -> None:
    assert rule in refused("bench", "decode", "--quick", *options)
