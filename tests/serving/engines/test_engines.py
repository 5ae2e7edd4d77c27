"""Which engines serve a model: every kind of output, the decisive condition, and what to write instead."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import headwise
from headwise.conversion import export_gguf
from headwise.models.checkpoints import FolderCheckpoint, open_checkpoint
from headwise.serving.engines import ENGINE_RULES, engines, rules
from tests.serving.exports.test_gguf import TEXT, _give_tokenizer, save_plain
from tests.tiny_families import save_family

SIZES: dict[str, Any] = {"to": "mla", "kv_lora_rank": 16, "qk_rope_head_dim": 8, "evaluate": False}
OTHER_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}

OUTPUTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "mqa": ({"to": "mqa", "evaluate": False}, {"transformers", "MLX-LM", "vLLM", "SGLang", "TensorRT-LLM"}),
    "own": (SIZES, {"transformers", "vLLM"}),
    "deepseek": ({**SIZES, "format": "deepseek"}, {"transformers", "MLX-LM"}),
    "longrope": ({**SIZES, "format": "deepseek-longrope"}, {"transformers"}),
    "bias-free": (
        {**SIZES, "format": "deepseek", "bias_free": True},
        {"transformers", "MLX-LM", "vLLM", "SGLang", "TensorRT-LLM"},
    ),
    "gguf": ({**SIZES, "format": "gguf"}, {"llama.cpp", "Ollama"}),
}
"""Options of a conversion, and the engines that serve its result as it is."""


def served(source: Path) -> set[str]:
    return {verdict.engine for verdict in engines(source).verdicts if verdict.serves}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("outputs")
    source, text = save_plain(root / "source", **OTHER_BASE), root / "text.txt"
    _give_tokenizer(source)
    text.write_text(TEXT * 40)
    for name, (options, _) in OUTPUTS.items():
        needs_text = options.get("bias_free") or options.get("format") == "gguf"
        how: dict[str, Any] = {"calibrate": text, "calibration_tokens": 512} if needs_text else {}
        headwise.convert(source, root / name, **options, **how)
    return {name: root / name for name in (*OUTPUTS, "source")}


@pytest.mark.parametrize("name", OUTPUTS)
def test_who_serves_what(name: str, outputs: dict[str, Path]) -> None:
    report = engines(outputs[name])
    assert {verdict.engine for verdict in report.verdicts if verdict.serves} == OUTPUTS[name][1]
    for verdict in report.verdicts:
        assert verdict.serves == (verdict.command is not None)
        assert verdict.serves == (verdict.why is None) == (verdict.instead is None)


REASONS = {
    ("mqa", "llama.cpp"): ("reads GGUF", "headwise export "),
    ("own", "MLX-LM"): ("has no model of type headwise_llama", "--format deepseek"),
    ("own", "SGLang"): ("has no model of type headwise_llama", "--format deepseek --bias-free"),
    ("deepseek", "vLLM"): ("skips the biases of kv_a_proj_with_mqa, o_proj in silence", "--bias-free"),
    ("deepseek", "llama.cpp"): ("biases = 'kv_a_proj_with_mqa, o_proj'", "--format gguf"),
    ("longrope", "MLX-LM"): ("takes rope_type longrope for plain RoPE, in silence", "--format deepseek"),
    ("longrope", "vLLM"): ("takes rope_type longrope for yarn", "--bias-free"),
    ("bias-free", "llama.cpp"): ("reads GGUF", "headwise export "),
    ("gguf", "transformers"): ("its GGUF reader has no deepseek2", "without --format gguf"),
    ("gguf", "vLLM"): ("reads folders of safetensors", "without --format gguf"),
}


@pytest.mark.parametrize(("name", "engine"), REASONS, ids=str)
def test_the_decisive_condition(name: str, engine: str, outputs: dict[str, Path]) -> None:
    (verdict,) = (verdict for verdict in engines(outputs[name]).verdicts if verdict.engine == engine)
    why, instead = REASONS[name, engine]
    assert verdict.why is not None
    assert verdict.instead is not None
    assert why in verdict.why
    assert instead in verdict.instead


def test_what_is_advised_is_then_served(outputs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("mqa", "bias-free", "source"):
        export_gguf(outputs[name], tmp_path / f"{name}.gguf")
        assert "llama.cpp" in served(tmp_path / f"{name}.gguf")
    assert {"SGLang", "transformers"} <= served(tmp_path / "mqa.gguf")


def test_rope_without_the_former_keys(outputs: dict[str, Path]) -> None:
    """A folder as transformers 5 saves it: MLX-LM would take another base."""
    assert "rope_theta" not in json.loads((outputs["source"] / "config.json").read_text())
    assert "MLX-LM" not in served(outputs["source"])
    former = json.loads((outputs["mqa"] / "config.json").read_text())
    assert (former["rope_theta"], former["rope_scaling"]) == (5e4, None)


def test_sizes_that_vllm_does_not_decode_on_a_cpu(outputs: dict[str, Path]) -> None:
    (verdict,) = (verdict for verdict in engines(outputs["bias-free"]).verdicts if verdict.engine == "vLLM")
    assert verdict.caution is not None
    assert "512 + 64" in verdict.caution


def test_mla_in_a_gguf_is_not_to_be_shifted(outputs: dict[str, Path]) -> None:
    (verdict,) = (verdict for verdict in engines(outputs["gguf"]).verdicts if verdict.engine == "llama.cpp")
    assert verdict.caution is not None
    assert "--no-context-shift" in verdict.caution


def test_codes_of_heads(outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's loader takes all files for weights where no index says which ones are."""
    folder = tmp_path / "coded"
    shutil.copytree(outputs["mqa"], folder)
    (folder / "kv_cache.safetensors").touch()
    index = folder / "model.safetensors.index.json"
    names = FolderCheckpoint(folder).tensors
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))

    def of_vllm(devices: int = 1) -> Any:
        found = engines(folder, tensor_parallel=devices).verdicts
        return next(verdict for verdict in found if verdict.engine == "vLLM")

    assert of_vllm().serves
    assert "--no-deps . ./plugins/vllm" in of_vllm().caution
    assert "does not share codes of heads out" in of_vllm(2).why
    monkeypatch.setattr(rules, "PLUGIN_ROPES", ())
    assert "no rope_type default" in of_vllm().why
    monkeypatch.setattr(rules, "PLUGIN_CODED", ())
    assert of_vllm().serves
    assert "reads no codes of type llama" in of_vllm().caution
    index.unlink()
    assert "for weights in a folder without model.safetensors.index.json" in of_vllm().why
    assert "move kv_cache.safetensors out" in of_vllm().instead


