"""The selection guide: every path of its rules, and the numbers that they are adjusted by."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from headwise.errors import ArgumentError
from headwise.study.guide import Needs, Thresholds, guide, kv_heads
from tests.cli.conftest import cli, here, refused
from tests.cli.without_torch import answered_without_torch

__all__ = ["cli", "here", "refused"]

FLOW = {
    # accuracy critical, above 1K, extreme speed, memory limited, ample parameters
    (True, None, None, None, None): ("MHA",),
    (False, True, True, None, None): ("MQA",),
    (False, True, False, None, None): ("GQA-4", "GQA-2"),
    (False, False, None, True, True): ("GQA-4",),
    (False, False, None, True, False): ("MQA",),
    (False, False, None, False, None): ("GQA-4",),
}
"""The guide's flow; None where the answer is not asked for."""


@pytest.mark.parametrize("answers", list(product([False, True], repeat=5)))
def test_every_path_of_the_flow(answers: tuple[bool, ...]) -> None:
    accuracy, is_long, speed, memory, ample = answers
    needs = Needs(
        context=1025 if is_long else 1024,
        heads=32,
        accuracy_critical=accuracy,
        extreme_speed=speed,
        memory_limited=memory,
        ample_parameters=ample,
    )
    (expected,) = (
        taken
        for asked, taken in FLOW.items()
        if all(wanted is None or wanted == answer for wanted, answer in zip(asked, answers, strict=True))
    )
    flow = guide(needs).rules[0]
    assert flow.mechanisms == expected
    assert len(flow.path) == sum(wanted is not None for wanted in next(a for a, t in FLOW.items() if _is(a, answers)))


def _is(asked: tuple[bool | None, ...], answers: tuple[bool, ...]) -> bool:
    return all(wanted is None or wanted == answer for wanted, answer in zip(asked, answers, strict=True))


MATRIX = {
    100: ("MHA", "MHA GQA-4", "GQA-4"),
    511: ("MHA", "MHA GQA-4", "GQA-4"),
    512: ("MHA", "GQA-4", "GQA-4 MQA"),
    2048: ("MHA", "GQA-4", "GQA-4 MQA"),
    2049: ("GQA-4", "MQA GQA-2", "MQA"),
    100_000: ("GQA-4", "MQA GQA-2", "MQA"),
    100_001: ("latent-256", "latent-256", "latent-256"),
}


@pytest.mark.parametrize("context", MATRIX)
def test_the_matrix(context: int) -> None:
    for parameters, cell in zip((10**9 - 1, 10**10 - 1, 10**10), MATRIX[context], strict=True):
        (rule,) = (
            r for r in guide(Needs(context=context, heads=8, parameters=parameters)).rules if r.name == "matrix"
        )
        assert rule.mechanisms == tuple(cell.split())


@pytest.mark.parametrize(
    ("context", "mechanism"), [(511, "MHA"), (512, "GQA-h/2"), (2048, "GQA-h/2"), (2049, "MQA"), (100_001, "MLA")]
)
def test_lengths(context: int, mechanism: str) -> None:
    lengths = guide(Needs(context=context, heads=8)).rules[1]
    assert lengths.mechanisms == (mechanism,)


def test_key_value_heads_by_goal() -> None:
    found = {
        goal: guide(Needs(context=100, heads=32, goal=goal)).rules[2].kv_heads  # type: ignore[arg-type]
        for goal in ("accuracy", "balanced", "speed")
    }
    assert found == {"accuracy": (16, 8), "balanced": (16,), "speed": (1, 2)}


@pytest.mark.parametrize(
    ("application", "mechanisms", "heads"),
    [
        ("research", ("MHA",), (12,)),
        ("serving", ("GQA-3",), (3,)),
        ("mobile", ("MQA",), (1,)),
        ("documents", ("GQA-2", "MQA"), (2, 1)),
        ("very-long-documents", ("latent-384", "MQA"), (None, 1)),
    ],
)
def test_applications(application: str, mechanisms: tuple[str, ...], heads: tuple[int | None, ...]) -> None:
    rule = guide(Needs(context=100, heads=12, application=application)).rules[-1]  # type: ignore[arg-type]
    assert (rule.mechanisms, rule.kv_heads) == (mechanisms, heads)


