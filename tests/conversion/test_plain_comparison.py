"""A conversion is measured beside plain quantisation of its source, and its card says which of them loses less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.checkpoints import open_checkpoint
from headwise.conversion import closing_evaluation, plain_comparison
from headwise.evaluation import evaluate_windows
from headwise.evaluation.plain_cache import bfloat16_bytes
from tests.real_models import save_tiny

TEXT = "".join(f"{index:04d} the quick brown fox jumps over the lazy dog. " for index in range(60))
OTHER = "pack my box with five dozen liquor jugs, said the judge to the wizard. " * 40


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in (("study", TEXT), ("exam", OTHER)):
        (tmp_path / f"{name}.txt").write_text(text)
    return save_tiny(tmp_path / "source", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


def convert(source: Path, **options: Any) -> headwise.Conversion:
    folder = source.parent
    named = {"calibrate": folder / "study.txt", "evaluate": folder / "exam.txt", "calibration_tokens": 512}
    return headwise.convert(source, folder / "out", **{**named, "without": ("refine",), **options})


def card(source: Path) -> str:
    return (source.parent / "out/README.md").read_text()


def test_the_source_is_measured_in_the_nearest_format_on_the_same_text(source: Path) -> None:
    done = convert(source, to="mla", kv_budget=0.5)
    plain = done.plain
    assert plain is not None
    assert done.evaluation is not None
    again = headwise.evaluate(source, against=source, text=source.parent / "exam.txt", windows=2, cache=plain.format)
    assert (plain.evaluation.perplexity_ratio, plain.evaluation.kl) == (again.perplexity_ratio, again.kl)
    assert plain.evaluation.texts[0].text == done.evaluation.texts[0].text
    checkpoint = open_checkpoint(source)
    assert plain.source_bytes_per_token == bfloat16_bytes(checkpoint, 256)
    assert plain.bytes_per_token == bfloat16_bytes(checkpoint, 256, plain.format)
    assert plain.converted_bytes_per_token == plain.source_bytes_per_token / 2
    assert plain.bytes_per_token <= plain.converted_bytes_per_token
    assert plain.line.startswith("at these bytes plain quantisation loses ")
    assert plain.is_better == (" loses less: " in plain.line)
    assert f"{plain.format} of the source has perplexity ×{again.perplexity_ratio:.3f} at " in plain.line
    assert (plain.evaluation.model, plain.evaluation.against) == (str(source), str(source))
    assert f"- {plain.line}\n" in card(source)
    assert done.to_dict()["plain"]["evaluation"]["cache"] == plain.format


def test_codes_are_compared_by_what_they_allocate(source: Path) -> None:
    done = convert(source, to="same", kv_bytes=0.4)
    assert done.plain is not None
    assert done.evaluation is not None
    assert done.plain.converted_bytes_per_token == done.evaluation.cache_bytes_per_token


def test_below_the_smallest_format_the_line_says_so(source: Path) -> None:
    done = convert(source, to="mla", kv_bytes=0.1)
    plain = done.plain
    assert plain is not None
    assert plain.bytes_per_token > plain.converted_bytes_per_token
    assert not plain.is_better
    assert plain.line.startswith("plain quantisation ")
    assert "at these bytes" not in plain.line


@pytest.mark.parametrize("options", [{"to": "mha"}, {"to": "mla", "kv_budget": 1.0}], ids=str)
def test_a_cache_that_is_no_smaller_is_compared_with_nothing(source: Path, options: dict[str, Any]) -> None:
    done = convert(source, **options, calibrate=None, calibration_tokens=None, without=())
    assert done.evaluation is not None
    assert done.plain is None
    assert "plain quantisation" not in card(source)


def test_without_an_evaluation_there_is_none(source: Path) -> None:
    assert convert(source, to="mla", kv_budget=0.5, evaluate=False).plain is None


def test_a_comparison_that_fails_is_noted_and_costs_nothing_else(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, cache: str | None = None, **options: Any) -> Any:
        if cache is not None:
            raise RuntimeError("no memory")
        return evaluate_windows(*args, cache=cache, **options)

    monkeypatch.setattr(closing_evaluation, "evaluate_windows", failing)
    done = convert(source, to="mla", kv_budget=0.5)
    assert done.evaluation is not None
    assert done.plain is None
    assert done.notes[-1].startswith("not compared with ")
    assert done.notes[-1].endswith(": RuntimeError: no memory")


@pytest.mark.parametrize(
    ("bytes_ratio", "plain", "converted", "words"),
    [
        (1.0, 1.03, 1.1, "at these bytes plain quantisation loses less"),
        (1.0, 1.1, 1.03, "at these bytes plain quantisation loses more"),
        (0.8, 1.031, 1.03, "at these bytes plain quantisation loses as much, within chance"),
        (2.0, 1.1, 1.03, "plain quantisation loses more at more bytes"),
        (2.0, 1.03, 1.1, "plain quantisation does not go down to these bytes"),
        (1.005, 1.03, 1.1, "at these bytes plain quantisation loses less"),
    ],
)
def test_the_outcome_in_words(bytes_ratio: float, plain: float, converted: float, words: str) -> None:
    class Scored:
        kl, tokens = 0.01, 12_000

        def __init__(self, perplexity: float) -> None:
            self.perplexity = perplexity

    outcome: Any = plain_comparison._outcome
    assert outcome(bytes_ratio, Scored(plain), Scored(converted)) == words
