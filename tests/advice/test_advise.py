"""Advice beside a search over all candidates by hand, and what it says of limits and measurements."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.advice import Measured, Question, advise_on, candidates, design, ranked, read_measured
from headwise.advice.advise import MOST_SEQUENCES
from headwise.cost.default_targets import plain_formats
from headwise.cost.model import weights
from headwise.errors import HeadwiseError
from headwise.prediction import Pass, device, devices, largest_batch, operators, peak_memory, seconds
from headwise.prediction.allocation import cache_bytes
from headwise.specs import ModelSpec, read_spec
from tests.cli.conftest import cli, here, refused
from tests.cli.without_torch import answered_without_torch

__all__ = ["cli", "here", "refused"]

MODELS = ("llama-2-7b", "llama-3-8b", "smollm2-135m", "deepseek-v2-lite", "gpt2", "mixtral-8x7b")


def small(name: str) -> ModelSpec:
    """A model of the catalog with two of its layers."""
    spec = read_spec(name)
    assert spec.body is not None
    return replace(
        spec, layers=spec.layers[:2], stored=None, body=replace(spec.body, feed_forward=spec.body.feed_forward[:2])
    )


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
    better = bad | {"int8": replace(bad["int8"], loss=0.001)}
    best = advise_on(model, question, better).best
    assert best is not None
    assert (best.target, best.convert_to, best.loss) == ("int8", None, 0.001)


def test_a_format_that_was_measured_is_a_candidate() -> None:
    point = Measured(target="int8:32/int4", cache_fraction=0.406, loss=0.001, kl=None, file="f", is_format=True)
    question = Question(hardware=device("h100"), step=Pass(total=4096), goal="memory", max_quality_loss=0.01)
    best = advise_on(small("llama-3-8b"), question, {"int8:32/int4": point}).best
    assert best is not None
    assert best.target == "int8:32/int4"
    assert best.cache_bytes_per_token == pytest.approx(0.406 * 2 * 2 * 2 * 8 * 128, rel=1e-4)


@pytest.mark.parametrize(("total", "batch"), [(32_768, 16), (32_768, 256), (512, 1)])
def test_what_would_change_the_answer_is_said(total: int, batch: int) -> None:
    model = read_spec("llama-3-8b")
    losses = {"int8/int4": 0.04, "mla@0.25": 0.02, "kivi2": 0.03}
    measured = {
        name: Measured(target=name, cache_fraction=0.3, loss=loss, kl=None, file="f") for name, loss in losses.items()
    }
    step = Pass(total=total, batch=batch)
    question = Question(hardware=device("h100"), step=step, goal="latency", max_quality_loss=0.05)

    def best(**sizes: int) -> str | None:
        found = advise_on(model, replace(question, step=replace(step, **sizes)), measured).best
        return None if found is None else found.target

    others = {f"{value:,} tokens": best(total=value) for value in (total // 4, 4 * total)}
    others |= {f"{value:,} sequences": best(batch=value) for value in (batch // 4, 4 * batch) if value}
    now = best()
    expected = [f"{name}: {then or 'nothing'}" for name, then in others.items() if then != now]
    assert list(advise_on(model, question, measured).changes) == expected


@pytest.mark.parametrize("name", ["phi-2", "gpt-neox-20b", "llama-3-8b"])
def test_formats_are_those_that_the_models_conversions_are_compared_with(name: str) -> None:
    model = read_spec(name)
    found = {each.target: each.cache_bits for each in candidates(model)}
    formats = plain_formats(model)
    assert len(formats) >= 5
    for spelling, form in formats.items():
        assert found[spelling] == form.bits(model)


def test_a_frontier_is_read(tmp_path: Path) -> None:
    points = [
        {"target": "mla:0.5", "way": "headwise", "cache_fraction": 0.5, "perplexity_ratio": 1.1, "kl": 0.1},
        {"target": "mla:0.5", "way": "mha2mla", "cache_fraction": 0.5, "perplexity_ratio": 9.0, "kl": 2.0},
        {"target": "int8:32", "way": "plain quantisation", "cache_fraction": 0.56, "perplexity_ratio": 1, "kl": None},
        {"target": "mqa", "way": "headwise", "cache_fraction": 0.3, "perplexity_ratio": None, "kl": None},
    ]
    (tmp_path / "frontier.json").write_text(json.dumps({"points": points}))
    for source in (tmp_path, tmp_path / "frontier.json"):
        found = read_measured([source])
        assert found["mla:0.5"].loss == pytest.approx(0.1)
        assert found["int8:32"].kl is None
        assert found["mqa"].loss == float("inf")
        assert len(found) == 3


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
        ('{"points": [{"target": "mqa", "cache_fraction": 1%s, "perplexity_ratio": 1}]}' % ("0" * 400), "must be a"),
        ('{"points": [{"target": "mqa", "cache_fraction": 0, "perplexity_ratio": 1}]}', "must be above 0"),
    ],
)
def test_a_damaged_frontier_is_refused(content: str | None, rule: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "frontier.json").write_text(content)
    with pytest.raises(HeadwiseError, match=rule):
        read_measured([tmp_path])


def test_what_cannot_be_made_is_no_candidate() -> None:
    assert [each.target for each in candidates(read_spec("deepseek-v3"))] == ["as it is"]
    targets = {each.target for each in candidates(read_spec("gpt-oss-20b"))}
    assert not targets & {"mqa", "gqa:4"}  # sinks, which heads are not merged with
    assert "mqa" not in {each.target for each in candidates(read_spec("olmo-2-7b"))}
    assert not {"kivi2", "kivi4"} & {each.target for each in candidates(read_spec("mistral-7b"))}
    # Of phi-4's 10 key–value heads 5 cannot be shared by two devices; the others can.
    question = Question(hardware=device("h100"), step=Pass(total=64, ranks=2))
    targets = {option.target for option in advise_on(read_spec("phi-4"), question, {}).options}
    assert "gqa:5" not in targets
    assert {"as it is", "gqa:2"} <= targets


def test_another_models_frontier_is_refused(tmp_path: Path) -> None:
    (tmp_path / "frontier.json").write_text(json.dumps({"label": "GQA 9/3 × 64", "points": []}))
    assert read_measured([tmp_path], read_spec("smollm2-135m")) == {}
    with pytest.raises(HeadwiseError, match="must be this model's frontier: it measured 'GQA 9/3 × 64', and the"):
        read_measured([tmp_path], read_spec("llama-2-7b"))
    for name in ("as it is", "[/bold]\n", "x\ny"):
        (tmp_path / "frontier.json").write_text(json.dumps({"points": [{"target": name}]}))
        with pytest.raises(HeadwiseError, match="has no target of the name"):
            read_measured([tmp_path])


def test_the_command(cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path) -> None:
    words = ("advise", "llama-2-7b", "--hardware", "h100", "--context", "32768", "--batch", "16")
    said = cli(*words)
    assert said.status == 0
    assert (
        "measure before you choose: by cost alone, headwise convert --to mqa; what that loses is not known"
        in said.out
    )
    for line in said.out.splitlines()[1:]:
        assert len(line) <= 80, line
    document = json.loads(cli(*words, "--json").out)
    assert document["best"] == "mqa"
    points = [{"target": "int4:32", "way": "plain quantisation", "cache_fraction": 0.3125, "perplexity_ratio": 1.01}]
    (tmp_path / "frontier.json").write_text(json.dumps({"points": points}))
    limited = cli(*words, "--max-quality-loss", "0.05", "--measured", str(tmp_path), "--batch", "8")
    assert "store the cache as int4:32; measured, perplexity rises by 1.0%" in limited.out
    assert "nothing can be recommended" in cli(*words, "--max-quality-loss", "0.05").out
    assert (
        "change nothing"
        in cli("advise", "gpt2", "--hardware", "l4", "--context", "64", "--max-quality-loss", "0").out
    )
    for arguments, rule in (
        (("llama-2-7b",), "hardware = None: is required, or --guide"),
        (("--hardware", "h100"), "source = None: is required, or --guide"),
        (("llama-2-7b", "--hardware", "h100", "--context", "0"), "context = 0: must be from 1"),
        (("llama-2-7b", "--hardware", "h100", "--extreme-speed"), "--extreme-speed = True: goes with --guide"),
        (("--guide", "--heads", "8", "--batch", "3"), "batch = 3: goes without --guide"),
        (("--guide", "--heads", "9" * 10), "heads = 9999999999: must be at most"),
        (("llama-2-7b", "--hardware", "h100", "--goal", "fun"), "goal = 'fun': must be one of latency"),
        (
            ("llama-2-7b", "--hardware", "h100", "--max-quality-loss", "-1"),
            "--max-quality-loss = -1.0: must be at least 0",
        ),
        (("llama-2-7b", "--hardware", "h100", "--measured", "nowhere"), "measured = 'nowhere': cannot be read"),
        (("gpt2", "--hardware", "l4", "--context", "2048"), "must be at most 1024, the model's positions"),
        (("--guide",), "heads = None: is required without SOURCE"),
        (("--guide", "llama-2-7b", "--heads", "8"), "heads, parameters = (8, None): go without SOURCE"),
        (("--guide", "--heads", "8", "--threshold", "x=3"), "threshold = 'x=3': must be NAME=NUMBER"),
        (("--guide", "--heads", "8", "--threshold", "long=4096_"), "must be NAME=NUMBER"),
        (("llama-2-7b", "--hardware", "h100", "--heads", "8"), "heads = 8: goes with --guide"),
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
    assert answered_without_torch("advise", "llama-2-7b", "--hardware", "h100")["source"] == "llama-2-7b"


def test_a_design_of_named_sizes_is_a_llama() -> None:
    model = design(hidden_size=4096, num_heads=32)
    assert (model.num_layers, model.layers[0].label) == (32, "MHA 32/32 × 128")
    assert weights(model).total == weights(read_spec("llama-2-7b")).total
    decoupled = design(hidden_size=2048, num_heads=12, head_dim=256, num_kv_heads=2)
    assert decoupled.layers[0].label == "GQA 12/2 × 256"


@pytest.mark.parametrize("parameters", [10**8, 7 * 10**9, 70 * 10**9])
def test_a_design_has_about_the_parameters_asked_for(parameters: int) -> None:
    assert weights(design(parameters=parameters)).total == pytest.approx(parameters, rel=0.2)


def test_designs_by_the_command(cli: Callable[..., Any], refused: Callable[..., str]) -> None:
    answer = json.loads(
        cli("advise", "--hidden-size", "4096", "--num-heads", "32", "--hardware", "h100", "--json").out
    )
    by_name = json.loads(cli("advise", "llama-2-7b", "--hardware", "h100", "--json").out)
    names = ("target", "cache_bytes_per_token", "decode_seconds", "largest_batch")
    assert [[each[name] for name in names] for each in answer["options"]] == [
        [each[name] for name in names] for each in by_name["options"]
    ]
    assert (
        "build it with MQA" in cli("advise", "--parameters", "7000000000", "--hardware", "h100", "--batch", "8").out
    )
    assert "goes without SOURCE" in refused("advise", "gpt2", "--head-dim", "64", "--hardware", "h100")
    assert "must be one of them" in refused("advise", "--num-heads", "8", "--hardware", "h100")
    assert "goes without --guide" in refused("advise", "--guide", "--heads", "8", "--hidden-size", "64")
