"""Measuring in engines: a caller that says in one line what an engine's process did, and engines where there are any.

Processes that fail are real ones, whose interpreter is a script of the test's. Engines are run where they can be
imported here, or by the interpreters that HEADWISE_LLAMA_CPP_PYTHON, HEADWISE_MLX_LM_PYTHON and HEADWISE_VLLM_PYTHON
name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise
from headwise.conversion import export_gguf
from headwise.measure.evaluation import score_window
from headwise.runtime.quantization.transform_code import read_codes
from headwise.serving.engines import worker
from tests.byte_level import save_byte_level
from tests.cli.conftest import Result
from tests.real_models import tiny_model
from tests.serving.engines.conftest import HEAD, engine_python, interrupted

HANGS = "#!/bin/sh\necho $$ > {file}\nexec sleep 600\n"


def arguments(models: Path, engine: str, *others: object) -> tuple[object, ...]:
    model = models / ("model.gguf" if engine == "llama.cpp" else "folder")
    return ("evaluate", model, "--engine", engine, "--text", models / "text.txt", "--window", 64, *others)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            "echo some log >&2; echo 'ggml.c:12: GGML_ASSERT(width) failed' >&2; kill -ABRT $$",
            "was ended by SIGABRT; its last words: ggml.c:12: GGML_ASSERT(width) failed",
        ),
        ("kill -ILL $$", "was ended by SIGILL (a build for another processor ends so); its last words: none"),
        ("read request; echo nonsense", "ended with status 0 and no result; its last words: nonsense"),
        ("read request; echo '[1, 2]'", "ended with status 0 and no result; its last words: [1, 2]"),
        ("read request; echo '{\"a\": 1}'", 'ended with status 0 and no result; its last words: {"a": 1}'),
        ("echo 'KeyError: 7' >&2; exit 3", "ended with status 3 and no result; its last words: KeyError: 7"),
        ('read request; echo \'{"missing": "diskcache"}\'', "asks for diskcache in "),
        ('read request; echo \'{"refused": "the head"}\'', "refuses this: the head"),
    ],
)
def test_an_engine_that_fails_is_one_line(
    refused: Callable[..., str], models: Path, interpreter: Callable[[str], Path], script: str, line: str
) -> None:
    python = interpreter(f"#!/bin/sh\n{script}\n")
    said = refused(*arguments(models, "llama.cpp", "--cache", "q4_0", "--engine-python", python))
    assert "engine = 'llama.cpp': " in said
    assert line in said


def test_an_engine_that_is_not_installed(refused: Callable[..., str], models: Path, tmp_path: Path) -> None:
    environment = tmp_path.parent / f"{tmp_path.name} environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python, packages = environment / "bin/python", next(environment.glob("lib/python*/site-packages"))
    for part in Path(np.__file__).parents[1].glob("numpy*"):
        (packages / part.name).symlink_to(part)
    for engine, package in (("llama.cpp", "llama-cpp-python==0.3.36"), ("mlx", "mlx-lm")):
        said = refused(*arguments(models, engine, "--engine-python", python))
        assert f"is not installed in {python}: {python} -m pip install '{package}'" in said


@pytest.mark.parametrize(
    ("engine", "others", "line"),
    [
        ("ollama", (), "--engine = 'ollama': must be llama.cpp or mlx-lm or mlx or vllm"),
        ("llama.cpp", ("--cache", "int4"), "--cache = 'int4': must be f16 or bf16 or f32 or q8_0 or q5_1"),
        ("llama.cpp", ("--cache", "q8_0/q4_0/q4_0"), "--cache = 'q8_0/q4_0/q4_0': must be"),
        ("mlx", ("--cache", "q4_0"), "--cache = 'q4_0': must be 8 or 4 in MLX-LM"),
        ("llama.cpp", ("--window", "100000"), "--window = 100000: must be at least 2 and at most 2048"),
        (
            "llama.cpp",
            ("--engine-python", "/no/python"),
            "--engine-python = '/no/python': cannot be started: No",
        ),
        ("llama.cpp", ("--dtype", "float32"), "--dtype = 'float32': must be left out with --engine"),
        ("llama.cpp", ("--choices", "piqa.jsonl"), "--choices = 'piqa.jsonl': must be left out with --engine"),
    ],
)
def test_what_cannot_be_measured(
    refused: Callable[..., str], models: Path, engine: str, others: tuple[str, ...], line: str
) -> None:
    assert line in refused(*arguments(models, engine, *others))


def test_a_model_of_the_wrong_kind(refused: Callable[..., str], models: Path) -> None:
    folder, file, text = models / "folder", models / "model.gguf", models / "text.txt"
    said = refused("evaluate", folder, "--engine", "llama.cpp", "--text", text)
    assert f"llama.cpp reads GGUF; instead: headwise export {folder} model.gguf" in said
    said = refused("evaluate", file, "--engine", "llama.cpp", "--against", folder, "--text", text)
    assert said.startswith(f"headwise: --against = '{folder}': llama.cpp reads GGUF")
    assert "MLX-LM reads folders of safetensors" in refused("evaluate", file, "--engine", "mlx", "--text", text)


def test_a_text_shorter_than_a_window(refused: Callable[..., str], models: Path, here: Path) -> None:
    said = refused("evaluate", models / "model.gguf", "--engine", "llama.cpp", "--text", "text.txt")
    assert "must be at least one window of 2048 tokens" in said


def test_an_interruption_leaves_no_process(models: Path, tmp_path: Path, interpreter: Callable[[str], Path]) -> None:
    told = tmp_path / "process"
    python = interpreter(HANGS.format(file=told))
    words = [str(word) for word in arguments(models, "llama.cpp", "--engine-python", python)]
    assert interrupted(words, told) == "headwise: interrupted\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


class Transformers:
    """A transformers model as the worker sees one of an engine."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.vocabulary, self.device = model, 324, "cpu"

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Iterator[worker.Array]:
        logits = self.model(torch.tensor([ids])).logits[0].float().numpy()
        for start in range(0, len(ids), worker.CHUNK):
            yield logits[start : start + worker.CHUNK]


