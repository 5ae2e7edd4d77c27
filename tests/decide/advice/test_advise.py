"""Advice beside a search over all candidates by hand, and what it says of limits and measurements."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.costs.formulas.model import weights
from headwise.costs.formulas.target import plain_formats
from headwise.costs.prediction import (
    SERVING_ENGINES,
    Pass,
    device,
    devices,
    engine_caches,
    largest_batch,
    operators,
    peak_memory,
    seconds,
)
from headwise.costs.prediction.memory import cache_bytes
from headwise.decide.advice import (
    PREDICTED_ERROR,
    Measured,
    Question,
    advise,
    advise_on,
    candidates,
    design,
    predictable,
    ranked,
    read_measured,
)
from headwise.decide.advice.advise import MOST_SEQUENCES
from headwise.errors import HeadwiseError
from headwise.models.specs import ModelSpec, read_spec
from tests.cli.conftest import cli, here, refused
from tests.cli.without_torch import answered_without_torch
from tests.real_models import save_tiny

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
        found = measured.get(candidate.target)
        most = question.max_quality_loss
        if candidate.target != "as it is" and most is not None and (found is None or found.loss > most):
            continue
        # Cost alone recommends nothing: eight bits of an engine's own, where the model as it is does not fit.
        fits = peak_memory(model, question.step).total <= question.memory_bytes
        if candidate.target != "as it is" and found is None and (fits or not candidate.is_safe):
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
    assert advice.to_measure is None
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
    expected = [
        f"{name}: {f'{then} comes first' if then else 'nothing can be recommended'}"
        for name, then in others.items()
        if then != now
    ]
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


def write_frontier(folder: Path, name: str, points: list[dict[str, Any]], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    points = [{"cache_fraction": 0.3, **point} for point in points]
    (folder / name).write_text(json.dumps({"points": points, **more}))
    return folder


def write_predictions(folder: Path, **losses: float | None) -> Path:
    """Predictions of formats whose names have no special characters, as KL."""
    points = [{"target": name, "kl": kl} for name, kl in losses.items()]
    return write_frontier(folder, "predicted.json", points, is_predicted=True)


def test_what_was_measured_counts_before_what_is_predicted(tmp_path: Path) -> None:
    """Whatever their order, and within one folder too; of two of a kind, the last."""
    first = write_predictions(tmp_path / "a", int4=0.1, int8=0.2, int2=None)
    second = write_predictions(tmp_path / "b", int8=0.3)
    points = [{"target": "int4", "way": "plain quantisation", "perplexity_ratio": 1.5, "kl": 0.4}]
    both = write_frontier(second, "frontier.json", points)
    for order in ([first, both], [both, first]):
        found = read_measured(order)
        assert (found["int4"].loss, found["int4"].is_predicted) == (0.5, False)
        assert found["int4"].loss_at_most == 0.5
        kl = 0.3 if order[-1] is both else 0.2
        assert found["int8"].is_predicted
        assert found["int8"].is_format
        assert found["int8"].loss == pytest.approx(math.exp(kl) - 1)
        assert found["int8"].loss_at_most == pytest.approx(
            math.exp(2 * kl) - 1
        )  # nine of ten are within a factor of 2
        assert found["int2"].loss == found["int2"].loss_at_most == math.inf
    for kl in (-0.1, "x", float("nan")):
        write_frontier(first, "predicted.json", [{"target": "int4", "kl": kl}], is_predicted=True)
        with pytest.raises(HeadwiseError, match="kl of int4 must be"):
            read_measured([first])
    write_frontier(first, "predicted.json", [{"target": "int4", "kl": 0.1}])  # it does not say that it is predicted
    with pytest.raises(HeadwiseError, match="perplexity_ratio of int4 must be a number"):
        read_measured([first])


def test_a_predicted_loss_is_allowed_only_with_its_error(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder = write_predictions(tmp_path / "out", kivi4=math.log(1.024), kivi3=math.log(1.03))
    words = ("advise", "llama-3-8b", "--hardware", "h100", "--goal", "memory")
    document = json.loads(cli(*words, "--measured", folder, "--json").out)
    options = {option["target"]: option for option in document["options"]}
    assert document["best"] == "kivi4"
    assert options["kivi4"]["is_predicted"]
    assert options["kivi4"]["loss"] == pytest.approx(0.024)
    assert options["kivi4"]["loss_at_most"] == pytest.approx(1.024**2 - 1)
    assert options["kivi3"]["refused"] == "may lose too much"
    assert not options["as it is"]["is_predicted"]
    assert any(PREDICTED_ERROR in note for note in document["notes"])
    assert document["measure_next"] == {"target": "kivi3", "loss": pytest.approx(0.03), "between": []}
    said = " ".join(cli(*words, "--measured", folder).out.split())
    assert f"store the cache as kivi4; predicted, not measured: perplexity rises by 2.4%; {PREDICTED_ERROR}" in said
    assert "~×1.024" in said
    assert "~×1.030, too much?" in said
    assert "measure next: kivi3, predicted to lose ×1.030:" in said
    assert "quality decides" in said
    # With more allowed the other is within the limit at twice its KL.
    assert (
        json.loads(cli(*words, "--measured", folder, "--max-quality-loss", "0.07", "--json").out)["best"] == "kivi3"
    )
    for line in cli(*words, "--measured", folder).out.splitlines():
        assert len(line) <= 100, line
    # A measurement takes its place.
    points = [{"target": "kivi4", "way": "plain quantisation", "perplexity_ratio": 1.06}]
    write_frontier(folder, "frontier.json", points)
    said = cli(*words, "--measured", folder).out
    assert "change nothing" in said
    assert "×1.060, too much" in said
    assert "~×1.060" not in said


def test_what_is_known_as_safe_stays_so(tmp_path: Path) -> None:
    """Where nothing fits and no loss is forbidden, eight bits are used, predicted or not."""
    model = read_spec("llama-3-8b")
    question = Question(hardware=device("rtx-4090"), step=Pass(batch=3, total=32_768))
    without = {option.target: option for option in advise_on(model, question, {}).options}
    known = read_measured([write_predictions(tmp_path, **{"vllm:int8_per_token_head": 0.001, "llama.cpp:q8_0": 0.5})])
    options = {option.target: option for option in advise_on(model, question, known).options}
    assert options["vllm:int8_per_token_head"].is_safe  # it is not in the table of those that nothing is known of
    assert "vllm:int8_per_token_head" not in without
    for name, before in without.items():
        assert options[name].is_safe == before.is_safe
        assert options[name].refused == before.refused
    strict = replace(question, max_quality_loss=0.05)
    options = {option.target: option for option in advise_on(model, strict, known).options}
    assert options["vllm:int8_per_token_head"].refused is None
    assert options["llama.cpp:q8_0"].refused == "may lose too much"
    assert options["mlx:8"].refused == "not measured"


def test_what_is_known_of_one_cache_says_nothing_of_another(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Neither that it is better nor that it is worse, unless the user asks for a limit."""
    words = ("advise", "llama-3-8b", "--hardware", "rtx-4090", "--context", "32768", "--batch", "3")
    words = (*words, "--engine", "llama.cpp", "--json")
    folder = write_predictions(tmp_path, **{"llama.cpp:q4_0": 2.0})
    without, known, limited = (
        json.loads(cli(*words, *others).out)
        for others in ((), ("--measured", folder), ("--measured", folder, "--max-quality-loss", "0.05"))
    )
    assert without["best"] == known["best"] == "llama.cpp:q8_0"
    others = ([each for each in found["options"] if each["target"] != "llama.cpp:q4_0"] for found in (without, known))
    assert next(others) == next(others)
    assert limited["best"] is None


