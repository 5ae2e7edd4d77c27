"""A pair of measurements: flat in JSON, the reference's beside the model's, and the old names with a warning."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace

import pytest

from headwise.measure.evaluation import (
    DepthScore,
    Evaluation,
    PositionScore,
    RetrievalEvaluation,
    TextScore,
    compare_rates,
)
from headwise.measure.evaluation.results import Paired


@dataclass(frozen=True, kw_only=True)
class Score(Paired, compared=("first", "second", "last")):
    name: str
    first: float
    second: float
    between: int | None = None
    last: float
    parts: tuple[PositionScore, ...] = ()


ALONE = Score(name="a", first=1.0, second=2.0, last=3.0)
BESIDE = Score(name="b", first=4.0, second=5.0, between=0, last=6.0, reference=ALONE)


def test_numbers_that_stand_together_are_followed_by_the_references() -> None:
    assert list(BESIDE.to_dict().items()) == [
        *(("name", "b"), ("first", 4.0), ("second", 5.0), ("reference_first", 1.0), ("reference_second", 2.0)),
        *(("between", 0), ("last", 6.0), ("reference_last", 3.0), ("parts", ())),
    ]
    alone = ALONE.to_dict()
    assert list(alone) == list(BESIDE.to_dict())
    assert alone["reference_first"] is alone["reference_last"] is None


def test_results_within_results_are_flat_too() -> None:
    bucket = PositionScore(start=1, stop=3, nll=2.0, reference=PositionScore(start=1, stop=3, nll=1.0))
    assert replace(BESIDE, parts=(bucket,)).to_dict()["parts"] == (
        {"start": 1, "stop": 3, "nll": 2.0, "reference_nll": 1.0},
    )


def test_pairs_are_copied_and_pickled() -> None:
    bucket = PositionScore(start=1, stop=3, nll=2.0, reference=PositionScore(start=1, stop=3, nll=1.0))
    assert copy.deepcopy(bucket) == pickle.loads(pickle.dumps(bucket)) == bucket


KEYS = {
    PositionScore: ("start", "stop", "nll", "reference_nll"),
    TextScore: (
        *("text", "windows", "tokens", "perplexity", "reference_perplexity", "perplexity_ratio", "kl"),
        *("kl_999", "top1_agreement", "top1_changed", "by_position"),
    ),
    Evaluation: (
        *("model", "against", "text", "window", "begin", "windows", "tokens", "perplexity", "reference_perplexity"),
        *("perplexity_ratio", "kl", "kl_999", "top1_agreement", "top1_changed", "texts", "continuations", "cache"),
        "cache_bytes_per_token",
        *("cache_bytes", "reference_cache_bytes_per_token", "reference_cache_bytes", "context", "decode_ms"),
        *("reference_decode_ms",),
        *("dtype", "device", "threads", "engine"),
    ),
    DepthScore: (
        *("depth", "found", "first", "rank", "probability", "nll", "reference_found", "reference_first"),
        *("reference_rank", "reference_probability", "reference_nll"),
    ),
    RetrievalEvaluation: (
        *("model", "against", "file", "questions", "passages", "recall_at_1", "recall_at_10", "mrr"),
        *("reference_mrr", "dtype", "device", "threads"),
    ),
}


@pytest.mark.parametrize("kind", KEYS, ids=lambda kind: kind.__name__)
def test_the_keys_of_every_result_and_their_order(kind: type[Paired]) -> None:
    names = [key for key in KEYS[kind] if not key.startswith("reference_")]
    assert tuple(kind(**dict.fromkeys(names)).to_dict()) == KEYS[kind]


def test_the_keys_of_a_rate() -> None:
    beside = compare_rates([True, False], [True, True])
    assert list(beside.to_dict()) == [
        *("items", "rate", "low", "high", "reference_rate", "reference_low", "reference_high", "only_model"),
        *("only_reference", "difference", "difference_low", "difference_high", "p_value"),
    ]
    assert beside.reference == compare_rates([True, True])
    assert beside.to_dict()["reference_high"] == compare_rates([True, True]).high