@pytest.mark.parametrize("length", [9, 16, 17, 40])
def test_windows_are_scored_as_those_of_transformers(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(worker, "CHUNK", 16)
    monkeypatch.setattr(worker, "ROWS", 6)
    pair = {"model": tiny_model(vocab_size=324).float(), "against": tiny_model(vocab_size=324, seed=1).float()}
    ids = torch.randint(324, (length,), generator=torch.Generator().manual_seed(0))
    expected = score_window(pair, ids)
    models = {name: Transformers(model) for name, model in {**pair, "another": pair["model"]}.items()}
    found = worker.score_window(models, ids.tolist())  # type: ignore[arg-type]
    assert found["model"].keys() == expected.keys()
    for key, values in found["model"].items():
        torch.testing.assert_close(torch.tensor(values).double(), expected[key], rtol=1e-4, atol=1e-5)
    assert found["another"] == found["model"]
    assert found["against"] == {"nll": found["model"]["reference_nll"]}


def test_llama_cpp(cli: Callable[..., Result], models: Path) -> None:
    python = engine_python("llama_cpp", "HEADWISE_LLAMA_CPP_PYTHON")
    text, file = models / "text.txt", models / "model.gguf"
    sizes = {"text": text, "window": 768, "windows": 2, "context": 32}
    run = {"engine": "llama.cpp", "engine_python": python, **sizes}
    ours = headwise.evaluate(file, **sizes, cache="llama.cpp:q4_0", against=file)
    result = headwise.evaluate_in_engine(file, cache="q4_0", **run)
    assert result.reference is not None
    assert result.reference.perplexity == pytest.approx(ours.reference.perplexity, rel=1e-2)
    assert result.kl == pytest.approx(ours.kl, rel=0.2)
    assert result.cache_bytes / result.reference.cache_bytes == pytest.approx(18 / 64, rel=0.02)
    assert result.cache_bytes_per_token == pytest.approx(4 * 2 * 2 * HEAD * 18 / 32, rel=0.02)
    assert 0 < result.kl < result.kl_999
    assert (result.windows, result.window, result.cache, result.against) == (2, 768, "q4_0", str(file))
    assert result.engine.startswith("llama-cpp-python ")
    alone = headwise.evaluate_in_engine(file, **run)
    assert (alone.reference, alone.perplexity) == (None, pytest.approx(result.reference.perplexity, rel=1e-6))
    mixed = headwise.evaluate_in_engine(file, against=file, cache="q8_0/q4_0", **run)
    assert mixed.kl < result.kl
    said = cli(*arguments(models, "llama.cpp", "--cache", "q8_0", "--engine-python", python, "--json"))
    assert said.status == 0, said.err
    document = json.loads(said.out)
    assert document["cache"] == "q8_0"
    assert document["reference_cache_bytes"] > document["cache_bytes"]


def test_llama_cpp_refuses_in_its_own_words(
    refused: Callable[..., str], models: Path, here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = engine_python("llama_cpp", "HEADWISE_LLAMA_CPP_PYTHON")
    place = tmp_path_factory.mktemp("narrow")
    tiny_model("llama", vocab_size=324, hidden_size=144).float().save_pretrained(place / "folder")
    save_byte_level(place / "folder", 320, "smollm")
    export_gguf(place / "folder", place / "model.gguf", outtype="f32")
    words = ("--engine", "llama.cpp", "--engine-python", python, "--cache", "q4_0", "--window", 16)
    said = refused("evaluate", place / "model.gguf", "--text", "text.txt", *words)
    assert "refuses this: llama_init_from_model: K cache type q4_0 with block size 32 does not divide" in said


def test_mlx_lm(models: Path) -> None:
    python = engine_python("mlx_lm", "HEADWISE_MLX_LM_PYTHON")
    sizes = {"text": models / "text.txt", "window": 600, "windows": 1, "context": 16}
    ours = headwise.evaluate(models / "folder", **sizes)
    run = {"engine": "mlx", "engine_python": python, **sizes}
    eight, four = (headwise.evaluate_in_engine(models / "folder", cache=bits, **run) for bits in ("8", "4"))
    assert eight.reference is not None
    assert eight.reference.perplexity == pytest.approx(ours.perplexity, rel=1e-3)
    assert 0 < eight.kl < four.kl
    assert four.cache_bytes / eight.cache_bytes == pytest.approx((4 * HEAD + 64) / (8 * HEAD + 64))


@pytest.mark.parametrize("to", ["same", "mla"])
def test_codes_in_vllm(models: Path, tmp_path: Path, to: str) -> None:
    """A cache in codes takes the bytes of its rows, and each layer computes what these stand for.

    Whole models are compared by perplexity: which codes are nearest depends on the last digits of values.
    """
    python = engine_python("vllm", "HEADWISE_VLLM_PYTHON")
    sizes = {"text": models / "text.txt", "window": 600, "windows": 1, "context": 16}
    folder = tmp_path / "coded"
    headwise.convert(
        models / "folder", folder, to=to, kv_bytes=0.3, calibrate=models / "text.txt", evaluate=False,
        calibration_tokens=1024, without=["refine", "sequence"],
    )  # fmt: skip
    ours = headwise.evaluate(folder, **sizes)
    result = headwise.evaluate_in_engine(folder, engine="vllm", engine_python=python, **sizes)
    assert result.perplexity == pytest.approx(ours.perplexity, rel=0.1)  # it runs float32 in 16 bits
    rows = [code.token_bytes + -(-8 * code.width // 256) for code in read_codes(folder).values()]
    assert result.cache_bytes_per_token == pytest.approx(sum(rows), rel=0.01)
    script = Path(__file__).parent / "codes_in_vllm.py"
    done = subprocess.run([python, str(script), str(folder)], check=True, capture_output=True, text=True)
    layers = json.loads(done.stdout.splitlines()[-1])
    assert [layer["tokens"] for layer in layers] == [110] * len(rows)
    assert all(layer["equal"] and layer["difference"] < 1e-5 for layer in layers)


def test_vllm(models: Path, refused: Callable[..., str]) -> None:
    python = engine_python("vllm", "HEADWISE_VLLM_PYTHON")
    sizes = {"text": models / "text.txt", "window": 600, "windows": 1, "context": 16}
    ours = headwise.evaluate(models / "folder", **sizes)
    run = {"engine": "vllm", "engine_python": python, "against": models / "folder"}
    result = headwise.evaluate_in_engine(models / "folder", **run, **sizes)
    assert result.perplexity == pytest.approx(ours.perplexity, rel=1e-2)  # it runs float32 in 16 bits
    assert (result.kl, result.perplexity_ratio) == (pytest.approx(0, abs=1e-6), pytest.approx(1))
    assert result.cache_bytes_per_token == pytest.approx(ours.cache_bytes_per_token / 2, rel=0.01)
    said = refused(*arguments(models, "vllm", "--cache", "q4_0", "--engine-python", python))
    assert "refuses this: ValidationError: " in said