def test_what_goes_wrong_with_a_cache_that_is_predicted_is_said(tmp_path: Path) -> None:
    known = read_measured([write_predictions(tmp_path, **{"llama.cpp:q5_1": 0.01, "llama.cpp:q8_0": 0.001})])
    question = Question(hardware=device("h100"), step=Pass(total=64))
    notes = advise_on(read_spec("llama-3-8b"), question, known).notes
    assert "llama.cpp:q5_1: usual CUDA builds compute this type on the processor, without a word" in notes


def test_predictions_say_nothing_of_other_sizes(tmp_path: Path) -> None:
    """A line through what is predicted is not drawn: only measurements suggest what others lose."""
    model = read_spec("smollm2-135m")
    known = read_measured([write_predictions(tmp_path, **{"kivi3": 0.02, "kivi2": 0.04, "kivi2:32": 0.03})])
    question = Question(hardware=device("laptop"), step=Pass(total=4096), goal="memory", max_quality_loss=0.05)
    advice = advise_on(model, question, known)
    assert advice.best is not None
    assert advice.best.target == "kivi3"
    assert advice.measure_next is not None
    assert (advice.measure_next.target, advice.to_measure) == ("kivi2", "kivi2")


def test_one_command_predicts_and_advises(cli: Callable[..., Any], refused: Callable[..., str], model: Path) -> None:
    words = ("advise", model, "--hardware", "h100", "--context", "100", "--goal", "memory")
    read = ("--calibrate", "text.txt")
    document = json.loads(cli(*words, *read, "--json").out)
    options = {option["target"]: option for option in document["options"]}
    predicted = {name for name, option in options.items() if option["is_predicted"]}
    assert predicted == set(predictable(read_spec(str(model))))
    assert {"int8", "kivi2", "llama.cpp:q4_0"} <= predicted
    assert options[document["best"]]["is_predicted"]
    assert any("tokens of text.txt" in note for note in document["notes"])
    of_one = json.loads(cli(*words, *read, "--engine", "llama.cpp", "--json").out)
    own = engine_caches(read_spec(str(model)), "llama.cpp")
    assert {option["target"] for option in of_one["options"] if option["is_predicted"]} == own.keys()
    assert "predicted, not measured" in " ".join(cli(*words, *read, "--engine", "llama.cpp").out.split())
    for arguments, rule in (
        ((*words, "--calibrate", "none.txt"), "none.txt"),
        ((*words, *read, "--engine", "tensorrt-llm"), "calibrate = 'text.txt': predicts nothing"),
        ((*words, *read, "--ranks", "7"), "ranks = 7"),
        (("advise", "llama-3-8b", "--hardware", "h100", *read), "llama-3-8b"),
        (("design", "--parameters", "1000000000", "--hardware", "h100", *read), "No such option: --calibrate"),
    ):
        assert rule in refused(*arguments)


