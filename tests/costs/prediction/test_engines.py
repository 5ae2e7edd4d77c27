"""Engines' own caches: bytes beside those that are stored, conditions beside what refuses, and what is measurable."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from headwise.base.options import ENGINE, PrepareOptions
from headwise.cli import advice
from headwise.costs.prediction import (
    RUNNABLE,
    SERVING_ENGINES,
    Pass,
    cache_of,
    caches_of_bits,
    engine_caches,
    predict,
)
from headwise.errors import ArgumentError
from headwise.models.specs import read_spec
from headwise.runtime.quantization.formats import EngineFormat, parse_format

ALL = [(engine.name, cache) for engine in SERVING_ENGINES.values() for cache in engine.caches]
LLAMA = read_spec("llama-3-8b")


@pytest.mark.parametrize(("engine", "cache"), ALL, ids=lambda value: getattr(value, "name", value))
def test_what_is_simulated_is_what_formats_spell(engine: str, cache: object) -> None:
    """A cache that `prepare --for` and `evaluate --cache` know is marked so, and no other."""
    name = f"{engine}:{cache.name}"  # type: ignore[attr-defined]
    try:
        form = parse_format(name)
    except ArgumentError:
        form = None
    is_known = isinstance(form, EngineFormat)
    assert cache.is_simulated == is_known, f"is_simulated of {name} in prediction/engines.py"  # type: ignore[attr-defined]
    if not isinstance(form, EngineFormat):
        return
    assert PrepareOptions(cache=[name]).cache == [name]
    head = torch.zeros(1, 128)
    stored = sum(side.stored(side.turned(head)).nbytes for side in (form.keys, form.values))
    count = LLAMA.num_layers
    bits = [16 if form.is_unquantised(index, count) else 8 * stored / 256 for index in range(count)]
    assert sum(bits) / count == cache.bits(LLAMA)  # type: ignore[attr-defined]
    for width in (64, 80, 96, 97, 128):
        try:
            form.keys.block(width)
        except ArgumentError:
            can = False
        else:
            can = True
        assert can == cache.takes(width), width  # type: ignore[attr-defined]


def test_bits_are_those_that_the_engines_take() -> None:
    bits = {name: cache.bits(LLAMA) for name, cache in engine_caches(LLAMA).items()}
    assert bits["llama.cpp:q8_0"] == bits["mlx:8"] == bits["transformers:hqq8"] == 8.5
    assert bits["vllm:fp8"] == bits["sglang:fp8"] == bits["tensorrt-llm:fp8"] == 8
    assert bits["vllm:int4_per_token_head"] == 4.25
    assert cache_of("vllm", "int8_per_token_head").bits(LLAMA) == 8.25
    assert cache_of("vllm", "turboquant_k8v4").bits(LLAMA) == (28 * 6.125 + 4 * 16) / 32  # two layers at each end
    assert [cache_of("llama.cpp", name).bits(LLAMA) for name in ("q5_1", "q5_0", "q4_1", "q4_0")] == [6, 5.5, 5, 4.5]
    assert [cache.name for cache in caches_of_bits("mlx", LLAMA, 4.5)] == ["4"]
    assert caches_of_bits("llama.cpp", LLAMA, 8) == []


def test_conditions() -> None:
    assert not any(name.startswith(("llama.cpp", "mlx")) for name in engine_caches(read_spec("phi-2")))  # heads of 80
    assert "mlx:8" not in engine_caches(read_spec("mistral-7b"))  # windows
    latent = engine_caches(read_spec("deepseek-v3"))
    assert {"llama.cpp:q8_0", "vllm:fp8", "sglang:fp8"} <= latent.keys()
    assert "llama.cpp:q8_0/q4_0" not in engine_caches(read_spec("deepseek-v3"), "llama.cpp")
    qwen = read_spec("qwen2.5-7b")
    assert not cache_of("vllm", "fp8").is_safe_for(qwen)
    assert cache_of("llama.cpp", "q8_0").is_safe_for(qwen)
    assert "vllm:int8_per_token_head" in engine_caches(qwen)
    with pytest.raises(ArgumentError, match=r"engine = 'ollama': must be one of llama\.cpp, vllm"):
        engine_caches(LLAMA, "ollama")
    with pytest.raises(ArgumentError, match="cache = 'mlx:5': must be one of 8, 4"):
        cache_of("mlx", "5")


def test_commands() -> None:
    named = {name: (SERVING_ENGINES[name.partition(":")[0]], cache) for name, cache in engine_caches(LLAMA).items()}
    typed = {name: served.command(served.model, cache) for name, (served, cache) in named.items()}
    assert typed["llama.cpp:q8_0"] == "llama-server -m model.gguf -fa on -ctk q8_0 -ctv q8_0"
    assert typed["vllm:fp8"] == "vllm serve MODEL --kv-cache-dtype fp8"
    assert typed["sglang:fp8"] == "python -m sglang.launch_server --model-path MODEL --kv-cache-dtype fp8_e4m3"
    assert typed["mlx:8"] == "mlx_lm.generate --model MODEL --kv-bits 8 --quantized-kv-start 0"
    assert typed["tensorrt-llm:fp8"] == "trtllm-serve MODEL --kv_cache_dtype fp8"
    assert 'cache_implementation="quantized"' in typed["transformers:quanto4"]
    assert SERVING_ENGINES["vllm"].command("./it") == "vllm serve ./it"
    sized = SERVING_ENGINES["sglang"].command("./it", context=64, batch=2, ranks=4)
    assert sized.endswith("--model-path ./it --context-length 64 --max-running-requests 2 --tp 4")


def test_engines_are_named_where_users_look() -> None:
    page = (Path(__file__).parents[3] / "docs/engines.md").read_text(encoding="utf-8")
    help_of_advice = get_args(advice.Engine)[1].help
    for name, served in SERVING_ENGINES.items():
        assert served.title in page
        assert name in help_of_advice
    assert all(word in ENGINE for word in RUNNABLE)


@pytest.mark.parametrize(("bits", "engines"), [(None, {"llama.cpp", "vllm"}), (16, {"llama.cpp", "vllm"})])
def test_wide_caches_are_every_engines(bits: float | None, engines: set[str]) -> None:
    found = predict("llama-3-8b", hardware="h100", cache_bits=bits)
    assert {each.engine for each, _ in found.engines} == engines
    assert not any(each.options for each, _ in found.engines)
    assert found.notes == ()


def test_only_engines_with_a_cache_of_the_bits_allocate_it() -> None:
    four = predict("llama-3-8b", hardware="h100", cache_bits=4)
    assert four.engines == ()
    assert len(four.notes) == 2
    assert four.notes[1].startswith("vllm has no cache of 4 bits a value: with scales, its caches have 8 (fp8), 8.25")
    (eight,) = predict("llama-3-8b", hardware="h100", cache_bits=8).engines
    assert (eight[0].engine, eight[0].options) == ("vllm", "--kv-cache-dtype fp8")
    (more,) = predict("llama-3-8b", hardware="h100", cache_bits=8.5).engines
    assert (more[0].engine, more[0].options) == ("llama.cpp", "-ctk q8_0 -ctv q8_0")


def test_no_speed_is_told_of_a_batch_that_does_not_fit() -> None:
    found = predict("llama-3-8b", hardware="rtx-4090", context=32_768, batch=16)
    assert (found.fits, found.tokens_per_second) == (False, 0)
    assert Pass(total=1).cache_bits is None
