"""What to measure next: expected losses, and how far advice is from the best with half of the measurements hidden."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import joined
from headwise.costs.prediction import Pass, device
from headwise.decide.advice import (
    AS_IT_IS,
    Measured,
    Question,
    advise_on,
    candidates,
    expected_losses,
    ranked,
    read_points,
)
from headwise.decide.advice.advise import _measure_next
from headwise.models.specs import read_spec

RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def point(target: str, loss: float, fraction: float = 0.5) -> Measured:
    return Measured(target=target, cache_fraction=fraction, loss=loss, kl=None, file="f")


def test_a_loss_is_read_from_the_line_through_its_neighbours() -> None:
    known = {each.target: each for each in (point("mla@0.1", 0.4), point("mla@0.3", 0.004), point("mla:0.5", 0.1))}
    found = expected_losses(known, ["mla@0.2", "mla@0.4", "mla@0.05", "mla@0.1", "mla:0.25", "int8", "mqa"])
    assert found.keys() == {"mla@0.2", "mla@0.4", "mla@0.05"}
    assert found["mla@0.2"].loss == pytest.approx(0.04)
    assert found["mla@0.4"].loss == pytest.approx(0.0004)
    assert found["mla@0.05"].loss == pytest.approx(0.4 * 10**0.5)
    assert found["mla@0.2"].between == ("mla@0.1", "mla@0.3")


def test_losses_that_are_none_or_infinite_say_nothing_impossible() -> None:
    known = {each.target: each for each in (point("gqa:4", -0.01), point("mqa", float("inf")), point("gqa:2", 0.0))}
    (found,) = expected_losses(known, ["gqa:8"]).values()
    assert found.between == ("gqa:2", "gqa:4")
    assert 0 < found.loss < 1e-3
    assert not expected_losses({}, ["gqa:8", "mla@0.5"])


def test_what_is_expected_is_named_and_not_recommended() -> None:
    model = read_spec("smollm2-135m")
    known = {each.target: each for each in (point("mla@0.15", 0.01), point("mla@0.0625", 0.02))}
    question = Question(hardware=device("laptop"), step=Pass(total=4096), goal="memory", max_quality_loss=0.05)
    advice = advise_on(model, question, known)
    assert advice.best is not None
    assert advice.best.target == "mla@0.0625"
    assert advice.measure_next is None
    known["mla@0.0625"] = point("mla@0.0625", 0.2)
    advice = advise_on(model, question, known)
    assert advice.best is not None
    assert advice.best.target == "mla@0.15"
    assert advice.measure_next is not None
    assert advice.measure_next.target == "mla@0.125"
    assert advice.to_dict()["measure_next"]["between"] == ("mla@0.0625", "mla@0.15")
    free = Question(hardware=device("laptop"), step=Pass(total=4096))
    assert advise_on(model, free, known).measure_next is None


def frontiers() -> dict[str, dict[str, Measured]]:
    """Measured frontiers of three models, by target."""
    ways = json.loads((RESULTS / "ways.json").read_text())["rows"]
    found = {name: read_points({**row, "label": None}) for name, row in ways.items()}
    smollm2 = joined.frontier(RESULTS, "smollm2-135m", "GQA 9/3 × 64").to_dict()
    return {"smollm2": read_points(smollm2), **found}


@pytest.mark.parametrize("name", ["smollm2", "glassllm", "qwen2"])
def test_two_measurements_that_it_asks_for_make_up_for_half_that_are_hidden(name: str) -> None:
    """Regret: how much worse by the goal the recommended option is than the best, all of it measured."""
    model, whole = read_spec("smollm2-135m"), frontiers()[name]
    tried = candidates(model, whole)
    chosen = random.Random(name)
    regrets: dict[int, list[float]] = {0: [], 2: []}
    for _ in range(30):
        step = Pass(batch=chosen.choice([1, 4, 16, 64]), total=chosen.choice([1024, 4096, 8192]))
        goal = chosen.choice(["latency", "throughput", "memory", "balanced"])
        limit = chosen.choice([0.005, 0.01, 0.02, 0.05, 0.1, 0.2])
        question = Question(hardware=device("laptop"), step=step, goal=goal, max_quality_loss=limit)
        options = ranked(tried, question, whole)
        by_target = {option.target: option for option in options}
        shown = {target: whole[target] for target in chosen.sample(sorted(whole), len(whole) // 2)}
        for more in range(3):
            taken = by_target[ranked(tried, question, shown)[0].target]
            assert taken.refused is None  # what is recommended was measured, and holds
            scores = [each.score(goal, by_target[AS_IT_IS]) for each in (taken, options[0])]
            if more in regrets:
                regrets[more].append(scores[0] / scores[1] - 1)
            wanted = _measure_next(tried, question, shown)
            if wanted is not None and wanted.target in whole:
                shown[wanted.target] = whole[wanted.target]
    assert mean(regrets[2]) <= 0.05
    assert mean(regrets[2]) < mean(regrets[0])