@pytest.fixture
def model(here: Path) -> Path:
    """A model whose heads suit engines' caches, and a text beside it."""
    save_tiny(here / "model", head_dim=64, vocab_size=128)
    (here / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return here / "model"


def test_what_cannot_be_made_is_no_candidate() -> None:
    latents = {each.target for each in candidates(read_spec("deepseek-v3"))}
    assert latents == {"as it is", *engine_caches(read_spec("deepseek-v3"))}
    assert not any(name.startswith(("mlx", "transformers")) for name in latents)
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


@pytest.mark.parametrize("engine", SERVING_ENGINES)
def test_an_engine_is_offered_what_it_runs_in_its_own_words(engine: str, cli: Callable[..., Any]) -> None:
    words = ("advise", "llama-3-8b", "--hardware", "rtx-4090", "--context", "32768", "--batch", "3")
    said = cli(*words, "--engine", engine)
    assert said.status == 0
    document = json.loads(cli(*words, "--engine", engine, "--json").out)
    options = {option["target"]: option for option in document["options"]}
    suiting = engine_caches(read_spec("llama-3-8b"), engine)
    own = {target: cache for target, cache in suiting.items() if cache.runs_on(device("rtx-4090"))}
    served = SERVING_ENGINES[engine]
    sizes = {
        "llama.cpp": "-c 98304 -np 3",
        "vllm": "--max-model-len 32768 --max-num-seqs 3",
        "sglang": "--context-length 32768 --max-running-requests 3",
        "tensorrt-llm": "--max_seq_len 32768 --max_batch_size 3",
    }
    assert own.keys() < options.keys()
    assert not {"int8", "kivi2", "mla@0.25"} & options.keys()
    for target, cache in own.items():
        assert options[target]["words"] in said.out
        assert cache.options in options[target]["commands"][-1]
        assert options[target]["commands"][-1].endswith(sizes.get(engine, ""))
        program = (served.serve_small or served.serve).split("(")[0].split()[0]
        assert options[target]["commands"][-1].startswith(program)
        files = "model.gguf prepared.gguf" if engine == "llama.cpp" else "MODEL PREPARED"
        prepares = f"headwise prepare {files} --for {target}"
        assert (prepares in options[target]["commands"]) == cache.is_simulated
    assert options["mla:0.5"]["commands"][0].startswith("headwise convert MODEL OUT --to mla --kv-budget 0.5")
    # It does not fit as it is, and eight bits are safe wherever they were measured.
    assert own[document["best"]].is_safe
    assert "it does not fit as it is: store the cache as" in " ".join(said.out.split())
    assert options[document["best"]]["commands"][-1] in said.out
    assert ("is served without headwise prepare" in said.out) == own[document["best"]].is_simulated
    assert "made for 8,192 tokens, and 32,768 are asked for" in said.out


@pytest.mark.parametrize(
    ("engine", "hardware", "left_out", "offered"),
    [
        ("vllm", "rtx-4090", "nvfp4", "int8_per_token_head"),  # no products of FP4
        ("vllm", "h100", "nvfp4", "fp8"),
        ("vllm", "b200", None, "nvfp4"),
        ("vllm", "laptop", "int8_per_token_head", "fp8"),  # of which vLLM's CPU build computes nonsense
        ("tensorrt-llm", "l40s", "nvfp4", "fp8"),
    ],
)
def test_a_device_is_offered_what_it_runs(
    engine: str, hardware: str, left_out: str | None, offered: str, tmp_path: Path
) -> None:
    """Not even where it was predicted, and never as what to measure next."""
    known = read_measured([write_predictions(tmp_path, **{f"{engine}:{left_out or offered}": 0.0001})])
    for name in (engine, None):
        question = Question(hardware=device(hardware), step=Pass(total=64), engine=name, max_quality_loss=0.05)
        advice = advise_on(read_spec("qwen2.5-7b"), question, known)
        targets = {option.target for option in advice.options}
        assert f"{engine}:{left_out}" not in targets | {advice.to_measure}
        assert name is None or f"{engine}:{offered}" in targets
        assert any(str(left_out) in note for note in advice.notes) == (left_out is not None)  # says why


def test_a_file_is_said_not_to_be_loaded() -> None:
    for engine, served in SERVING_ENGINES.items():
        for source in ("smollm2-135m", "llama-3-8b"):  # a .gguf, and a config
            question = Question(hardware=device("h100"), step=Pass(total=64), engine=engine)
            said = any(f"{served.title} loads no .gguf" in note for note in advise(source, question).notes)
            assert said == (source == "smollm2-135m" and engine in ("vllm", "mlx", "tensorrt-llm"))


def test_what_is_to_be_typed(tiny_llama: Path) -> None:
    def typed(source: str, target: str, engine: str) -> tuple[str, ...]:
        question = Question(hardware=device("h100"), step=Pass(total=64), engine=engine)
        return {each.target: each.commands for each in advise(source, question).options}[target]

    assert typed(str(tiny_llama), "as it is", "vllm") == (
        f"vllm serve {tiny_llama} --max-model-len 64 --max-num-seqs 1",
    )
    assert typed(str(tiny_llama), "mqa", "mlx")[0].startswith(f"headwise convert {tiny_llama} OUT")
    assert typed(str(tiny_llama), "as it is", "llama.cpp") == (
        f"headwise export {tiny_llama} model.gguf",
        "llama-server -m model.gguf -c 64 -np 1",
    )
    assert typed("llama-3-8b", "mlx:8", "mlx") == (
        "headwise prepare MODEL PREPARED --for mlx:8",
        "mlx_lm.generate --model PREPARED --kv-bits 8 --quantized-kv-start 0",
    )
    assert typed("llama-3-8b", "mla:0.5", "llama.cpp") == (
        "headwise convert MODEL OUT --to mla --kv-budget 0.5 --format gguf --calibrate TEXT",
        "llama-server -m OUT/model.gguf -c 64 -np 1",
    )


def test_headwises_own_layers_are_imported_first() -> None:
    question = Question(hardware=device("h100"), step=Pass(total=64), engine="transformers")
    typed = {each.target: each.commands[-1] for each in advise("llama-3-8b", question).options}
    assert typed["mla:0.5"] == 'import headwise.hf; AutoModelForCausalLM.from_pretrained("OUT")'
    assert typed["mqa"] == 'AutoModelForCausalLM.from_pretrained("OUT")'


def test_cost_alone_recommends_nothing() -> None:
    """As it is where it fits; eight bits of an engine's own where it does not; else what is to be measured."""
    model = read_spec("qwen2.5-7b")
    step, card = Pass(total=32_768), device("h100")
    assert (
        advise_on(model, Question(hardware=card, step=step), {}).best
        == advise_on(model, Question(hardware=card, step=step, goal="memory"), {}).best
    )
    for engine in (None, "vllm", "llama.cpp"):
        needed = peak_memory(model, step).total
        question = Question(hardware=card, step=step, usable=1.0, engine=engine)
        fitting = advise_on(model, replace(question, hardware=replace(card, memory_bytes=needed)), {})
        assert fitting.best is not None
        assert fitting.best.target == "as it is"
        short = advise_on(model, replace(question, hardware=replace(card, memory_bytes=needed - 1)), {})
        assert short.best is not None
        safe = {None: "vllm:int8_per_token_head", "vllm": "vllm:int8_per_token_head", "llama.cpp": "llama.cpp:q8_0"}
        assert short.best.target == safe[engine]  # keys of Qwen2 models may be beyond what fp8 holds
        assert all(option.refused for option in short.options if not option.is_safe)
        strict = replace(question, hardware=replace(card, memory_bytes=needed - 1), max_quality_loss=0.05)
        assert advise_on(model, strict, {}).best is None
        small = advise_on(model, replace(question, hardware=replace(card, memory_bytes=int(0.92 * needed))), {})
        assert small.best is None or small.best.is_safe


def test_figures_stand_beside_what_refuses_an_option(cli: Callable[..., Any], tmp_path: Path) -> None:
    points = [{"target": "mla:0.5", "way": "headwise", "cache_fraction": 0.5, "perplexity_ratio": 1.118, "kl": 0.1}]
    (tmp_path / "frontier.json").write_text(json.dumps({"points": points}))
    words = ("advise", "llama-3-8b", "--hardware", "rtx-4090", "--context", "32768", "--batch", "4")
    said = cli(*words, "--measured", str(tmp_path), "--batch", "1").out
    assert "×1.118, too much" in said
    rows = {line.split()[0]: line for line in cli(*words).out.splitlines() if "GiB" in line}
    # What a search begins with does not fit; what it finds may.
    assert rows["mla@0.25"].split()[-2:] == ["unknown", "headwise"]
    assert "?" in rows["mla@0.25"]
    assert "15.0 GiB" in rows["int8"]
    assert "does not fit" in rows["int8"]
    assert all("any, by --format" in rows[name] for name in ("mla:0.5", "mla:0.25"))


def test_weights_that_grow_by_more_than_the_cache_shrinks_are_named(cli: Callable[..., Any]) -> None:
    grown = "at this context and batch the weights grow by more than the cache shrinks: mla:0.25, mla:0.5"
    short = cli("advise", "llama-3-8b", "--hardware", "h100", "--engine", "vllm").out
    assert grown in short
    assert grown not in cli("advise", "llama-3-8b", "--hardware", "h100", "--engine", "vllm", "--context", 65536).out


def test_the_command(cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path) -> None:
    words = ("advise", "llama-2-7b", "--hardware", "h100", "--context", "32768", "--batch", "16")
    said = cli(*words)
    assert said.status == 0
    assert "nothing can be recommended (not measured: 11, does not fit: 21" in said.out
    assert "→" not in said.out
    assert "measure next: kivi3, its loss is not known for this model:" in said.out
    assert "  headwise frontier MODEL --target kivi3 --calibrate TEXT --evaluate OTHER --output OUT" in said.out
    again = "  headwise advise llama-2-7b --hardware h100 --context 32768 --batch 16 --measured OUT"
    assert again in said.out
    for line in said.out.splitlines():
        assert len(line) <= 100, line
    document = json.loads(cli(*words, "--json").out)
    assert document["best"] is None
    assert document["to_measure"] == "kivi3"
    points = [{"target": "int4:32", "way": "plain quantisation", "cache_fraction": 0.3125, "perplexity_ratio": 1.01}]
    (tmp_path / "frontier.json").write_text(json.dumps({"points": points}))
    limited = cli(*words, "--max-quality-loss", "0.05", "--measured", str(tmp_path), "--batch", "8")
    assert "store the cache as int4:32; measured, perplexity rises by 1.0%" in limited.out
    assert "perplexity may rise by at most 5% (--max-quality-loss)" in " ".join(limited.out.split())
    assert "nothing can be recommended" in cli(*words, "--max-quality-loss", "0.05").out
    assert (
        "change nothing"
        in cli("advise", "gpt2", "--hardware", "l4", "--context", "64", "--max-quality-loss", "0").out
    )
    for arguments, rule in (
        (("llama-2-7b",), "hardware = None: is required; headwise predict --list names devices"),
        (("--hardware", "h100"), "Missing argument 'source'"),
        (("llama-2-7b", "--hardware", "h100", "--context", "0"), "context = 0: must be from 1"),
        (("llama-2-7b", "--hardware", "h100", "--goal", "fun"), "goal = 'fun': must be one of latency"),
        (
            ("llama-2-7b", "--hardware", "h100", "--max-quality-loss", "-1"),
            "--max-quality-loss = -1.0: must be at least 0",
        ),
        (
            ("llama-2-7b", "--hardware", "h100", "--max-quality-loss", "25"),
            "= 25.0: must be at least 0 and at most 10, a fraction such as 0.05; write 25 % as 0.25",
        ),
        (("llama-2-7b", "--hardware", "h100", "--measured", "nowhere"), "measured = 'nowhere': cannot be read"),
        (("gpt2", "--hardware", "l4", "--context", "2048"), "must be at most 1024, the model's positions"),
        (("llama-2-7b", "--hardware", "h100", "--engine", "ollama"), "engine = 'ollama': must be one of llama.cpp"),
        (("llama-2-7b", "--hardware", "h100", "--usable", "90"), "must be above 0 and at most 1; write 90 % as 0.9"),
        (("llama-2-7b", "--hardware", "h100", "--max-quality-loss", "5%"), "as a number; write 5 % as 0.05"),
    ):
        assert rule in refused("advise", *arguments)


def test_it_answers_without_torch() -> None:
    assert answered_without_torch("advise", "llama-2-7b", "--hardware", "h100")["source"] == "llama-2-7b"
    answer = answered_without_torch("design", "--hidden-size", "4096", "--hardware", "h100")
    assert answer["source"] == "a design of 6.7 G parameters, 32 layers"


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
        cli("design", "--hidden-size", "4096", "--num-heads", "32", "--hardware", "h100", "--json").out
    )
    by_name = json.loads(cli("advise", "llama-2-7b", "--hardware", "h100", "--json").out)
    names = ("target", "cache_bytes_per_token", "decode_seconds", "largest_batch")
    assert [[each[name] for name in names] for each in answer["options"]] == [
        [each[name] for name in names] for each in by_name["options"]
    ]
    said = cli("design", "--parameters", "7000000000", "--hardware", "h100", "--batch", "8")
    assert "build it as it is, MHA" in said.out
    assert "measure next" not in said.out  # there is nothing to measure yet
    for arguments, rule in (
        (("--num-heads", "8", "--hardware", "h100"), "--hidden-size = None: must be given, or parameters"),
        (("--hardware", "h100"), "--hidden-size = None: must be given, or parameters"),
        (("--hidden-size", "4096"), "hardware = None: is required; headwise predict --list names devices"),
        (("--hidden-size", "4096", "--hardware", "h100", "--context", "0"), "context = 0: must be from 1"),
        (("--hidden-size", "4096", "--hardware", "h100", "--html", "no/a.html"), "html = 'no/a.html': cannot be"),
        (("--hidden-size", "4096", "--hardware", "h100", "--plot", "a.pdf"), "must end in .png or .svg"),
    ):
        assert rule in refused("design", *arguments)


def test_a_limit_keeps_the_cache_of_a_design_as_it_is(cli: Callable[..., Any]) -> None:
    words = ("design", "--parameters", "7000000000", "--hardware", "rtx-4090", "--json")
    limit = ("--max-quality-loss", "0.05")
    assert json.loads(cli(*words, "--batch", "4", *limit).out)["best"] == "as it is"
    assert json.loads(cli(*words, "--batch", "8").out)["best"] == "vllm:fp8"
    assert json.loads(cli(*words, "--batch", "8", *limit).out)["best"] is None


def test_a_design_has_a_page_and_a_picture(cli: Callable[..., Any], here: Path) -> None:
    words = ("design", "--hidden-size", "4096", "--hardware", "h100", "--html", "a.html", "--plot", "a.svg")
    assert "wrote a.html\nwrote a.svg\n" in cli(*words).out
    assert "a design of 6.7 G parameters" in (here / "a.html").read_text()
    assert "a design of 6.7 G parameters" in (here / "a.svg").read_text()
