"""Operators beside the exact costs, a roofline by hand, capacity beside brute force, and the catalog of devices."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from headwise.costs.formulas import model as costs
from headwise.costs.prediction import (
    MOST,
    Efficiency,
    Pass,
    device,
    devices,
    largest_batch,
    longest_context,
    operators,
    peak_memory,
    predict,
    seconds,
)
from headwise.errors import ArgumentError, HeadwiseError, SpecError
from headwise.models.specs import catalog, read_spec
from tests.cli.without_torch import answered_without_torch

MODELS = ("llama-2-7b", "llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-120b", "gemma-2b")


UNITS = {
    "a100-40gb": (108, 1.41, 2048),
    "a100-80gb": (108, 1.41, 2048),
    "h100": (132, 1.83, 4096),
    "h200": (132, 1.83, 4096),
    "b200": (148, 1.86, 8192),
    "mi300x": (304, 2.1, 2048),
    "l4": (58, 2.04, 1024),
    "l40s": (142, 2.49, 1024),
    "rtx-4090": (128, 2.52, 512),
    "rtx-5090": (170, 2.407, 512),
    "m1-max": (32, 1.296, 256),
    "m1-ultra": (64, 1.296, 256),
    "laptop": (8, 3.5, 32),
    "epyc-9654": (96, 2.4, 64),
}
"""Multiprocessors or cores, their clock in GHz, and dense FLOPs a cycle of each in 16 bits."""


@pytest.mark.parametrize("name", devices())
def test_peaks_are_dense(name: str) -> None:
    """Peaks are units × clock × FLOPs a cycle; what vendors print with sparsity is twice that."""
    entry = tomllib.loads((files("headwise.costs.prediction") / "hardware.toml").read_text())[name]
    dense, sparse = entry["dense_tflops"], entry.get("sparse_tflops", {})
    units, clock, flops = UNITS[name]
    assert dense["bfloat16"] == pytest.approx(units * clock * flops / 1e3, rel=0.03)
    for dtype, peak in sparse.items():
        assert peak == pytest.approx(2 * dense[dtype], rel=0.02), dtype
    assert set(sparse) == (set(dense) - {"float32"} if sparse else set())
    if "float8" in dense:
        assert dense["float8"] == pytest.approx(2 * dense["bfloat16"], rel=0.02)
    if "tfloat32" in dense:
        assert dense["bfloat16"] == pytest.approx(2 * dense["tfloat32"], rel=0.02)
    assert len(entry["source"]) > 20


def test_a_dtype_without_units_of_its_own_is_computed_in_a_wider_one() -> None:
    server = device("epyc-9654")
    assert server.peak("float16") == server.peak("float32") < server.peak("bfloat16")
    assert device("a100-80gb").peak("float8_e4m3fn") == device("a100-80gb").peak("bfloat16")
    assert device("h100").peak("float8_e5m2") == 1978.9e12
    devices().clear()
    assert device("h100")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("new", "total"), [(1, 3000), (3000, 3000), (64, 5000)])
def test_operators_are_the_models_work(name: str, new: int, total: int) -> None:
    model = read_spec(name)
    work = operators(model, Pass(batch=3, new=new, total=total))
    exact = costs.forward_flops(model, new, total, batch=3)
    head = next(each for each in work if each.name == "head")
    assert head.flops * new == exact.head
    flops = sum(each.times * each.flops for each in work)
    assert flops == pytest.approx(exact.total - exact.head + head.flops, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_of_one_token_reads_the_active_weights_and_the_cache(name: str) -> None:
    model = replace(read_spec(name), stored=None)
    work = operators(model, Pass(total=2000))
    weights = costs.weights(model, active=True)
    read = weights.total - weights.norms - weights.embedding - weights.positions
    if model.body is not None and model.body.tied:
        read += weights.embedding
    assert sum(each.times * each.weight_bytes for each in work) == pytest.approx(2 * read, rel=2e-3)
    assert sum(each.times * each.cache_bytes for each in work) == costs.cache_bytes(model, 2000)


@pytest.mark.parametrize("name", ["granite-4.0-h-tiny", "qwen3-next-80b-a3b", "llama-3-8b", "gpt2"])
def test_memory_is_the_exact_costs(name: str) -> None:
    model, step = read_spec(name), Pass(batch=3, total=500, dtype="float32")
    memory = peak_memory(model, step)
    assert memory.cache == costs.cache_bytes(model, 500, batch=3, dtype="float32")
    assert memory.weights == 4 * costs.weights(model).total
    assert peak_memory(model, replace(step, cache_bits=8)).cache < memory.cache / 2 or costs.state_bytes(model)


def test_states_are_read_and_written() -> None:
    model = read_spec("granite-4.0-h-tiny")
    (state,) = (each for each in operators(model, Pass(batch=4, total=100)) if each.name == "state")
    assert state.times * state.cache_bytes == 2 * costs.state_bytes(model, batch=4)


def test_expanded_mla_writes_and_reads_what_it_decodes() -> None:
    model = read_spec("deepseek-v2-lite")
    work = {each.name: each for each in operators(model, Pass(new=256, total=4096, impl="expanded"))}
    decoded = 4096 * 16 * (128 + 128)
    assert work["kv_b_proj"].activation_bytes == 2 * decoded
    assert work["attention"].activation_bytes == 2 * 16 * (192 + 128) * (256 + 4096)
    assert work["attention"].cache_bytes == 2 * 4096 * 576
    absorbed = {each.name: each for each in operators(model, Pass(total=4096, impl="absorbed"))}
    assert absorbed["absorb keys"].activation_bytes == 2 * 16 * (128 + 512)


def test_a_roofline_by_hand() -> None:
    model, step = read_spec("llama-3-8b"), Pass(batch=4, total=1000)
    card = device("h100")
    reached = Efficiency(compute=0.5, memory=0.5, seconds=1e-6)
    (timed,) = (each for each in seconds(operators(model, step), card, step, reached) if each.name == "o_proj")
    moved = 4096 * 4096 * 2 + 4 * (4096 + 4096) * 2
    assert timed.bound == "memory"
    assert timed.seconds == pytest.approx(32 * (moved / (0.5 * 3.352e12) + 1e-6), rel=1e-12)
    prompt = Pass(new=4096, total=4096)
    (timed,) = (each for each in seconds(operators(model, prompt), card, prompt, reached) if each.name == "o_proj")
    assert timed.bound == "compute"
    assert timed.seconds == pytest.approx(32 * (2 * 4096**3 / (0.5 * 989.4e12) + 1e-6), rel=1e-12)


def test_ranks_share_the_work() -> None:
    model = read_spec("llama-3-8b")
    alone, shared = (operators(model, Pass(batch=2, total=4096, ranks=ranks)) for ranks in (1, 4))
    flops = [sum(each.times * each.flops for each in work) for work in (alone, shared)]
    assert flops[1] == pytest.approx(flops[0] / 4)
    link, logits = (each for each in shared if each.link_bytes)
    assert link.link_bytes == 2 * 3 / 4 * 2 * 4096 * 2
    assert link.times == 65  # behind each of 32 mixers and networks, and the embedding
    assert logits.link_bytes == 3 / 4 * 2 * 128256 * 2
    memory = peak_memory(model, Pass(batch=2, total=4096, ranks=4))
    assert memory.cache * 4 == peak_memory(model, Pass(batch=2, total=4096)).cache
    norms = costs.weights(model).norms * 2
    assert (memory.weights - norms) * 4 == 2 * costs.weights(model).total - norms
    latent = read_spec("deepseek-v3")  # every rank holds the whole latent
    caches = [peak_memory(latent, Pass(total=4096, ranks=ranks)).cache for ranks in (1, 8)]
    assert caches[0] == caches[1]
    with pytest.raises(ArgumentError, match="has no link to others"):
        seconds(shared, device("laptop"), Pass(ranks=4))
    with pytest.raises(ArgumentError, match="ranks = 3"):
        operators(model, Pass(total=10, ranks=3))


def test_capacity_is_brute_force() -> None:
    """Over random models and memories: the largest that fits, and one more does not."""
    chosen = random.Random(0)
    specs = [read_spec(name) for name in MODELS]
    small = [
        replace(
            spec,
            layers=spec.layers[:2],
            stored=None,
            body=replace(spec.body, feed_forward=spec.body.feed_forward[:2]),
        )
        for spec in specs
        if spec.body is not None
    ]
    for _ in range(1000):
        model = chosen.choice(small)
        step = Pass(
            batch=chosen.randint(1, 6),
            total=chosen.randint(1, 400),
            dtype=chosen.choice(["bfloat16", "float32"]),
            cache_bits=chosen.choice([None, 8, 4, 3.5]),
        )
        base = peak_memory(model, replace(step, batch=1, total=1)).total
        memory = int(base * chosen.uniform(0.99, 1.02))
        for count, field in ((largest_batch, "batch"), (longest_context, "total")):
            found = count(model, step, memory)

            def needed(number: int, field: str = field) -> int:
                return peak_memory(model, replace(step, **{field: number})).total  # noqa: B023

            if found == MOST:  # windows bound the cache
                assert needed(MOST) <= memory
                continue
            assert found == 0 or needed(found) <= memory
            assert needed(found + 1) > memory
            if found < 40:
                assert found == next(number for number in range(41) if needed(number + 1) > memory)


def test_memory_grows_with_the_context() -> None:
    """Also where the faster implementation of MLA changes on the way."""
    model = read_spec("deepseek-v2-lite")
    thin = tuple(replace(spec, kv_lora_rank=136) for spec in model.layers)
    model = replace(model, layers=thin)
    sizes = [peak_memory(model, Pass(total=total)).total for total in range(2048, 40_000, 97)]
    assert sizes == sorted(sizes)


def test_a_prompt_is_read_in_parts() -> None:
    whole = predict("llama-3-8b", hardware="h100", context=8192)
    weights = 2 * sum(each.flops for each in whole.prefill if each.name == "q_proj") / 2
    assert weights == 2 * 32 * 8192 * 4096 * 4096
    (query,) = (each for each in whole.prefill if each.name == "q_proj")
    assert query.times == 4 * 32
    assert whole.prefill_seconds > 3.9 * predict("llama-3-8b", hardware="h100", context=2048).prefill_seconds


def test_devices_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[mine]\nlabel = "mine"\nkind = "gpu"\nmemory_gib = 8\nbandwidth_gb = 100\ndense_tflops = { float32 = 1 }\n'
    )
    mine = device("mine", file)
    assert (mine.memory_bytes, mine.peak("float32"), mine.peak("bfloat16")) == (2**33, 1e12, 1e12)
    assert "h100" in devices(file)
    file.write_text(file.read_text(), encoding="utf-8-sig")  # with a byte order mark
    assert device("mine", file) == mine
    file.write_text(file.read_text(encoding="utf-8-sig"))
    with pytest.raises(ArgumentError, match="dtype = 'float64'"):
        mine.peak("float64")
    good = file.read_text()
    for text, rule in (
        ("[mine", "cannot be read"),
        ("mine = 3\n", "mine = 3: must be a table"),
        ('[mine]\nlabel = "x"\n', "mine.kind = None: is required"),
        (good.replace("= 100", "= -100"), "mine.bandwidth_gb = -100: must be a number from"),
        (good.replace("= 100", "= nan"), "mine.bandwidth_gb = nan: must be a number from"),
        (good.replace("= 8", "= inf"), "mine.memory_gib = inf: must be a number from"),
        (good.replace("= 8", "= true"), "mine.memory_gib = True: must be a number from"),
        (good.replace("= 8", "= " + "9" * 400), "mine.memory_gib = 99"),
        (good.replace("float32", "bf16"), "mine.dense_tflops = 'bf16': must be one of"),
        (good.replace("{ float32 = 1 }", "{}"), "mine.dense_tflops = {}: must have a peak"),
        (good + "linkgb = 3\n", "mine.linkgb = 3: must be one of"),
        (good + "link_gb = 0\n", "mine.link_gb = 0: must be a number from"),
        (good.replace('"mine"', "3"), "mine.label = 3: must be one line"),
        (good.replace('"gpu"', '"tpu"'), "mine.kind = 'tpu': must be one of gpu, cpu"),
        (good + "x = " + "[" * 2000 + "]" * 2000, "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(HeadwiseError, match=re.escape(rule)):
            devices(file)
    with pytest.raises(HeadwiseError, match="cannot be read"):
        devices(tmp_path / "none.toml")


def test_impossible_passes() -> None:
    for change, rule in (
        ({"batch": 0}, "batch = 0: must be a whole number"),
        ({"batch": True}, "batch = True: must be a whole number"),
        ({"total": 10**24}, "must be a whole number from 1 to 1073741824"),
        ({"new": 2}, "new = 2: must be at most total = 1"),
        ({"cache_bits": -4}, "cache_bits = -4: must be above 0"),
        ({"cache_bits": float("nan")}, "cache_bits = nan: must be above 0"),
        ({"impl": "bogus"}, "impl = 'bogus': must be one of"),
        ({"dtype": "x"}, "dtype = 'x': must be one of"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(rule)):
            Pass(**change)  # type: ignore[arg-type]


def test_the_command(cli: Callable[..., Any], refused: Callable[..., str]) -> None:
    words = ("predict", "llama-3-8b", "--hardware", "h100", "--context", "8192", "--batch", "16")
    said = cli(*words)
    assert said.status == 0
    assert "16 × 8,192 tokens" in said.out
    many = cli("predict", "deepseek-v3", "--hardware", "h200", "--batch", "64", "--ranks", "8")
    for line in (*said.out.splitlines(), *many.out.splitlines(), *cli("predict", "--list").out.splitlines()):
        assert len(line) <= 80
        assert "…" not in line
    assert "kv_b_proj" in many.out  # which only prompts have
    document = json.loads(cli(*words, "--json").out)
    result = predict("llama-3-8b", hardware="h100", context=8192, batch=16)
    assert document["largest_batch"] == result.largest_batch
    assert document["decode_seconds"] == pytest.approx(result.decode_seconds)
    assert "h100" in cli("predict", "--list").out
    assert "hardware = 'x': must be one of a100-40gb" in refused("predict", "llama-3-8b", "--hardware", "x")
    assert "source = None: is required, or --list" in refused("predict", "--hardware", "h100")
    assert "hardware = None: is required: one of those" in refused("predict", "llama-3-8b")
    for option, value, rule in (
        ("--context", "0", "context = 0: must be from 1 to 1073741824"),
        ("--batch", "0", "batch = 0: must be a whole number from 1"),
        ("--batch", "9" * 400, "must be a whole number from 1 to 1073741824"),
        ("--ranks", "3", "ranks = 3: must divide num_heads"),
        ("--cache-bits", "0", "--cache-bits = 0.0: must be above 0"),
        ("--usable", "1.5", "usable = 1.5: must be above 0 and at most 1"),
        ("--dtype", "x", "dtype = 'x': must be one of"),
    ):
        assert rule in refused("predict", "llama-3-8b", "--hardware", "h100", option, value)
    assert "must be at most 1024, the model's positions" in refused("predict", "gpt2", "--hardware", "l4")


def test_it_answers_without_torch() -> None:
    assert (
        answered_without_torch("predict", "deepseek-v3", "--hardware", "h200", "--ranks", "8")["label"]
        == "MLA 512 + 64"
    )


@pytest.mark.parametrize("name", catalog())
def test_every_catalog_model_is_predicted_or_refused_by_name(name: str) -> None:
    model = read_spec(name)
    if model.body is None:
        with pytest.raises(SpecError, match="has a body that is not understood"):
            predict(name, hardware="h100", context=2048)
        return
    result = predict(name, hardware="h100", context=model.body.positions or 2048)
    assert 0 < result.decode_seconds < 60
    assert result.prefill_seconds > result.decode_seconds
