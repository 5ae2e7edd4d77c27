"""A conversion is measured beside plain quantisation of its source, and its card says which of them loses less."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headwise
from headwise.conversion import report
from headwise.measure.evaluation import beside_source, evaluate_windows
from headwise.measure.evaluation.beside_source import bfloat16_bytes
from headwise.models.checkpoints import open_checkpoint
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


def test_the_source_is_measured_in_the_nearest_formats_on_the_same_text(source: Path) -> None:
    done = convert(source, to="mla", kv_budget=0.5)
    plain = done.plain
    assert plain is not None
    assert done.evaluation is not None
    checkpoint = open_checkpoint(source)
    whole = bfloat16_bytes(checkpoint, 256)
    assert plain.source_bytes_per_token == whole
    assert plain.converted_bytes_per_token == whole / 2
    below, above = plain.formats
    assert below.bytes_per_token <= whole / 2 < above.bytes_per_token
    for each in plain.formats:
        again = headwise.evaluate(
            source, against=source, text=source.parent / "exam.txt", windows=2, cache=each.format
        )
        assert (each.evaluation.perplexity_ratio, each.evaluation.kl) == (again.perplexity_ratio, again.kl)
        assert each.evaluation.texts[0].text == done.evaluation.texts[0].text
        assert each.bytes_per_token == bfloat16_bytes(checkpoint, 256, each.format)
        assert (each.evaluation.model, each.evaluation.against) == (str(source), str(source))
        assert f"(×{again.perplexity_ratio:.3f} at {each.bytes_per_token / whole:.1%})" in plain.line
    assert f"- {plain.line}\n" in card(source)
    for each in plain.formats:
        of = each.evaluation
        row = f"{of.kl:.4f} | {of.kl_999:.4f} | {of.top1_agreement:.1%} | {of.top1_changed:,} |"
        assert re.search(rf"^\| the source's cache in `{each.format}` \|.* {re.escape(row)}$", card(source), re.M)
    told = done.to_dict()["plain"]["formats"]
    assert [each["evaluation"]["cache"] for each in told] == [below.format, above.format]


@pytest.mark.parametrize("width", [80, 96, 100])
def test_heads_of_any_width_are_compared_with_what_has_about_their_bytes(width: int, tmp_path: Path) -> None:
    (tmp_path / "exam.txt").write_text(OTHER)
    source = save_tiny(tmp_path / "source", head_dim=width, num_attention_heads=2, num_key_value_heads=2)
    done = headwise.convert(source, tmp_path / "out", to="mla", kv_budget=0.405, evaluate=tmp_path / "exam.txt")
    assert done.plain is not None
    whole = done.plain.source_bytes_per_token
    beyond = [(each.bytes_per_token - done.plain.converted_bytes_per_token) / whole for each in done.plain.formats]
    assert -0.02 < beyond[0] < 0 < beyond[1] < 0.13
    for each in done.plain.formats:  # each with its bytes
        assert f"at {each.bytes_per_token / whole:.1%})" in done.plain.line


def test_codes_are_compared_by_what_they_allocate(source: Path) -> None:
    done = convert(source, to="same", kv_bytes=0.4)
    assert done.plain is not None
    assert done.evaluation is not None
    assert done.plain.converted_bytes_per_token == done.evaluation.cache_bytes_per_token


def test_below_the_smallest_format_the_line_says_so(source: Path) -> None:
    done = convert(source, to="mla", kv_bytes=0.1)
    plain = done.plain
    assert plain is not None
    (smallest,) = plain.formats
    assert smallest.bytes_per_token > plain.converted_bytes_per_token
    assert f"of the source's plain formats, none is so small, and {smallest.format} loses " in plain.line
    assert " at more bytes (" in plain.line
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

    monkeypatch.setattr(beside_source, "evaluate_windows", failing)
    done = convert(source, to="mla", kv_budget=0.5)
    assert done.evaluation is not None
    assert done.plain is None
    assert done.notes[-1].startswith("not compared with ")
    assert done.notes[-1].endswith(": RuntimeError: no memory")


@pytest.mark.parametrize(
    ("shares", "plain", "words"),
    [
        (
            [0.25, 0.281],
            [1.09, 1.02],
            "a loses more at these bytes (×1.090 at 25.0%), and b loses less at more bytes",
        ),
        ([0.25, 0.281], [1.031, 1.03], "a loses as much, within chance, at these bytes (×1.031 at 25.0%), and b"),
        ([0.24, 0.4], [1.02, 1.01], "a loses less at these bytes (×1.020 at 24.0%), and b loses less at more bytes"),
        ([0.239, 0.26], [1.1, 1.1], "a loses more at fewer bytes (×1.100 at 23.9%), and b loses more at these bytes"),
        ([0.53], [1.0], "none is so small, and a loses less at more bytes (×1.000 at 53.0%)"),
        ([0.14], [1.1], "a loses more at fewer bytes (×1.100 at 14.0%)"),
    ],
)
def test_the_comparison_in_words(shares: list[float], plain: list[float], words: str) -> None:
    def scored(ratio: float) -> Any:
        return SimpleNamespace(kl=0.01, tokens=12_000, perplexity=ratio, perplexity_ratio=ratio)

    made: Any = report
    formats = []
    for name, share, ratio in zip("ab", shares, plain, strict=False):
        loses = made._loses(scored(ratio), scored(1.03))
        facts = {"format": name, "bytes_per_token": 100 * share, "loses": loses, "evaluation": scored(ratio)}
        formats.append(SimpleNamespace(**facts))
    line = made._line(formats, scored(1.03), 25.0, 100.0, None)
    assert line.startswith(
        "this conversion has perplexity ×1.030 at 25.0% of a bfloat16 cache; of the source's plain "
    )
    assert words in line
