"""The benchmark of advice that is followed, on a tiny model."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import headwise
from benchmarks import advised, tables
from headwise.costs.prediction import device
from headwise.decide.advice import AS_IT_IS
from tests.real_models import save_tiny


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("wikitext-2.train", "wikitext-2.test", "brown", "austen"):
        (cache / f"{name}.txt").write_text("".join(f"Sentence {place} of {name} ends here. " for place in range(60)))
    monkeypatch.setattr(advised, "SOURCE", str(save_tiny(tmp_path / "source")))
    return Namespace(work=tmp_path / "work", cache=cache, tokens=256, context=60, windows=2, dtype="float32")


def test_what_is_advised_is_converted_once_timed_and_evaluated(
    options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = advised.followed("mla@0.5", options)
    monkeypatch.setattr(headwise, "convert", None)
    assert advised.followed("mla@0.5", options) == (folder, cache) == (options.work / "mla-0.5", None)
    assert advised.followed("int8", options) == (advised.SOURCE, "int8")
    assert advised.followed(AS_IT_IS, options) == (advised.SOURCE, None)
    times = advised.step_times(
        {AS_IT_IS: (advised.SOURCE, None), "a": (advised.SOURCE, "int8"), "b": (folder, None)}, options
    )
    assert set(times) == {AS_IT_IS, "a", "b"}
    found, coded = advised.evaluated(folder, None, options), advised.evaluated(advised.SOURCE, "int8", options)
    assert len(found["texts"]) == len(coded["texts"]) == 3
    assert found["cache_bytes_per_token"] < found["reference_cache_bytes_per_token"]
    assert coded["cache"] == "int8"


def test_what_comes_first_by_each_goal_is_kept(options: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Option(NamedTuple):
        target: str
        loss: float
        decode_seconds: float
        cache_bytes_per_token: float

    class Advice(NamedTuple):
        best: Option
        options: tuple[Option, ...]

    plain, coded = Option(AS_IT_IS, 0.0, 0.03, 512.0), Option("int8", 0.01, 0.04, 300.0)
    asked: list[str] = []

    def advise(model: object, question: Any, measured: object, *, source: str) -> Advice:
        asked.append(question.goal)
        return Advice(plain if question.goal == "latency" else coded, (plain, coded))

    monkeypatch.setattr(advised, "advise_on", advise)
    monkeypatch.setattr(advised.joined, "frontier", lambda *_: headwise)
    monkeypatch.setattr(headwise, "to_dict", dict, raising=False)
    monkeypatch.setattr(advised, "read_points", lambda *_: {})
    monkeypatch.setattr(advised, "device", lambda *_: device("laptop"))
    kept = options.work / "advised.json"
    arguments = ["machine.toml", "--json", str(kept), "--cache", str(options.cache), "--work", str(options.work)]
    arguments += ["--context", "60", "--windows", "2", "--dtype", "float32"]
    advised.main(arguments)
    rows = json.loads(kept.read_text())["rows"]
    assert rows["latency"]["evaluate"] is None
    assert rows["latency"]["predicted_ms"] == 30.0
    assert rows["memory"]["evaluate"]["cache"] == "int8"
    assert (rows["memory"]["predicted_ms"], rows["memory"]["predicted_ms_as_it_is"]) == (40.0, 30.0)
    assert rows["memory"]["measured_ms"] > 0 < rows["memory"]["measured_ms_as_it_is"]
    advised.main(arguments)  # all is kept
    assert asked == ["latency", "memory"]


def test_the_table_has_predicted_beside_measured() -> None:
    texts = [{"perplexity_ratio": ratio} for ratio in (1.01, 1.02, 1.03)]
    row: dict[str, Any] = {
        "target": "mla@0.19",
        "kept_loss": 0.018,
        "predicted_ms": 47.0,
        "predicted_ms_as_it_is": 33.0,
        "measured_ms": 45.0,
        "measured_ms_as_it_is": 31.0,
        "predicted_bytes": 4377.6,
        "evaluate": {"texts": texts, "cache_bytes_per_token": 4356.0},
    }
    rows = {"latency": {**row, "target": AS_IT_IS, "evaluate": None}, "memory": row}
    assert tables.advised({"rows": rows}).splitlines()[2:] == [
        "| latency | as it is | 47.0 (33.0) | 45.0 (31.0) | 4,378 |  |  |  |",
        "| memory | `mla@0.19` | 47.0 (33.0) | 45.0 (31.0) | 4,378, 4,356 | ×1.0180 | ×1.0100 | ×1.0200, ×1.0300 |",
    ]


def test_the_document_says_how_far_predictions_were_off() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/results/advised.json").read_text())["rows"]
    plain, converted = (rows[goal]["predicted_ms"] / rows[goal]["measured_ms"] - 1 for goal in ("latency", "memory"))
    said = (
        f"A step of the original was predicted to take {_more(plain)} than it does, and one of the conversion"
        f" {_more(converted)}."
    )
    assert said in " ".join((root / "docs/advice.md").read_text().split())


def _more(error: float) -> str:
    return f"{100 * abs(error):.0f} % {'more' if error > 0 else 'less'}"