def test_heads_that_divide() -> None:
    assert [kv_heads("GQA-4", heads) for heads in (1, 2, 9, 12, 14)] == [1, 2, 3, 4, 2]
    assert [kv_heads("GQA-h/2", heads) for heads in (1, 9, 14)] == [1, 3, 7]
    assert [kv_heads(name, 9) for name in ("MHA", "MQA", "MLA", "latent-256")] == [9, 1, None, None]


def test_rules_that_disagree_are_named() -> None:
    # The flow takes 4 or 2 key–value heads above 1K; the rule of lengths takes one above 2K.
    assert "lengths" in guide(Needs(context=4096, heads=32)).disagreements
    assert guide(Needs(context=4096, heads=32, extreme_speed=True, goal="speed")).disagreements == ()


def test_thresholds_are_adjusted() -> None:
    later = Thresholds(fast=8192)
    assert guide(Needs(context=4096, heads=32, extreme_speed=True, thresholds=later)).rules[0].mechanisms == (
        "GQA-4",
    )
    with pytest.raises(ArgumentError, match=r"short = 4096: .*at most long"):
        Thresholds(short=4096)
    with pytest.raises(ArgumentError, match="fast = 0: must be at least 1"):
        Thresholds(fast=0)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"context": 0}, "context = 0: must be at least 1"),
        ({"heads": 0}, "heads = 0: must be at least 1"),
        ({"parameters": 0}, "parameters = 0: must be at least 1"),
        ({"goal": "fun"}, "goal = 'fun': must be one of"),
        ({"application": "fun"}, "application = 'fun': must be one of"),
    ],
)
def test_impossible_needs(wrong: dict[str, object], rule: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Needs(**{"context": 10, "heads": 8, **wrong})  # type: ignore[arg-type]
    assert rule in str(error.value)


def test_the_command(cli: Callable[..., Any]) -> None:
    said = cli("guide", "llama-2-7b", "--context", "4096", "--threshold", "fast=8192")
    assert said.status == 0
    assert "flow: GQA-4 (4 KV heads)" in said.out
    assert "a medium model" in said.out
    for line in said.out.splitlines():
        assert len(line) <= 80, line
    document = json.loads(cli("guide", "--heads", "9", "--context", "4096", "--json").out)
    assert document["rules"][0]["kv_heads"] == [3, 1]
    given = ("--heads", "8", "--parameters", "3000000000", "--application", "mobile", "--goal", "speed")
    needs = json.loads(cli("guide", *given, "--extreme-speed", "--json").out)["needs"]
    named = [needs[name] for name in ("parameters", "application", "goal", "extreme_speed", "memory_limited")]
    assert named == [3 * 10**9, "mobile", "speed", True, False]


def test_the_command_answers_without_torch() -> None:
    assert answered_without_torch("guide", "llama-2-7b")["needs"]["heads"] == 32


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((), "heads = None: is required"),
        (("llama-2-7b", "--heads", "8"), "heads = 8: goes without"),
        (("llama-2-7b", "--parameters", "8"), "parameters = 8: goes without"),
        (("--heads", "9" * 10), "heads = 9999999999: must be at most"),
        (("--heads", "8", "--goal", "latency"), "goal = 'latency': must be one of"),
        (("--heads", "8", "--threshold", "x=3"), "threshold = 'x=3': must be NAME=NUMBER"),
        (("--heads", "8", "--threshold", "long=4096_"), "must be NAME=NUMBER"),
    ],
)
def test_what_the_command_refuses(refused: Callable[..., str], arguments: tuple[str, ...], rule: str) -> None:
    assert rule in refused("guide", *arguments)
