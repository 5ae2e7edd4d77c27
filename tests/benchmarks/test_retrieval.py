"""The retrieval benchmark's rows, and what they are calibrated on."""

from __future__ import annotations

from pathlib import Path

from benchmarks.retrieval import plan, shared_passages, study

from headwise.measure.texts.calibration import CalibrationTexts
from tests.measure.evaluation.test_retrieval import save_bert


def test_rows_by_name() -> None:
    names = [row.name for row in plan(["gqa:3/*"], tokens=[64])]
    assert names == [
        *("gqa:3/mean", "gqa:3/first_head", "gqa:3/aligned"),
        *("gqa:3/aligned boolq 64", "gqa:3/aligned wikitext 64"),
    ]
    assert len(plan()) == 14


def test_what_is_studied_of_boolq_is_questions_and_passages(tmp_path: Path) -> None:
    (tmp_path / "boolq-study.jsonl").write_text('{"question": "is it", "passage": "It is."}\n')
    assert study("boolq", tmp_path, tmp_path / "work").read_text() == "is it\nIt is.\n"


def test_passages_that_were_calibrated_on_are_counted(tmp_path: Path) -> None:
    source, text = save_bert(tmp_path / "bert"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog")
    passages = ["pack my box with five dozen jugs", "the quick brown fox jumps. "]
    tokens = sum(map(len, passages))  # the text is calibrated on as two windows of 21
    assert shared_passages(source, passages, CalibrationTexts((text,), 43)) == {"shared": round(21 / tokens, 4)}
    assert shared_passages(source, passages, CalibrationTexts()) == {}
