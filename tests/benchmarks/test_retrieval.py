"""The retrieval benchmark's rows, and what ranks say side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.retrieval import Exam, paired, plan, study


def test_rows_by_name() -> None:
    names = [row.name for row in plan(["gqa:3/*"], tokens=[64])]
    assert names == [
        *("gqa:3/mean", "gqa:3/first_head", "gqa:3/aligned"),
        *("gqa:3/aligned boolq 64", "gqa:3/aligned wikitext 64"),
    ]
    assert len(plan()) == 14


def test_passages_count_once_and_questions_know_theirs(tmp_path: Path) -> None:
    rows = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "z")]
    file = tmp_path / "exam.jsonl"
    file.write_text("".join(json.dumps({"question": q, "passage": p}) + "\n" for q, p in rows))
    exam = Exam.read(file, None)
    assert exam.questions == ["a", "b", "c", "d"]
    assert exam.passages == ["x", "y", "z"]
    assert exam.answers.tolist() == [0, 1, 0, 2]
    assert Exam.read(file, 2).passages == ["x", "y"]


def test_ranks_side_by_side() -> None:
    found = paired([1, 2, 1, 11], [1, 1, 2, 1])
    near, wider = found["recall_at_1"], found["recall_at_10"]
    assert (near["rate"], near["reference_rate"]) == (0.5, 0.75)
    assert (near["only_model"], near["only_reference"]) == (1, 2)
    assert near["difference_low"] <= near["difference"] == -0.25 <= near["difference_high"]
    assert (wider["rate"], wider["reference_rate"]) == (0.75, 1.0)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 + 1 / 11) / 4)


def test_what_is_studied_of_boolq_is_questions_and_passages(tmp_path: Path) -> None:
    (tmp_path / "boolq-study.jsonl").write_text('{"question": "is it", "passage": "It is."}\n')
    assert study("boolq", tmp_path, tmp_path / "work").read_text() == "is it\nIt is.\n"
