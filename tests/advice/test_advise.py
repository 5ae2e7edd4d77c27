"""Advice beside a search over all candidates by hand, and what it says of limits and measurements."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.advice import Measured, Question, advise_on, candidates, ranked, read_measured
from headwise.advice.advise import MOST_SEQUENCES
from headwise.advice.candidates import FORMATS
from headwise.errors import HeadwiseError
from headwise.prediction import Pass, device, devices, largest_batch, operators, peak_memory, seconds
from headwise.prediction.memory import cache_bytes
from headwise.quantization.formats import parse_format
from headwise.specs import ModelSpec, read_spec
from tests.cli.conftest import cli, here, refused

__all__ = ["cli", "here", "refused"]

MODELS = ("llama-2-7b", "llama-3-8b", "smollm2-135m", "deepseek-v2-lite", "gpt2", "mixtral-8x7b")


def small(name: str) -> ModelSpec:
    """A model of the catalog with two of its layers."""
    spec = read_spec(name)
    assert spec.body is not None
    return replace(spec, layers=spec.layers[:2], body=replace(spec.body, feed_forward=spec.body.feed_forward[:2]))


def asked(chosen: random.Random, model: ModelSpec) -> tuple[Question, dict[str, Measured]]:
    """A question near the limit of the memory, and measurements of some candidates."""
    step = Pass(
        batch=chosen.randint(1, 64), total=chosen.randint(1, 1000), dtype=chosen.choice(["bfloat16", "float32"])
    )
    hardware = device(chosen.choice([name for name in devices() if name != "laptop"]))
    room = int(peak_memory(model, step).total * chosen.uniform(0.5, 1.5))
    goal = chosen.choice(["latency", "throughput", "memory", "balanced"])
    loss = chosen.choice([None, 0.0, 0.02, 0.1])
    question = Question(
        hardware=replace(hardware, memory_bytes=room), step=step, goal=goal, max_quality_loss=loss, usable=1.0
    )
    measured = {
        each.target: Measured(
            target=each.target, cache_fraction=0.5, loss=chosen.uniform(-0.01, 0.2), kl=None, file="frontier.json"
        )
        for each in candidates(model)
        if chosen.random() < 0.5
    }
    return question, measured


def by_hand(model: ModelSpec, question: Question, measured: dict[str, Measured]) -> str | None:
    """The best candidate by trying each; None where none is allowed."""
    best, best_score, first = None, float("inf"), None
    for candidate in candidates(model):
        step = replace(question.step, cache_bits=candidate.cache_bits)

        def time(batch: int, step: Pass = step, model: ModelSpec = candidate.model) -> float:
            sized = replace(step, batch=batch)
            return sum(each.seconds for each in seconds(operators(model, sized), question.hardware, sized))

        token = cache_bytes(candidate.model, step) / (step.batch * step.total)
        first = first or (time(step.batch), token)
        if peak_memory(candidate.model, step).total > question.memory_bytes:
            continue
        if question.max_quality_loss is not None and candidate.target != "as it is":
            found = measured.get(candidate.target)
            if found is None or found.loss > question.max_quality_loss:
                continue
        if question.goal == "latency":
            score = time(step.batch)
        elif question.goal == "memory":
            score = token
        elif question.goal == "balanced":
            score = time(step.batch) / first[0] * token / first[1]
        else:
            many = min(largest_batch(candidate.model, step, question.memory_bytes), MOST_SEQUENCES)
            score = time(many) / many
        if score < best_score * (1 - 1e-12):
            best, best_score = candidate.target, score
    return best


@pytest.mark.parametrize("part", range(10))
def test_the_best_is_that_of_a_search_by_hand(part: int) -> None:
    chosen = random.Random(part)
    models = [small(name) for name in MODELS]
    refusals = 0
    for _ in range(32):
        model = chosen.choice(models)
        question, measured = asked(chosen, model)
        (best, *others) = ranked(candidates(model), question, measured)
        expected = by_hand(model, question, measured)
        assert (best.target if best.refused is None else None) == expected
        refusals += expected is None
        allowed = [option for option in (best, *others) if option.refused is None]
        assert [option.refused is not None for option in (best, *others)] == sorted(
            option.refused is not None for option in (best, *others)
        )
        for option in allowed:
            worse = [
                other
                for other in allowed
                if other.loss is not None
                and other.target != option.target
                and other.decode_seconds <= option.decode_seconds
                and other.cache_bytes_per_token <= option.cache_bytes_per_token
                and other.loss <= (option.loss or 0.0)
                and (other.decode_seconds, other.cache_bytes_per_token, other.loss)
                != (option.decode_seconds, option.cache_bytes_per_token, option.loss or 0.0)
            ]
            assert option.is_dominated == bool(worse)
    assert 0 < refusals < 32


def test_doing_nothing_wins_where_all_else_loses_too_much() -> None:
    model = small("llama-3-8b")
    question = Question(hardware=device("h100"), step=Pass(total=4096), max_quality_loss=0.01)
    bad = {
        each.target: Measured(target=each.target, cache_fraction=0.5, loss=0.3, kl=0.1, file="f")
        for each in candidates(model)
    }
    advice = advise_on(model, question, bad)
    assert advice.best is not None
    assert advice.best.target == "as it is"
    assert advice.binding == "quality"
    better = bad | {"int8:32": replace(bad["int8:32"], loss=0.001)}
    best = advise_on(model, question, better).best
    assert best is not None
    assert (best.target, best.convert_to, best.loss) == ("int8:32", None, 0.001)


def test_a_format_that_was_measured_is_a_candidate() -> None:
    point = Measured(target="int8/int4", cache_fraction=0.406, loss=0.001, kl=None, file="f", is_format=True)
    question = Question(hardware=device("h100"), step=Pass(total=4096), goal="memory", max_quality_loss=0.01)
    best = advise_on(small("llama-3-8b"), question, {"int8/int4": point}).best
    assert best is not None
    assert best.target == "int8/int4"
    assert best.cache_bytes_per_token == pytest.approx(0.406 * 2 * 2 * 2 * 8 * 128, rel=1e-4)


def test_what_would_change_the_answer_is_said() -> None:
    model = read_spec("llama-3-8b")
    losses = {"int4:32": 0.04, "mla@0.25": 0.02}
    measured = {
        name: Measured(target=name, cache_fraction=0.3, loss=loss, kl=None, file="f") for name, loss in losses.items()
    }
    step = Pass(total=32_768, batch=16)
    question = Question(hardware=device("h100"), step=step, goal="latency", max_quality_loss=0.05)
    advice = advise_on(model, question, measured)
    for change in advice.changes:
        said, best = change.split(": ")
        number, field = said.split()
        name = {"tokens": "total", "sequences": "batch"}[field]
        other = replace(question, step=replace(step, **{name: int(number.replace(",", ""))}))
        found = advise_on(model, other, measured).best
        assert best == found.target if found else best.startswith("nothing")
        assert advice.best is None or best != advice.best.target


def test_bits_are_those_of_the_formats() -> None:
    for name, bits in FORMATS.items():
        made = parse_format(name)
        if name.startswith("kivi"):
            keys, values = (
                2 ** int(name[-1]),
                64,
            )  # one scale and one zero for 64 tokens of a channel, as of 64 channels
            assert keys > 1
            assert bits == int(name[-1]) + 32 / values
            continue
        rows = made.keys.encode(torch.randn(1, 1, 3, 128))  # type: ignore[union-attr]
        assert bits == rows.shape[-1] * 8 / 128


def test_a_frontier_is_read(tmp_path: Path) -> None:
    points = [
        {"target": "mla:0.5", "way": "headwise", "cache_fraction": 0.5, "perplexity_ratio": 1.1, "kl": 0.1},
        {"target": "mla:0.5", "way": "mha2mla", "cache_fraction": 0.5, "perplexity_ratio": 9.0, "kl": 2.0},
        {"target": "int8:32", "way": "plain quantisation", "cache_fraction": 0.56, "perplexity_ratio": 1, "kl": None},
    ]
    (tmp_path / "frontier.json").write_text(json.dumps({"points": points}))
    for source in (tmp_path, tmp_path / "frontier.json"):
        found = read_measured([source])
        assert found["mla:0.5"].loss == pytest.approx(0.1)
        assert found["int8:32"].kl is None
        assert len(found) == 2


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "has no points"),
        ('{"points": 3}', "has no points"),
        ('{"points": [3]}', "has a point without a target"),
        (
            '{"points": [{"target": "mqa", "cache_fraction": "x", "perplexity_ratio": 1}]}',
            "cache_fraction of mqa must",
        ),
        ('{"points": [{"target": "mqa", "cache_fraction": 1, "perplexity_ratio": NaN}]}', "perplexity_ratio of mqa"),
    ],
)
def test_a_damaged_frontier_is_refused(content: str | None, rule: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "frontier.json").write_text(content)
    with pytest.raises(HeadwiseError, match=rule):
        read_measured([tmp_path])


def test_the_command(cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path) -> None:
    words = ("advise", "llama-2-7b", "--hardware", "h100", "--context", "32768", "--batch", "16")
    said = cli(*words)
    assert said.status == 0
    assert "by cost alone, headwise convert --to mqa; what it loses was not measured" in said.out
    for line in said.out.splitlines()[1:]:
        assert len(line) <= 80, line
    document = json.loads(cli(*words, "--json").out)
    assert document["best"] == "mqa"
    points = [{"target": "int4:32", "way": "plain quantisation", "cache_fraction": 0.3, "perplexity_ratio": 1.01}]
    (tmp_path / "frontier.json").write_text(json.dumps({"points": points}))
    limited = cli(*words, "--max-quality-loss", "0.05", "--measured", str(tmp_path), "--batch", "8")
    assert "store the cache as int4:32; measured, perplexity rises by 1.0%" in limited.out
    assert "nothing can be recommended" in cli(*words, "--max-quality-loss", "0.05").out
    assert (
        "change nothing"
        in cli("advise", "gpt2", "--hardware", "l4", "--context", "64", "--max-quality-loss", "0").out
    )
    for arguments, rule in (
        (("llama-2-7b",), "source, hardware = ('llama-2-7b', None): are both required"),
        (("llama-2-7b", "--hardware", "h100", "--goal", "fun"), "goal = 'fun': must be one of latency"),
        (
            ("llama-2-7b", "--hardware", "h100", "--max-quality-loss", "-1"),
            "max_quality_loss = -1.0: must be at least 0",
        ),
        (("llama-2-7b", "--hardware", "h100", "--measured", "nowhere"), "measured = 'nowhere': cannot be read"),
        (("gpt2", "--hardware", "l4", "--context", "2048"), "must be at most 1024, the model's positions"),
        (("--guide",), "source, heads = (None, None): one of both is required"),
        (("--guide", "--heads", "8", "--threshold", "x=3"), "threshold = 'x=3': must be NAME=NUMBER"),
    ):
        assert rule in refused("advise", *arguments)


def test_the_command_of_the_guide(cli: Callable[..., Any]) -> None:
    said = cli("advise", "--guide", "llama-2-7b", "--context", "4096", "--threshold", "fast=8192")
    assert said.status == 0
    assert "flow: GQA-4 (4 KV heads)" in said.out
    assert "a medium model" in said.out
    for line in said.out.splitlines():
        assert len(line) <= 80, line
    document = json.loads(cli("advise", "--guide", "--heads", "9", "--context", "4096", "--json").out)
    assert document["rules"][0]["kv_heads"] == [3, 1]


def test_it_answers_without_torch() -> None:
    program = (
        "import sys; from headwise.cli.main import main\n"
        "try: main(['advise', 'llama-2-7b', '--hardware', 'h100', '--json'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == "llama-2-7b"
