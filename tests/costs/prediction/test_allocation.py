"""Caches as engines allocate them, beside what llama.cpp's log and vLLM's functions said of toy models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.costs.formulas import model as costs
from headwise.costs.prediction import ALLOCATING_ENGINES, Pass, allocation, largest_batch, peak_memory, predict
from headwise.costs.prediction.memory import BLOCK, CELLS
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import read_config, read_spec

KEPT = json.loads((Path(__file__).parents[3] / "benchmarks/results/allocations.json").read_text())
CONTEXTS = KEPT["settings"]["contexts"]
ROWS: dict[str, dict[str, Any]] = KEPT["rows"]
for _row in ROWS.values():  # the toys were asked for contexts beyond their positions, where every window acts
    _row["config"] |= {"max_position_embeddings": max(tokens for tokens, _ in CONTEXTS) + 1}


def rows(engine: str) -> list[str]:
    return [name for name, row in ROWS.items() if row["engine"] == engine]


@pytest.mark.parametrize("name", rows("llama.cpp"))
def test_llama_cpps_log_says_the_same(name: str) -> None:
    row = ROWS[name]
    model = read_config(row["config"])
    for (tokens, sequences), parts in zip(CONTEXTS, row["allocated"], strict=True):
        found = allocation(model, Pass(batch=sequences, total=tokens), "llama.cpp").bytes
        # The log has two decimals of MiB for each part of the cache.
        assert found / 2**20 == pytest.approx(sum(parts), abs=0.0051 * len(parts)), (tokens, sequences)


@pytest.mark.parametrize("name", rows("vllm"))
def test_vllms_functions_say_the_same(name: str) -> None:
    row = ROWS[name]
    model = read_config(row["config"])
    for (tokens, sequences), one in zip(CONTEXTS, row["allocated"], strict=True):
        assert allocation(model, Pass(batch=sequences, total=tokens), "vllm").bytes == sequences * one


def test_models_of_every_kind_are_among_those_that_llama_cpp_ran() -> None:
    models = [read_config(ROWS[name]["config"]) for name in rows("llama.cpp")]
    assert len(models) >= 30
    kinds = {spec.mechanism for model in models for spec in model.layers}
    assert {"mla", "gqa", "mqa", "mamba", "mamba2", "short_conv"} <= kinds
    assert any(spec.sliding_window for model in models for spec in model.layers)
    assert len(rows("vllm")) >= 20
    said = (Path(__file__).parents[3] / "docs/prediction.md").read_text().split()
    assert f"log of {len(models)} models" in " ".join(said)
    assert f"plans the cache of {len(rows('vllm'))}." in " ".join(said)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-oss-120b", "gemma-2-9b", "deepseek-v3", "mistral-7b"])
@pytest.mark.parametrize("engine", ALLOCATING_ENGINES)
def test_one_more_sequence_does_not_fit(name: str, engine: Any) -> None:
    model, step = read_spec(name), Pass(total=3001)
    room = 2 * peak_memory(model, replace(step, batch=20)).total
    most = largest_batch(model, step, room, engine)
    assert peak_memory(model, replace(step, batch=most), engine).total <= room
    assert peak_memory(model, replace(step, batch=most + 1), engine).total > room


def test_the_difference_is_named() -> None:
    dense, step = read_spec("llama-3-8b"), Pass(batch=3, total=CELLS + 1)
    found = allocation(dense, step, "llama.cpp")
    assert found.bytes == costs.cache_bytes(dense, 2 * CELLS, batch=3)
    assert found.more == pytest.approx(2 * CELLS / (CELLS + 1) - 1)
    assert found.reasons == ("contexts in steps of 256",)
    blocks = allocation(dense, step, "vllm")
    assert blocks.bytes == costs.cache_bytes(dense, CELLS + BLOCK, batch=3)
    assert blocks.reasons == ("blocks of 16 tokens",)
    even = allocation(dense, replace(step, total=4 * CELLS), "llama.cpp")
    assert (even.more, even.reasons) == (0, ())
    whole = allocation(read_config({**ROWS["llama.cpp/mistral"]["config"], "sliding_window": 64}), step, "llama.cpp")
    assert "the whole context for windowed layers" in whole.reasons
    assert allocation(dense, replace(step, cache_bits=8.5), "llama.cpp").bytes == found.bytes * 8.5 / 16


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ArgumentError, match="engine = 'abacus'"):
        allocation(read_spec("llama-3-8b"), Pass(total=10), "abacus")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="is not known here"):
        allocation(read_spec("granite-4.0-h-tiny"), Pass(total=10), "vllm")
    for engine in ALLOCATING_ENGINES:
        with pytest.raises(SpecError, match="is not known here"):
            allocation(read_spec("deepseek-v3.2"), Pass(total=10), engine)
    assert predict("deepseek-v3.2", hardware="h200", context=10, ranks=8).engines == ()
    assert [found.engine for found, _ in predict("llama-3-8b", hardware="h100").engines] == list(ALLOCATING_ENGINES)
