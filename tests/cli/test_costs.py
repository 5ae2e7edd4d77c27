"""The output of ``headwise compare``, ``complexity`` and ``count``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from headwise import complexity, cost, count_layer
from headwise.models.specs import catalog, read_spec
from tests.cli.conftest import Result

REFUSED = {"qwen3-next-80b-a3b", "deepseek-v4-flash"}
"""Models whose layers no candidate can take the place of: with an output gate, or of several sizes."""


def fits_80_columns(result: Result) -> None:
    assert (result.status, result.err) == (0, "")
    for line in result.out.splitlines():
        assert len(line) <= 80, line
        assert not re.search(r"\S…", line), line


@pytest.mark.parametrize("options", [(), ("--match", "cache"), ("--match", "parameters")])
@pytest.mark.parametrize("name", sorted(set(catalog()) - REFUSED))
def test_comparisons_fit_a_terminal(cli: Callable[..., Result], name: str, options: tuple[str, ...]) -> None:
    result = cli("compare", name, *options, "--context", 131072, "--batch", 64)
    fits_80_columns(result)
    assert result.out.count("◂") == 1


@pytest.mark.parametrize("options", [(), ("--tokens", 1, "--context", 32768), ("--kernel", "unfused", "--batch", 64)])
@pytest.mark.parametrize("name", catalog())
def test_complexities_fit_a_terminal(cli: Callable[..., Result], name: str, options: tuple[Any, ...]) -> None:
    fits_80_columns(cli("complexity", name, *options))


def test_the_rows_of_a_complexity(cli: Callable[..., Result]) -> None:
    lines = [line.rstrip() for line in cli("complexity", "llama-3-8b", "--dtype", "bfloat16").out.splitlines()]
    assert lines[0] == "llama-3-8b, layer 0: GQA 32/8 × 128, fused kernel, bfloat16"
    assert "attention       4·B·H·S·(S + 1)/2·D   34.4 G    85.9 G" in lines
    assert "in all                               206.2 G   429.5 G      41.9 M" in lines
    assert "cache, a token              2·K·D·e      4,096 B" in lines
    assert "kept for the backward pass              72.8 MiB" in lines


def test_a_complexity_as_json_is_the_functions(cli: Callable[..., Result]) -> None:
    result = cli("complexity", "deepseek-v3", "--tokens", 3, "--context", 500, "--layer", 7, "--json")
    assert json.loads(result.out) == json.loads(json.dumps(complexity("deepseek-v3", 3, 500, index=7).to_dict()))
    assert complexity(read_spec("deepseek-v3"), 3, 500, index=7) == complexity("deepseek-v3", 3, 500)


def test_a_complexity_is_the_costs_it_is_the_sum_of() -> None:
    spec = read_spec("deepseek-v2-lite").layers[0]
    report = complexity(spec, 40, kernel="unfused", dtype="float32", batch=2)
    assert report.forward_flops == cost.forward_flops(spec, 40, batch=2)
    assert report.backward_flops == cost.backward_flops(spec, 40, batch=2, kernel="unfused")
    assert report.parameters == cost.parameters(spec) == 13763072
    kept = cost.activation_bytes(spec, 40, batch=2, kernel="unfused", dtype="float32")
    assert report.activation_bytes == kept == sum(amount.value for amount in report.activations.values())
    assert report.cache_bytes == cost.cache_bytes(spec, 40, batch=2, dtype="float32")
    assert report.softmax_flops.value == cost.forward_flops(spec, 40, batch=2, softmax=True) - report.forward_flops
    windowed = read_spec("gpt-oss-20b").layers[0]
    for new, total in ((200, 200), (1, 200), (30, 200), (40, 90)):
        cache_bytes = cost.cache_bytes(windowed, total, batch=3)
        assert complexity(windowed, new, total, batch=3).cache_bytes == cache_bytes
    decoded = complexity(spec, 1, 100, impl="cached_kv")
    assert decoded.cache_bytes_per_token.value == 16 * (128 + 64 + 128) * 2
    assert decoded.cache_bytes == 100 * decoded.cache_bytes_per_token.value


@pytest.mark.parametrize(("tokens", "context"), [(6, None), (1, 9)])
def test_count_sets_counters_side_by_side(cli: Callable[..., Result], tokens: int, context: int | None) -> None:
    options = ("--tokens", tokens, *(() if context is None else ("--context", context)))
    result = cli("count", "smollm2-135m", *options)
    fits_80_columns(result)
    names = [line.split()[0] for line in result.out.splitlines() if "multiply-adds" in line or " FLOPs " in line]
    assert [name for name in names if name in ("thop", "fvcore", "torchinfo", "calflops", "torch")] == [
        "thop",
        "fvcore",
        "torchinfo",
        "calflops",
        "torch",
    ]
    values = json.loads(cli("count", "smollm2-135m", *options, "--json").out)
    T = context or tokens
    truth = 2 * tokens * 884736 + 4 * 9 * 64 * tokens * T
    assert values["formula_flops"] == values["counted_flops"] == truth
    assert values["parameters"] == 884736
    flops = {peer["name"]: peer["flops"] for peer in values["peers"]}
    assert flops == dict.fromkeys(flops, flops["thop"]) | {"torchinfo": 2 * 884736}
    assert flops["thop"] == 2 * tokens * 884736


def test_counters_leave_the_layer_as_it_is() -> None:
    assert count_layer("smollm2-135m", 3) == count_layer(read_spec("smollm2-135m").layers[0], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("complexity", "llama-3-8b", "--tokens", 0), "new_tokens = 0: must be from 1"),
        (("complexity", "llama-3-8b", "--layer", 32), "layer = 32: must be between 0 and 31"),
        (("complexity", "llama-3-8b", "--impl", "absorbed"), "impl = 'absorbed': must be one of direct for gqa"),
        (("complexity", "nowhere"), "source = 'nowhere': is no file, folder or catalog name"),
        (("count", "jamba-v0.1"), "attention = 'Mamba 8192 × 16': has costs, but no layer that runs"),
        (
            ("count", "llama-3-8b", "--tokens", 3, "--context", 2),
            "new_tokens = 3: must be from 1 to total_tokens = 2",
        ),
        (("compare", "qwen3-next-80b-a3b"), "model_type = 'qwen3_next': has layers that gate their output"),
        (("inspect", "llama-3-8b", "--ranks", 3), "ranks = 3: must divide num_heads = 32"),
    ],
)
def test_what_is_refused(refused: Callable[..., str], arguments: tuple[Any, ...], message: str) -> None:
    assert message in refused(*arguments)
