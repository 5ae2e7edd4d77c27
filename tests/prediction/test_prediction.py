"""Operators beside the exact costs, a roofline by hand, capacity beside brute force, and the catalog of devices."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.cost import model as costs
from headwise.errors import ArgumentError, HeadwiseError, SpecError
from headwise.prediction import (
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
from headwise.specs import catalog, read_spec

MODELS = ("llama-2-7b", "llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-120b", "gemma-2b")


@pytest.mark.parametrize("name", devices())
def test_no_device_mixes_sparse_and_dense_peaks(name: str) -> None:
    import tomllib
    from importlib.resources import files

    entry = tomllib.loads((files("headwise.prediction") / "hardware.toml").read_text())[name]
    dense, sparse = entry["dense_tflops"], entry.get("sparse_tflops", {})
    for dtype, peak in sparse.items():
        assert peak == pytest.approx(2 * dense[dtype], rel=0.02), dtype
    assert set(sparse) == (set(dense) - {"float32"} if sparse else set())
    if "float16" in dense:
        assert dense["float16"] == dense.get("bfloat16")
    if "tfloat32" in dense:
        assert dense["float16"] == pytest.approx(2 * dense["tfloat32"], rel=0.02)
    assert len(entry["source"]) > 20
    # FLOPs a byte at which computing takes as long as reading: of devices that exist.
    assert 5 < max(dense.values()) * 1e3 / entry["bandwidth_gb"] < 1500


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
    model = read_spec(name)
    work = operators(model, Pass(total=2000))
    weights = costs.weights(model, active=True)
    read = weights.total - weights.norms - weights.embedding - weights.positions
    if model.body is not None and model.body.tied:
        read += weights.embedding
    assert sum(each.times * each.weight_bytes for each in work) == pytest.approx(2 * read, rel=2e-3)
    if model.mechanism != "mla":  # absorbed: the latent is read once, however many heads
        cached = sum(each.times * each.cache_bytes for each in work)
        assert cached == costs.cache_bytes(model, 2000)


def test_a_roofline_by_hand() -> None:
    model, step = read_spec("llama-3-8b"), Pass(batch=4, total=1000)
    card = device("h100")
    reached = Efficiency(compute=0.5, memory=0.5, seconds=1e-6)
    (timed,) = (
        each for each in seconds(operators(model, step), card, step, reached) if each.operator.name == "o_proj"
    )
    moved = 4096 * 4096 * 2 + 4 * (4096 + 4096) * 2
    assert timed.bound == "memory"
    assert timed.seconds == pytest.approx(32 * (moved / (0.5 * 3.352e12) + 1e-6), rel=1e-12)
    prompt = Pass(new=4096, total=4096)
    (timed,) = (
        each for each in seconds(operators(model, prompt), card, prompt, reached) if each.operator.name == "o_proj"
    )
    assert timed.bound == "compute"
    assert timed.seconds == pytest.approx(32 * (2 * 4096**3 / (0.5 * 989.4e12) + 1e-6), rel=1e-12)


def test_ranks_share_the_work() -> None:
    model = read_spec("llama-3-8b")
    alone, shared = (operators(model, Pass(batch=2, total=4096, ranks=ranks)) for ranks in (1, 4))
    flops = [sum(each.times * each.flops for each in work) for work in (alone, shared)]
    assert flops[1] == pytest.approx(flops[0] / 4)
    (link,) = (each for each in shared if each.link_bytes)
    assert link.link_bytes == 2 * 3 / 4 * 2 * 4096 * 2
    assert link.times == 64
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
        replace(spec, layers=spec.layers[:2], body=replace(spec.body, feed_forward=spec.body.feed_forward[:2]))
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

            if found == 2**30:  # windows bound the cache
                assert needed(2**30) <= memory
                continue
            assert found == 0 or needed(found) <= memory
            assert needed(found + 1) > memory
            if found < 40:
                assert found == next(number for number in range(41) if needed(number + 1) > memory)


def test_devices_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[mine]\nlabel = "mine"\nkind = "gpu"\nmemory_gib = 8\nbandwidth_gb = 100\ndense_tflops = { float32 = 1 }\n'
    )
    mine = device("mine", file)
    assert (mine.memory_bytes, mine.peak("float32"), mine.peak("bfloat16")) == (2**33, 1e12, 1e12)
    assert "h100" in devices(file)
    with pytest.raises(ArgumentError, match="dtype = 'float64'"):
        mine.peak("float64")
    for text, rule in (
        ("[mine", "cannot be read"),
        ('[mine]\nlabel = "x"\n', "must have label"),
        (file.read_text().replace("100", "-100"), "every number above 0"),
        ("mine = 3\n", "must have label"),
    ):
        file.write_text(text)
        with pytest.raises(HeadwiseError, match=rule):
            devices(file)
    with pytest.raises(HeadwiseError, match="cannot be read"):
        devices(tmp_path / "none.toml")


def test_the_command(cli: Callable[..., Any], refused: Callable[..., str]) -> None:
    words = ("predict", "llama-3-8b", "--hardware", "h100", "--context", "8192", "--batch", "16")
    said = cli(*words)
    assert said.status == 0
    assert "16 × 8,192 tokens" in said.out
    assert max(len(line) for line in said.out.splitlines()) <= 80
    document = json.loads(cli(*words, "--json").out)
    result = predict("llama-3-8b", hardware="h100", context=8192, batch=16)
    assert document["largest_batch"] == result.largest_batch
    assert document["decode_seconds"] == pytest.approx(result.decode_seconds)
    assert "h100" in cli("predict", "--list").out
    assert "hardware = 'x': must be one of a100-40gb" in refused("predict", "llama-3-8b", "--hardware", "x")
    assert "are both required" in refused("predict", "llama-3-8b")
    for option, value, rule in (
        ("--context", "0", "context = 0: must be at least 1"),
        ("--batch", "0", "batch = 0: must be at least 1"),
        ("--ranks", "3", "ranks = 3: must divide num_heads"),
        ("--cache-bits", "0", "cache_bits = 0.0: must be above 0"),
        ("--usable", "1.5", "usable = 1.5: must be above 0 and at most 1"),
        ("--dtype", "x", "dtype = 'x': must be one of"),
    ):
        assert rule in refused("predict", "llama-3-8b", "--hardware", "h100", option, value)


def test_it_answers_without_torch() -> None:
    program = (
        "import sys; from headwise.cli.main import main\n"
        "try: main(['predict', 'deepseek-v3', '--hardware', 'h200', '--ranks', '8', '--json'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["label"] == "MLA 512 + 64"
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("name", catalog())
def test_every_catalog_model_is_predicted_or_refused_by_name(name: str) -> None:
    model = read_spec(name)
    if model.body is None:
        with pytest.raises(SpecError, match="body that is not understood"):
            predict(name, hardware="h100", context=2048)
        return
    result = predict(name, hardware="h100", context=2048)
    assert 0 < result.decode_seconds < 60
    assert result.prefill_seconds > result.decode_seconds