def test_the_command(outputs: dict[str, Path], cli: Callable[..., Any], refused: Callable[..., str]) -> None:
    said = cli("engines", outputs["own"])
    assert said.status == 0
    assert "MLX-LM: no (run: 0.32.2" in said.out
    assert "convert the original model with --format deepseek" in said.out
    assert "llama.cpp: no (run: " in said.out
    assert "llama.cpp: after an export (run: " in cli("engines", outputs["mqa"]).out
    document = json.loads(cli("engines", outputs["own"], "--json").out)
    assert [verdict["engine"] for verdict in document["verdicts"]] == [engine.served.title for engine in ENGINE_RULES]
    assert "is no file, folder or catalog name" in refused("engines", "nowhere")
    assert "with a small cache: --kv-cache-dtype fp8" in cli("engines", outputs["mqa"]).out
    for source in ("llama-3-8b", outputs["mqa"] / "config.json"):
        rule = (
            "has no tensors, on which it depends who serves a model: give its folder, a .gguf or hf://…; headwise adv"
        )
        assert rule in refused("engines", source)


def test_long_values_are_left_out_of_reasons(outputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str:
        (verdict,) = (verdict for verdict in engines(outputs["own"]).verdicts if verdict.engine == "llama.cpp")
        return str(verdict.why)

    assert "rope_channels of layer 1 = [" in why()
    monkeypatch.setattr(rules, "_SHOWN", 4)
    assert "rope_channels of layer 1: must be layer 0's" in why()


def test_export_from_the_command_line(
    outputs: dict[str, Path], cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "half.gguf"
    document = json.loads(cli("export", outputs["mqa"], file, "--outtype", "bf16", "--json").out)
    assert document["bytes"] == file.stat().st_size
    assert "exists; say --overwrite" in refused("export", outputs["mqa"], file)
    assert "outtype = 'f64': must be" in refused("export", outputs["mqa"], tmp_path / "x.gguf", "--outtype", "f64")
    assert "half.gguf" in cli("export", outputs["mqa"], file, "--overwrite").out


def test_packages_that_are_looked_for_are_those_of_the_extra() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = " ".join(extras["engines"])
    for package in ("llama-cpp-python", "mlx-lm"):
        assert package in names
        assert package in {engine.served.package for engine in ENGINE_RULES}


def test_heads_that_cannot_be_shared_out(
    outputs: dict[str, Path], cli: Callable[..., Any], refused: Callable[..., str]
) -> None:
    document = json.loads(cli("engines", outputs["bias-free"], "--tensor-parallel", "4", "--json").out)
    said = {verdict["engine"]: verdict for verdict in document["verdicts"]}
    for engine in ("vLLM", "SGLang", "TensorRT-LLM"):
        assert said[engine]["why"] == "shares heads out evenly: 6 heads over 4 devices"
    assert said["transformers"]["serves"]
    nine = {verdict.engine: verdict for verdict in engines(outputs["bias-free"], tensor_parallel=9).verdicts}
    assert nine["vLLM"].why == "shares intermediate_size out evenly: 64 over 9 devices"
    two = {verdict.engine: verdict for verdict in engines(outputs["mqa"], tensor_parallel=2).verdicts}
    assert two["vLLM"].command is not None
    assert "--tensor-parallel-size 2" in two["vLLM"].command
    assert "--tensor-parallel = 0: must be at least 1" in refused("engines", outputs["mqa"], "--tensor-parallel", "0")


def test_small_caches_are_those_that_suit_the_model(outputs: dict[str, Path]) -> None:
    """Its heads have 8 channels, which blocks of 32 and 64 do not divide; headwise's own layers are in none."""
    found = {verdict.engine: verdict.caches for verdict in engines(outputs["mqa"]).verdicts}
    assert found["vLLM"][0] == "--kv-cache-dtype fp8"
    assert found["MLX-LM"] == found["llama.cpp"] == ()
    assert not any(verdict.caches for verdict in engines(outputs["own"]).verdicts)


def test_experts_that_are_joined(tmp_path: Path) -> None:
    """vLLM 0.32 loads a Mixtral with joined experts without a word, and answers with one token again and again."""
    source = save_family(tmp_path / "source", "mixtral")
    joined = tmp_path / "joined"
    shutil.copytree(source, joined)
    checkpoint = open_checkpoint(source)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    save_file(tensors, joined / "model.safetensors", metadata={"format": "pt"})
    headwise.convert(source, tmp_path / "mqa", to="mqa", evaluate=False)
    (refused,) = (verdict for verdict in engines(joined).verdicts if verdict.engine == "vLLM")
    assert "one by one" in str(refused.why)
    (served,) = (verdict for verdict in engines(tmp_path / "mqa").verdicts if verdict.engine == "vLLM")
    assert served.serves
