"""Healing with an engine's own cache in place: what is rounded, what is learnt, and what a GGUF file keeps."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.conversion import export_gguf
from headwise.conversion.healing.optimizer import TrainingState
from headwise.conversion.healing.trained import round_in_training, trained_format
from headwise.errors import HeadwiseError
from headwise.models.checkpoints import open_checkpoint
from headwise.runtime.hf import default_cache
from headwise.runtime.kernels import attend
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.quantization.codec import Stored
from headwise.runtime.quantization.formats import parse_format
from tests.byte_level import save_byte_level
from tests.conversion.test_resumed import StoppedError, stop_at
from tests.real_models import save_tiny
from tests.tiny_families import answer

Q4 = "llama.cpp:q4_0"
TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 60


def model_of(folder: Path, model_type: str = "qwen2") -> Path:
    """A tiny model with heads of 32 channels and a tokenizer that GGUF has a place for."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    save_tiny(folder, model_type, **sizes)
    save_byte_level(folder, 320)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_of(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def model(source: Path) -> Path:
    """The source with other biases of queries and keys, which training finds again."""
    folder = shutil.copytree(source, source.parent / "off")
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    for name in weights:
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            weights[name] += torch.randn_like(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def keywords(source: Path) -> dict[str, Any]:
    return {
        "teacher": source,
        "text": source.parent / "text.txt",
        "cache": Q4,
        "steps": 40,
        "window": 32,
        "measurements": 4,
        "learning_rate": 1e-3,
        "dtype": "float32",
        "recall": False,
        "evaluate": False,
    }


@pytest.mark.parametrize(
    "spelling", [Q4, "llama.cpp:q8_0/iq4_nl", "mlx:4", "vllm:fp8", "vllm:int4_per_token_head", "sglang:fp4"]
)
def test_what_is_trained_on_is_what_the_cache_gives_back(spelling: str) -> None:
    code = parse_format(spelling).interleaved()  # type: ignore[union-attr]
    query, key, value = torch.randn(2, 4, 5, 64), torch.randn(2, 2, 5, 64), torch.randn(2, 2, 5, 64)
    stored = Stored(code.encode(key, value), (64, 64), torch.float32)
    wanted = code.attend(query, stored, Scoring(None, True, 0.125))
    for states in (query, key, value):
        states.requires_grad_()
    rounded = code.rounded(query, key, value)
    out = attend(*rounded, None, 0.0, True, 0.125)
    torch.testing.assert_close(out.detach(), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.equal(rounded[1], key)
    # Derivatives are those at the rounded numbers, handed on to what was rounded.
    out.square().sum().backward()
    leaves = [states.detach().requires_grad_() for states in rounded]
    attend(*leaves, None, 0.0, True, 0.125).square().sum().backward()
    for states, leaf in zip((query, key, value), leaves, strict=True):
        torch.testing.assert_close(states.grad, leaf.grad)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox", "phi3"])
def test_a_model_in_training_answers_as_with_the_cache(model_type: str, tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", model_type)
    model, checkpoint = headwise.load(folder, dtype="float32"), open_checkpoint(folder)
    ids = torch.randint(3, 320, (2, 20))
    plain = answer(model, ids)
    with default_cache(model, Q4):
        wanted = answer(model, ids)
    round_in_training(model, checkpoint, trained_format(checkpoint, Q4))
    error = float((answer(model, ids, use_cache=False) - wanted).norm())
    assert error < 0.02 * float((wanted - plain).norm())  # a number between two codes may get the other one


def test_layers_that_the_engine_leaves_as_they_are_stay_so(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2", hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    model, checkpoint = headwise.load(folder, dtype="float32"), open_checkpoint(folder)
    ids = torch.randint(3, 97, (1, 20))
    plain = answer(model, ids)
    round_in_training(model, checkpoint, trained_format(checkpoint, "vllm:turboquant_4bit_nc"))  # two at each end
    torch.testing.assert_close(answer(model, ids), plain, rtol=1e-4, atol=1e-4)


def test_a_folder_loses_less_in_the_cache_that_it_was_trained_for(
    model: Path, source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    exam = tmp_path / "exam.txt"
    exam.write_text(TEXT[1000:])
    report = headwise.heal(model, tmp_path / "out", **{**keywords, "evaluate": exam})
    assert report.cache == Q4
    assert report.held_out[-1][1] < 0.8 * report.held_out[0][1]
    assert report.before is not None
    assert report.after is not None
    for folder, reported in ((model, report.before), (tmp_path / "out", report.after)):
        again = headwise.evaluate(folder, text=exam, against=source, windows=2, cache=Q4)
        assert again.kl == pytest.approx(reported.kl, rel=1e-6)
    assert report.after.kl < 0.9 * report.before.kl
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    assert any(not torch.equal(before[name], after[name]) for name in before if "k_proj" in name)
    assert f"rounded as `{Q4}`" in (tmp_path / "out" / "README.md").read_text()


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    return {one.name: (one.tensor_type.name, one.data.tobytes()) for one in gguf.GGUFReader(path).tensors}


def test_of_a_gguf_only_plain_numbers_are_trained(
    model: Path, source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    export_gguf(model, file, outtype="q8_0")
    content = file.read_bytes()
    exam = tmp_path / "exam.txt"
    exam.write_text(TEXT[::-1])
    changes = {"learning_rate": 3e-2, "steps": 80, "evaluate": exam}
    report = headwise.heal(file, tmp_path / "out.gguf", **{**keywords, **changes})
    assert report.before is not None
    assert report.after is not None
    assert report.after.kl < 0.8 * report.before.kl
    assert file.read_bytes() == content
    files = {"exam.txt", "model.gguf", "model.gguf.sha256", "out.gguf", "out.gguf.sha256"}
    assert {path.name for path in tmp_path.iterdir()} == files
    before, after = tensors_of(file), tensors_of(tmp_path / "out.gguf")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name, (kind, _) in before.items() if kind == "F32"}
    assert report.trained_parameters == sum(len(before[name][1]) // 4 for name in changed)
    old, new = (np.frombuffer(path.read_bytes(), np.uint8) for path in (file, tmp_path / "out.gguf"))
    assert int((old != new).sum()) <= 4 * report.trained_parameters
    again = headwise.evaluate(tmp_path / "out.gguf", text=exam, against=source, windows=2, cache=Q4)
    assert again.kl == pytest.approx(report.after.kl, rel=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_gguf_without_codes_learns_what_its_folder_learns(
    model_type: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    """The file has rows of llama's queries and keys in another order."""
    folder, file = model_of(tmp_path / "model", model_type), tmp_path / "model.gguf"
    export_gguf(folder, file, outtype="f32")
    keywords |= {"teacher": folder, "steps": 4}
    one = headwise.heal(folder, tmp_path / "out", **keywords)
    other = headwise.heal(file, tmp_path / "out.gguf", **keywords)
    assert other.losses == pytest.approx(one.losses, rel=1e-3)
    assert other.trained_parameters == one.trained_parameters
    old, wanted, written = (open_checkpoint(path) for path in (folder, tmp_path / "out", tmp_path / "out.gguf"))
    for name in wanted.tensors:
        moved = (wanted.read(name) - old.read(name)).float()
        error = (written.read(name) - wanted.read(name)).float()
        assert float(error.norm()) <= 0.05 * float(moved.norm()), name


def test_a_killed_run_on_a_gguf_goes_on(
    keywords: dict[str, Any], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    export_gguf(source, file, outtype="q8_0")
    keywords["steps"] = 12
    whole = headwise.heal(file, tmp_path / "whole.gguf", **keywords)
    with monkeypatch.context() as patch:
        stop_at(patch, TrainingState, "save", 3, after=True)
        with pytest.raises(StoppedError):
            headwise.heal(file, tmp_path / "out.gguf", **keywords)
    assert not (tmp_path / "out.gguf").exists()
    assert headwise.heal(file, tmp_path / "out.gguf", **keywords).losses == whole.losses
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": "int4"}, "cache = 'int4': must be an engine's own cache"),
        ({"cache": "llama.cpp:f16"}, "cache = 'llama.cpp:f16': keeps keys and values as they are"),
        ({"cache": "mlx:4"}, "cache = 'mlx:4': has groups of 64 channels"),
    ],
)
def test_other_caches_are_refused(
    changes: dict[str, Any], message: str, source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(HeadwiseError, match=re.escape(message)):
        headwise.heal(source, tmp_path / "out", **{**keywords, **changes})
    assert not any(tmp_path.iterdir())


def test_models_without_such_a_cache_are_refused(source: Path, keywords: dict[str, Any], tmp_path: Path) -> None:
    headwise.convert(source, tmp_path / "mla", to="mla", kv_budget=0.5, evaluate=False)
    with pytest.raises(HeadwiseError, match=r"layer 0 = .*has no keys and values of its own"):
        headwise.heal(tmp_path / "mla", tmp_path / "out", **keywords)
    coded = {"to": "same", "kv_bytes": 0.12, "calibrate": keywords["text"], "evaluate": False}
    headwise.convert(source, tmp_path / "coded", **coded)
    with pytest.raises(HeadwiseError, match=r"cache = .*must be left out: the model's cache has codes of its own"):
        headwise.heal(tmp_path / "coded", tmp_path / "out", **keywords)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("output", "changes", "message"),
    [
        ("out", {}, "must end in .gguf"),
        ("model.gguf", {"overwrite": True}, "must not be the source"),
        ("there.gguf", {}, "exists; say --overwrite"),
        ("out.gguf", {"train": "lora"}, "train = 'lora': must be another for a .gguf"),
        ("out.gguf", {"train": "new"}, "leaves nothing to train"),
        ("out.gguf", {"cache": None}, "cache = None: is required for a .gguf"),
        ("out.gguf", {"cache": "vllm:fp8"}, "cache = 'vllm:fp8': is a cache of vllm, which loads no .gguf"),
    ],
)
def test_bad_requests_for_a_gguf_are_refused_before_any_work(
    output: str, changes: dict[str, Any], message: str, source: Path, keywords: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    export_gguf(source, file, outtype="q8_0")
    (tmp_path / "there.gguf").write_text("something")
    content = file.read_bytes()
    with pytest.raises(HeadwiseError, match=re.escape(message)):
        headwise.heal(file, tmp_path / output, **{**keywords, **changes})
    assert file.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "model.gguf.sha256", "there.gguf"]
