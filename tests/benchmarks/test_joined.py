"""All ways to shrink a cache beside each other, from the results of several benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import formats, frontier, joined, tables
from tests.real_models import save_tiny

TEXTS = ("wikitext-2.test", "brown", "austen")
RUN = {"versions": {"headwise": "0", "torch": "2"}}


def evaluated(ratio: float, taken: float, *, reference: float = 20.0) -> dict[str, Any]:
    """An evaluation in float32, whose source caches 200 bytes a token in bfloat16."""
    texts = [
        {"text": f".cache/{name}.txt", "perplexity_ratio": ratio + place / 100, "reference_perplexity": reference}
        for place, name in enumerate(TEXTS)
    ]
    return {
        "texts": texts,
        "perplexity_ratio": ratio,
        "cache_bytes_per_token": taken,
        "reference_cache_bytes_per_token": 400.0,
        "kl": math.log(ratio),
        "top1_agreement": 0.9,
        "tokens": 36_846,
        "window": 2048,
        "dtype": "float32",
        "threads": 1,
    }


def a_format(ratio: float, taken: float, **more: Any) -> dict[str, Any]:
    cache = {"bytes_per_token": taken, "source_bytes_per_token": 200.0}
    return {"evaluate": evaluated(ratio, 2 * taken, **more), "cache": cache, "run": RUN}


def converted(ratio: float, taken: float) -> dict[str, Any]:
    conversion = {"label": "MLA 9 + 3", "mechanism": "mla", "seconds": 9.0, "calibration_tokens": 512}
    return {"conversion": conversion, "evaluate": evaluated(ratio, taken), "run": RUN}


def a_budget(budget: float, ratio: float, taken: float) -> dict[str, Any]:
    row = converted(ratio, taken)
    row["conversion"]["calibration_window"] = 64
    return {"budget": budget, "sample": "articles 1 of 3", **row}


def rival(method: str, wanted: float, ratio: float, taken: float) -> dict[str, Any]:
    texts = {name: {"nll": 3.0, "perplexity_ratio": ratio} for name in TEXTS}
    settings = {"bits": 3, "outliers": 0.01}
    row = {"method": method, "wanted": wanted, "settings": settings, "texts": texts, "run": RUN}
    return {**row, "token_bytes": taken, "fraction": taken / 200}


ROWS = {
    "formats": {"int8": a_format(1.001, 106.0), "kivi4": a_format(1.02, 56.0), "int4": a_format(1.1, 56.0)},
    "budgets": {
        "0.28/articles 1 of 3": a_budget(0.28, 1.05, 55.9),
        "0.28/articles 2 of 3": a_budget(0.28, 1.01, 55.8),
        "0.28/articles 3 of 3": a_budget(0.28, 1.03, 55.8),
        "0.125/articles 1 of 3": a_budget(0.125, 1.2, 25.0),
    },
    "rivals": {
        "original": {"texts": {name: {"nll": math.log(20.0)} for name in TEXTS}, "token_bytes": 200.0},
        "palu/0.28": rival("palu", 0.28, 1.015, 50.0),
        "kvquant/0.125": rival("kvquant", 0.125, 1.9, 26.2),  # a little above its budget
        "palu/0.125": rival("palu", 0.125, 2.5, 25.0),
        "elitekv/0.125": rival("elitekv", 0.125, 300.0, 25.0),
    },
    "conversion": {
        "mla-192/headwise": {
            **converted(1.1, 200.0),
            "method": "headwise",
            "texts": ["wikitext"],
            "kv_lora_rank": 144,
            "qk_rope_head_dim": 48,
        },
        "mla-192/transmla": {**converted(2.0, 200.0), "method": "transmla", "texts": ["wikitext"]},
        "mla-192/transmla?freqfold=1": {"valid_perplexity": 99.0},
    },
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"settings": {}, "rows": rows}))
    return tmp_path


def test_every_budget_has_its_best_of_each_kind_and_a_budget_without_one_no_line_of_it(results: Path) -> None:
    assert tables.frontier(results).splitlines() == [
        "| budget | cache | bytes | WikiText-2 | Brown | Austen |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(
            line
            for budget in ("50 %", "43 %")
            for line in (
                f"| {budget} | format `kivi4` | 28.0 % | ×1.020 | ×1.030 | ×1.040 |",
                "|  | published: Palu, 3 bits, 1% outliers | 25.0 % | ×1.015 | ×1.015 | ×1.015 |",
            )
        ),
        "| 28 % | headwise | 27.9 % | ×1.030 (1.010–1.050) | ×1.040 (1.020–1.060) | ×1.050 (1.030–1.070) |",
        "|  | format `kivi4` | 28.0 % | ×1.020 | ×1.030 | ×1.040 |",
        "|  | published: Palu, 3 bits, 1% outliers | 25.0 % | ×1.015 | ×1.015 | ×1.015 |",
        "| 25 % | published: Palu, 3 bits, 1% outliers | 25.0 % | ×1.015 | ×1.015 | ×1.015 |",
        *(
            f"| {budget} | published: KVQuant, 3 bits, 1% outliers | 13.1 % | ×1.900 | ×1.900 | ×1.900 |"
            for budget in ("19 %", "15 %")
        ),
        "| 12.5 % | headwise | 12.5 % | ×1.200 | ×1.210 | ×1.220 |",
        "|  | published: KVQuant, 3 bits, 1% outliers | 13.1 % | ×1.900 | ×1.900 | ×1.900 |",
    ]


def test_without_results_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert len(tables.frontier(tmp_path).splitlines()) == 2
    with pytest.raises(ValueError, match="no results"):
        joined.frontier(tmp_path, "source", "GQA")


def test_the_median_sample_and_of_two_the_worse(results: Path) -> None:
    three, one = joined.samples(results).values()
    assert joined.median(three).ratio == 1.03
    assert joined.median(three[:2]).ratio == 1.05
    assert joined.median(one).ratio == 1.2


def test_a_cache_without_codes_is_compared_in_bfloat16(results: Path) -> None:
    (conversion,) = joined.conversions(results)
    assert (conversion.target, conversion.kind, conversion.fraction) == ("mla:144+48", "converted", 0.5)
    assert conversion.result["cache"] == {"bytes_per_token": 100.0, "source_bytes_per_token": 200.0}


def test_one_page_of_all_with_its_verdict(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source = str(save_tiny(tmp_path / "source"))
    frontier.main(["--results", str(results), "--source", source, "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out
    sentence = (
        "of a bfloat16 cache: down to 53% quantise (×1.001), then down to 25% use a published method"
        " (×1.015), then down to 12.5% convert and quantise (×1.2)"
    )
    assert said.splitlines()[0] == sentence
    document = json.loads((tmp_path / "out/frontier.json").read_text())
    assert document["advice"][0] == sentence
    assert tables.verdict(results) == f"> {sentence}"
    assert [point["target"] for point in document["points"]] == [
        *("int8", "kivi4", "int4", "mla:144+48", "mla@0.28", "mla@0.125"),
        *("Palu@0.28", "KVQuant@0.125", "Palu@0.125", "EliteKV@0.125"),
    ]
    for name in ("frontier.html", "frontier.md"):
        text = (tmp_path / "out" / name).read_text()
        assert "mla@0.28 is the median of 3 calibration samples" in text
        assert "12.5% convert and quantise" in text


def test_rows_of_other_windows_are_refused(results: Path, tmp_path: Path) -> None:
    rows = {**ROWS["formats"], "kivi2": a_format(1.9, 31.2, reference=21.0)}
    (results / "formats.json").write_text(json.dumps({"settings": {}, "rows": rows}))
    with pytest.raises(ValueError, match="kivi2 was measured on other text than int8"):
        joined.frontier(results, "source", "GQA")


def test_each_format_is_a_row_and_a_killed_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, name in enumerate(TEXTS):
        (tmp_path / f"{name}.txt").write_text(f"Text {place} of another kind, with words of its own. " * 30)
    kept = tmp_path / "formats.json"
    command = ["--source", str(save_tiny(tmp_path / "source")), "--cache", str(tmp_path), "--json", str(kept)]
    command += ["--window", "64", "--windows", "2", "--formats", "kivi2", "int8"]
    formats.main(command)
    document = json.loads(kept.read_text())
    assert list(document["rows"]) == ["kivi2", "int8"]
    shown = tables.formats(document).splitlines()
    assert shown[0] == "| `--cache` | bytes | WikiText-2 | Brown | Austen | KL (nats) |"
    assert [line.split(" | ")[0] for line in shown[2:]] == ["| `int8`", "| `kivi2`"]  # the largest first
    smaller, larger = (document["rows"][name]["cache"]["bytes_per_token"] for name in ("kivi2", "int8"))
    assert smaller < larger < document["rows"]["int8"]["cache"]["source_bytes_per_token"]
    capsys.readouterr()
    formats.main(command)
    assert capsys.readouterr().out == ""
