"""What preparing finds out of what it wrote: that it is the source, and what caches lose of both."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.base.progress import silent
from headwise.conversion.preparation import stored as folder_module
from headwise.conversion.preparation.change import Change
from headwise.conversion.preparation.proof import check_written
from headwise.errors import ArgumentError, CheckpointError
from headwise.models.checkpoints import Checkpoint, open_checkpoint
from headwise.models.checkpoints.gguf_in_place import Rows
from tests.cli.conftest import Result
from tests.conversion.preparation.test_gguf import write_model
from tests.conversion.preparation.test_loss import TEXT, uneven
from tests.serving.engines.conftest import engine_python, interrupted

CACHE = "llama.cpp:q4_0"
pytestmark = pytest.mark.usefixtures("short_search")
WAITS = '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho $$ > {file}\nexec sleep 600\n'
"""An interpreter that says it has the engine, and never answers."""


SMALL = 70
"""A channel of keys, which is made small with the other one of its pair, 32 further."""


def exchange(rows: torch.Tensor) -> None:
    rows[[0, 1]] = rows[[1, 0]]


FAULTS: dict[str, dict[str, Callable[[torch.Tensor], Any]]] = {
    "a factor of a row": {"k_proj.weight": lambda rows: rows[5].mul_(2)},
    "a sign": {"q_proj.weight": lambda rows: rows[5].neg_()},
    "rows exchanged in both": {"q_proj.weight": exchange, "k_proj.weight": exchange},
    "a bias": {"k_proj.bias": lambda bias: bias[5].add_(1)},
    "rows that are small beside others": {"k_proj.weight": lambda rows: rows[SMALL].mul_(1.02)},
    "a value": {"v_proj.weight": lambda rows: rows[5].mul_(1.1)},
    "a number that is none": {"q_proj.weight": lambda rows: rows[5].fill_(1e200)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_any_wrong_row_is_found(fault: str, tmp_path: Path) -> None:
    sources = [uneven(tmp_path / name) for name in ("source", "written")]
    for source in sources:
        file = source / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.1.self_attn.k_proj.weight"][[SMALL, SMALL + 32]] *= 1e-6
        tensors["model.layers.1.self_attn.k_proj.bias"][[SMALL, SMALL + 32]] = 0
        if source is sources[1]:
            for name, change in FAULTS[fault].items():
                change(tensors[f"model.layers.1.self_attn.{name}"])
        save_file(tensors, file, {"format": "pt"})
    source, written = map(open_checkpoint, sources)
    changes = [Change.none(layer) for layer in source.spec.layers]  # type: ignore[arg-type]
    assert check_written(source, source, changes, "out", silent) == 0
    with pytest.raises(
        CheckpointError, match=r"output = 'out': computes something else.*in layer 1: products are off"
    ):
        check_written(source, written, changes, "out", silent)


def test_a_folder_that_came_out_wrong_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = uneven(tmp_path / "source")
    right = folder_module.changed

    def wrong(*arguments: Any) -> dict[str, torch.Tensor]:
        state = right(*arguments)
        state["k_proj.weight"][3] *= 2
        return state

    monkeypatch.setattr(folder_module, "changed", wrong)
    with pytest.raises(CheckpointError, match="computes something else than its source"):
        headwise.prepare(source, tmp_path / "out", cache=CACHE)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_file_that_came_out_wrong_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model.gguf", "Q8_0")
    (tmp_path / "out.gguf").write_text("old")
    right = Rows.multiply
    monkeypatch.setattr(Rows, "multiply", lambda rows, factors: right(rows, np.maximum(factors, 1 / factors)))
    with pytest.raises(CheckpointError, match="computes something else than its source"):
        headwise.prepare(tmp_path / "model.gguf", tmp_path / "out.gguf", cache=CACHE, overwrite=True)
    assert (tmp_path / "out.gguf").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_another_tensor_that_came_out_wrong_is_found_on_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = uneven(tmp_path / "source"), tmp_path / "text.txt"
    text.write_text(TEXT)
    module = importlib.import_module("headwise.conversion.preparation.prepare")

    def spoiling(source: Checkpoint, written: Checkpoint, *others: Any) -> float:
        products = check_written(source, written, *others)
        tensors = load_file(written.path / "model.safetensors")
        tensors["model.layers.0.mlp.down_proj.weight"] *= 3
        save_file(tensors, written.path / "model.safetensors", {"format": "pt"})
        return products

    monkeypatch.setattr(module, "check_written", spoiling)
    with pytest.raises(CheckpointError, match=r"computes something else than its source: KL .* on .*text\.txt"):
        headwise.prepare(source, tmp_path / "out", cache=CACHE, evaluate=text)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt"}


def test_without_a_text_products_are_compared_alone(tmp_path: Path) -> None:
    made = headwise.prepare(uneven(tmp_path / "source"), tmp_path / "out", cache=CACHE)
    assert made.proof.products < 1e-12
    assert (made.proof.text, made.proof.differences, made.proof.caches) == (None, (), ())


def test_on_a_text_it_is_what_evaluate_measures(tmp_path: Path) -> None:
    source, text = uneven(tmp_path / "source"), tmp_path / "text.txt"
    text.write_text(TEXT)
    caches = [CACHE, "llama.cpp:q8_0"]
    made = headwise.prepare(source, tmp_path / "out", cache=caches, evaluate=text, evaluation_windows=3)
    proof = made.proof
    assert [(one.dtype, one.tokens) for one in proof.differences] == [("float32", 64), ("float64", 64)]
    narrow, wide = proof.differences
    assert 0 < narrow.largest < 1e-3
    assert narrow.kl < 1e-7
    assert wide.largest < 1e-10
    assert [(one.cache, one.engine) for one in proof.caches] == [(cache, None) for cache in caches]
    for one in proof.caches:
        for folder, loss in ((source, one.before), (tmp_path / "out", one.after)):
            ours = headwise.evaluate(folder, against=source, text=text, cache=one.cache, windows=3)
            for name in ("perplexity", "perplexity_ratio", "kl", "kl_999", "top1_agreement"):
                assert getattr(loss, name) == pytest.approx(getattr(ours, name), rel=1e-6), name
        assert one.after.kl < 0.3 * one.before.kl
    assert (proof.text, proof.window, proof.tokens) == (str(text), 64, 3 * 63)
    assert any("not measured in llama.cpp itself" in note for note in made.notes) or len(proof.caches) > 2
    assert json.loads(json.dumps(made.to_dict()))["proof"]["caches"][0]["after"]["kl"] == proof.caches[0].after.kl


def test_refitting_is_said_to_be_inexact(tmp_path: Path) -> None:
    source, text = uneven(tmp_path / "source", seen=1), tmp_path / "text.txt"
    text.write_text(TEXT)
    made = headwise.prepare(source, tmp_path / "out", cache=CACHE, refit=True, evaluate=text, evaluation_windows=1)
    assert made.proof.products < 1e-12  # beside the source with shifted biases
    full = headwise.evaluate(tmp_path / "out", against=source, text=text, windows=1, dtype="float32")
    assert made.proof.differences[0].kl == pytest.approx(full.kl, rel=0.05)
    assert made.proof.differences[0].kl > 1e-6
    assert made.proof.differences[0].largest > 1e-3


def test_the_command_prints_it(cli: Callable[..., Result], models: Path, here: Path) -> None:
    source = models / "model.gguf"
    said = cli("prepare", source, "out.gguf", "--for", CACHE)
    assert said.status == 0, said.err
    assert "read again from the disk, products of queries and keys are the source's" in said.out
    assert f"headwise evaluate out.gguf --against {source} --cache {CACHE} --text TEXT" in said.out
    assert said.out.endswith("serve it:\n  llama-server -m out.gguf -fa on -ctk q4_0 -ctv q4_0\n")
    folder = cli("prepare", models / "folder", "out", "--for", CACHE, "--for", "vllm:fp8").out
    lines = ("headwise export out model.gguf", "llama-server -m model.gguf -fa on -ctk q4_0 -ctv q4_0")
    assert folder.splitlines()[-3:] == [f"  {line}" for line in (*lines, "vllm serve out --kv-cache-dtype fp8")]
    made = json.loads(cli("prepare", source, "out.gguf", "--for", CACHE, "--overwrite", "--json").out)
    ratios = [layer["loss"][CACHE] for layer in made["layers"]]
    most = f"×{max(ratios):.3f} in layer {ratios.index(max(ratios))}, where least is gained"
    for words in (f"lose ×{geometric_mean(ratios):.3f} of what they lost (geometric mean of {len(ratios)}", most):
        assert words in " ".join(said.out.split())
    (here / "short.txt").write_text((models / "text.txt").read_text()[:200])
    said = cli("prepare", source, "out.gguf", "--for", CACHE, "--overwrite", "--evaluate", "short.txt")
    assert said.status == 0, said.err
    assert "log-probabilities in float32 are the source's up to" in said.out
    assert "llama.cpp:q4_0 simulated" in said.out
    assert "tokens alone, too few to tell what is lost" in " ".join(said.out.split())
    assert (here / "out.gguf").is_file()


def test_an_interpreter_that_is_named_for_nothing(
    refused: Callable[..., str], models: Path, here: Path, tmp_path: Path
) -> None:
    words = ("prepare", models / "folder", "out", "--engine-python")
    assert "--engine-python = '/no': needs --evaluate TEXT" in refused(*words, "/no", "--for", CACHE)
    on_a_text = ("--evaluate", "text.txt")
    said = refused(*words, "/no", "--for", CACHE, *on_a_text)
    assert "--engine-python = '/no': cannot be started" in said
    said = refused(*words, sys.executable, "--for", "sglang:fp4", *on_a_text)
    assert "is for llama.cpp or mlx-lm or mlx or vllm, not sglang" in said
    said = refused(*words, "/bin/false", "--for", CACHE, *on_a_text)
    assert "has no llama.cpp: /bin/false -m pip install 'llama-cpp-python==0.3.36'" in said
    assert "could not be read" in refused(
        "prepare", models / "folder", "out", "--for", CACHE, "--evaluate", "none.txt"
    )


def test_a_text_that_the_model_is_fitted_on_proves_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    with pytest.raises(ArgumentError, match="is calibrated or trained on"):
        headwise.prepare(uneven(tmp_path / "source"), tmp_path / "out", cache=CACHE, calibrate=text, evaluate=text)
    assert not (tmp_path / "out").exists()


def test_an_interruption_leaves_what_is_written(
    models: Path, here: Path, tmp_path: Path, interpreter: Callable[[str], Path]
) -> None:
    told = tmp_path / "process"
    python = interpreter(WAITS.format(file=told))
    (here / "short.txt").write_text((models / "text.txt").read_text()[:300])
    words = [str(models / "model.gguf"), "out.gguf", "--for", CACHE, "--evaluate", "short.txt"]
    assert interrupted(["prepare", *words, "--engine-python", str(python)], told).endswith(
        "headwise: interrupted; out.gguf is written and was checked; only what it loses was not measured to the end\n"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
    assert {path.name for path in here.iterdir()} == {
        "text.txt",
        "short.txt",
        "process",
        "out.gguf",
        "out.gguf.sha256",
    }
    assert open_checkpoint(here / "out.gguf").tensors.keys() == open_checkpoint(models / "model.gguf").tensors.keys()


@pytest.mark.parametrize("source", ["model.gguf", "folder"])
def test_in_llama_cpp_itself(source: str, models: Path, tmp_path: Path) -> None:
    python, text = engine_python("llama_cpp", "HEADWISE_LLAMA_CPP_PYTHON"), tmp_path / "text.txt"
    text.write_text((models / "text.txt").read_text()[:1200])
    made = headwise.prepare(
        models / source, tmp_path / "out.gguf", cache=CACHE, evaluate=text, engine_python=python
    )  # fmt: skip
    simulated, real = made.proof.caches
    assert (real.cache, str(real.engine).partition(" ")[0]) == (CACHE, "llama-cpp-python")
    for ours, theirs in ((simulated.before, real.before), (simulated.after, real.after)):
        assert theirs.kl == pytest.approx(ours.kl, rel=0.2)
        assert theirs.perplexity == pytest.approx(ours.perplexity, rel=1e-2)
    assert {path.name for path in tmp_path.iterdir()} == {"out.gguf", "text.txt"}


def test_in_mlx_lm_itself(models: Path, tmp_path: Path) -> None:
    python, text = engine_python("mlx_lm", "HEADWISE_MLX_LM_PYTHON"), tmp_path / "text.txt"
    text.write_text((models / "text.txt").read_text()[:600])
    made = headwise.prepare(models / "folder", tmp_path / "out", cache="mlx:4", evaluate=text, engine_python=python)
    simulated, real = made.proof.caches
    assert str(real.engine).startswith("mlx-lm ")
    assert real.after.kl == pytest.approx(simulated.after.kl, rel=0.3)


def test_an_engine_that_opens_no_folder_is_noted(models: Path, tmp_path: Path) -> None:
    python, text = engine_python("llama_cpp", "HEADWISE_LLAMA_CPP_PYTHON"), tmp_path / "text.txt"
    text.write_text((models / "text.txt").read_text()[:300])
    made = headwise.prepare(
        models / "folder", tmp_path / "out", cache=CACHE, evaluate=text, engine_python=python
    )  # fmt: skip
    assert [one.engine for one in made.proof.caches] == [None]
    assert any("not measured in llama.cpp itself: " in note and "reads GGUF" in note for note in made.notes)
