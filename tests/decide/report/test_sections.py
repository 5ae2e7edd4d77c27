"""Sections of what the commands print, folders of results, and files that are none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.base.pages import Picture, as_svg, web_page
from headwise.cli.pages import refuse_no_page
from headwise.decide.report import read_folder, sections
from headwise.errors import ArgumentError, CheckpointError, MissingExtraError, StorageError
from headwise.models.specs import catalog, read_spec
from tests.cli.conftest import cli, here, refused
from tests.cli.without_torch import answered_without_torch

__all__ = ["cli", "here", "refused"]

SCORE = {
    "text": "/texts/wiki.txt",
    "perplexity": 11.0,
    "reference_perplexity": 10.0,
    "perplexity_ratio": 1.1,
    "kl": 0.05,
    "kl_999": 0.75,
    "top1_agreement": 0.9,
    "top1_changed": 1051,
    "by_position": [
        {"start": 1, "stop": 256, "nll": 3.0, "reference_nll": 2.9},
        {"start": 256, "stop": 512, "nll": 2.5, "reference_nll": 2.4},
    ],
}
EVALUATION: dict[str, Any] = {
    "model": "/models/half",
    "texts": [SCORE],
    "perplexity": 11.0,
    "tokens": 511,
    "window": 512,
    "dtype": "float32",
    "cache_bytes_per_token": 100.0,
    "reference_cache_bytes_per_token": 200.0,
    "context": 511,
    "decode_ms": 2.0,
    "reference_decode_ms": None,
}
POINT = {
    "target": "int8",
    "label": "GQA 9/3 × 64",
    "way": "plain quantisation",
    "cache_bytes_per_token": 24480.0,
    "cache_fraction": 0.53,
    "perplexity_ratio": 1.0002,
    "kl": 0.0001,
}
FRONTIER = {
    "source": "smollm2-135m",
    "label": "GQA 9/3 × 64",
    "cache_bytes_per_token": 46080.0,
    "tokens": 1000,
    "points": [POINT, {**POINT, "target": "mqa", "way": "headwise", "perplexity_ratio": None, "kl": None}],
}


def test_an_evaluation() -> None:
    rate = {"items": 20, "rate": 0.5, "low": 0.3, "high": 0.7, "reference_rate": None}
    text, tasks = sections({**EVALUATION, "planted": {"found": rate, "first": rate}})
    assert text.table.title == "Quality of half on text"
    assert text.table.rows == [("wiki.txt", "11.000", "10.000", "1.1000", "0.0500", "0.7500", "90.0%", "1,051")]
    assert "100 bytes a token (the reference's 200)" in text.table.notes[1]
    continued = {**EVALUATION, "continuations": {"line": "1 of 2 equal"}}
    assert sections(continued)[0].table.notes[2:] == ["1 of 2 equal"]
    frontier = {**FRONTIER, "points": [{**POINT, "evaluation": continued}, POINT]}
    assert sections(frontier)[0].table.notes[1:] == ["int8: 1 of 2 equal"]
    assert text.draw is not None
    assert [list(line.get_ydata()) for line in text.draw().axes[0].lines] == [[3.0, 2.5], [2.9, 2.4]]
    assert tasks.table.rows[0] == ("planted facts, repeated", "20", "50.0%", "30.0% to 70.0%", "–")
    ruler = {"tasks": [{"task": "vt", "complete": rate}, {"task": "cwe", "complete": {**rate, "items": 7}}]}
    _, tasks = sections({**EVALUATION, "planted": {"found": rate}, "ruler": ruler})
    assert [row[:2] for row in tasks.table.rows] == [
        ("planted facts, repeated", "20"),
        ("RULER's vt, all answers", "20"),
        ("RULER's cwe, all answers", "7"),
    ]
    (alone,) = sections({**EVALUATION, "texts": [{"text": "a", "perplexity": float("inf")}]})
    assert alone.table.rows == [("a", "diverged", *"––––––")]
    assert alone.draw is None


def test_a_benchmark_has_its_points_below_measured_ceilings() -> None:
    case = {
        "name": "one",
        "limit_ms": 1.0,
        "flops": 1e9,
        "nbytes": 1e8,
        "read_bytes_per_second": 2e10,
        "matmul_flops_per_second": 1e12,
        "ways": {"headwise": {"ms": 10.0}, "other": {"error": "is not installed"}},
    }
    (section,) = sections({"kind": "decode", "cases": [case]})
    assert section.table.heading == ("ms", "limit", "headwise", "other")
    assert section.table.rows == [("one", "1", "10", "–")]
    assert section.draw is not None
    ceiling, points, none = section.draw().axes[0].lines
    assert ceiling.get_xdata()[1] == 50.0
    assert list(ceiling.get_ydata()) == [ceiling.get_xdata()[0] * 2e10, 1e12, 1e12]
    assert (list(points.get_xdata()), list(points.get_ydata()), list(none.get_xdata())) == ([10.0], [1e11], [])
    (uncounted,) = sections({"kind": "decode", "cases": [{**case, "flops": 0}]})
    assert uncounted.draw is None


def test_a_comparison_is_the_commands() -> None:
    comparison = headwise.compare("llama-3-8b", context=100)
    (section,) = sections(comparison.to_dict())
    assert len(section.table.rows) == len(comparison.rows)
    (own,) = (row for row in section.table.rows if row[0].endswith("(the model)"))
    assert own[1] == "131,072"
    timed = comparison.to_dict()
    timed["rows"] = [{**row, "decode_ms": 1.5, "prefill_ms": 2.0} for row in timed["rows"]]
    assert sections(timed)[0].table.rows[0][-2:] == ("1.500", "2.000")


def test_what_is_no_result_has_no_section() -> None:
    assert sections({}) == []
    assert sections({"model_type": "llama"}) == []
    with pytest.raises(CheckpointError, match=r"report = 'x\.json': must be a document that headwise printed"):
        sections({"texts": 3, "perplexity": 1}, name="x.json")
    with pytest.raises(CheckpointError, match="report"):
        sections({"points": [{}], "cache_bytes_per_token": 1})


def test_only_pages_with_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuse_no_page(tmp_path / "page.html", has_plots=False)  # headwise bench
    refuse_no_page(None)
    with pytest.raises(MissingExtraError, match="needs the matplotlib package"):
        refuse_no_page(tmp_path / "page.html")


def test_names_are_not_markup() -> None:
    (section,) = sections({**EVALUATION, "model": "<b>", "texts": [{**SCORE, "text": "<i>.txt"}]})
    assert section.draw is not None
    text = web_page("a", [section.table, Picture(as_svg(section.draw), "b")])
    assert "<i>" not in text
    assert "<b>" not in text
    assert text.count("&lt;i&gt;.txt") == 3  # in the table, and of two lines in the legend


def test_a_frontiers_folder(tmp_path: Path) -> None:
    (tmp_path / "frontier.json").write_text(json.dumps(FRONTIER))
    (tmp_path / "half.json").write_text(json.dumps(EVALUATION))
    (tmp_path / "list.json").write_text("[1]")
    found = read_folder(tmp_path)
    assert found.source == "smollm2-135m"
    assert found.model is not None
    assert found.measured["int8"].loss == pytest.approx(0.0002)
    assert found.measured["mqa"].loss == float("inf")
    assert [section.table.title for section in found.sections] == ["What was measured", "Quality of half on text"]
    assert found.sections[0].table.rows[1][4] == "diverged"


def test_a_folder_of_predictions(tmp_path: Path) -> None:
    point = {"target": "int4", "runs_in": "headwise", "cache_bytes_per_token": 6480, "cache_fraction": 0.28}
    points = [{**point, "kl": 0.1}, {**point, "target": "int8", "kl": 0.5}, {**point, "target": "int2", "kl": None}]
    document = {**FRONTIER, "points": points, "is_predicted": True, "tokens": 2048, "error": "by half"}
    del document["cache_bytes_per_token"]
    (tmp_path / "predicted.json").write_text(json.dumps(document))
    found = read_folder(tmp_path)
    assert found.source == "smollm2-135m"
    (section,) = found.sections
    assert section.table.title == "What is predicted, and not measured"
    assert section.table.rows[2] == ("int2", "headwise", "6,480", "28.0%", "diverged")
    assert section.table.notes == ["From 2,048 tokens; KL in nats a token; by half."]
    assert found.measured["int4"].is_predicted
    (tmp_path / "frontier.json").write_text(json.dumps(FRONTIER))
    found = read_folder(tmp_path)
    assert not found.measured["int8"].is_predicted
    assert found.measured["int4"].is_predicted
    assert len(found.sections) == 2


def test_a_frontier_of_a_model_that_is_gone_is_shown_without_it(tmp_path: Path) -> None:
    (tmp_path / "frontier.json").write_text(json.dumps({**FRONTIER, "source": "/no/such/model"}))
    found = read_folder(tmp_path)
    assert found.model is None
    assert "/no/such/model" in found.notes[0]
    with pytest.raises(CheckpointError, match="the model has"):
        read_folder(tmp_path, source="llama-3-8b")


def test_folders_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is no file, folder or catalog name"):
        read_folder(tmp_path / "none")
    with pytest.raises(ArgumentError, match="goes with a folder of results, and llama-3-8b is none"):
        read_folder("llama-3-8b", source="gpt2")
    with pytest.raises(ArgumentError, match=r"must have a config\.json"):
        read_folder(tmp_path)
    (tmp_path / "frontier.json").write_text("{")
    with pytest.raises(StorageError, match="cannot be read"):
        read_folder(tmp_path)


def test_a_config_or_a_name_has_a_page(tmp_path: Path, cli: Any, here: Path) -> None:
    named = read_folder("llama-3-8b")
    assert (named.model, named.measured, named.sections) == (read_spec("llama-3-8b"), {}, ())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(catalog()["gpt2"]["config"]))
    assert read_folder(config).model == read_spec(config)
    assert "wrote report.html" in cli("report", "gpt2").out
    assert 'id="options"' in (here / "report.html").read_text()


def test_a_conversion_shows_what_it_measured_of_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(catalog()["gpt2"]["config"]))
    point = {"target": "mla:0.5", "way": "as deepseek", "label": "MLA 144 + 48", "cache_fraction": 0.5, "kl": 0.1}
    for ratio, said in ((1.118, "×1.118 its original's"), (None, "infinitely many times its original's")):
        document = {"label": "MHA", "points": [{**point, "perplexity_ratio": ratio}]}
        (tmp_path / "measured.json").write_text(json.dumps(document))
        found = read_folder(tmp_path)
        assert found.measured == {}
        assert found.converted.startswith(f"This model is a conversion, mla:0.5 (MLA 144 + 48): perplexity is {said}")
    (tmp_path / "measured.json").write_text('{"points": [{}]}')
    assert read_folder(tmp_path).converted == ""


def test_the_commands(cli: Any, refused: Any, here: Path) -> None:
    folder = here / "results"
    folder.mkdir()
    (folder / "frontier.json").write_text(json.dumps(FRONTIER))
    answer = answered_without_torch("report", str(folder))
    assert answer["html"] == str(folder / "report.html")
    assert "What was measured" in (folder / "report.html").read_text()
    page = here / "page.html"
    answered_without_torch("advise", "llama-3-8b", "--hardware", "h100", "--html", str(page))
    assert 'id="options"' in page.read_text()
    answered_without_torch("compare", "gpt2", "--html", str(page))
    assert "Mechanisms side by side" in page.read_text()
    assert "wrote" in cli("report", folder, "--html", page).out
    no_page = "html = 'no/page.html': cannot be written"
    assert no_page in refused("report", folder, "--html", "no/page.html")
    assert no_page in refused("compare", "gpt2", "--html", "no/page.html")
    assert "context = 0: must be a whole number" in refused("report", folder, "--context", "0")
    assert "hardware = 'abacus'" in refused("report", folder, "--hardware", "abacus")
