"""Results as tables, and tables in their places."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from benchmarks.healing_tables import healed
from benchmarks.quick import agreement
from benchmarks.tables import (
    RESULTS,
    ablation,
    by_model,
    by_model_short,
    conversion,
    decode,
    fill,
    generate,
    kills,
    large,
    limits,
    positions,
    quick,
    render_all,
    retrieval,
    retrieval_short,
    rivals,
    ruler,
    speech,
)

from headwise.costs.prediction import SAFE_LOSS
from headwise.decide.advice import PREDICTED_ERROR, Measured
from headwise.measure.texts.windows import SHARED

ROOT = Path(__file__).parents[2]


def row(target: str, method: str, values: int, ratios: list[float], **more: Any) -> dict[str, Any]:
    names = ("wikitext-2.test", "brown")
    texts = [
        {
            "text": f".cache/{name}.txt",
            "perplexity": 20 * ratio,
            "perplexity_ratio": ratio,
            "reference_perplexity": 20.0,
        }
        for name, ratio in zip(names, ratios, strict=True)
    ]
    rank = None if target == "mqa" else values - 48
    return {
        "name": f"{target}/{method}",
        "method": method,
        "values": values,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": None if rank is None else 48,
        "texts": ["wikitext"],
        "evaluate": {"texts": texts, "cache_bytes_per_token": values, "reference_cache_bytes_per_token": 384},
        **more,
    }


RIGHT = {"accuracy": {"rate": 0.66, "reference_rate": 0.68}}
DOCUMENT = {
    "rows": {
        "".join([row["name"], *row["texts"][1:], str(row.get("stock", ""))]): row
        for row in (
            row("mqa", "mean", 128, [1308.4, 900.0]),
            row("mla-128", "headwise", 128, [1.4, 1.5], conversion={"seconds": 90.0}, choices=RIGHT),
            row("mla-192", "headwise", 192, [1.123, 1.2], conversion={"seconds": 120.0}, choices=RIGHT),
            row("mla-192", "headwise", 193, [1.2, 1.3], conversion={"seconds": 60.0}, kv_lora_rank=144, stock=True),
            row("mla-192", "headwise", 192, [1.3, 1.1], conversion={"seconds": 60.0}, texts=["wikitext", "news"]),
            row("mla-192", "transmla", 192, [2.0, 2.5], setting={"freqfold": 4, "qk_rope_head_dim": 64}),
        )
    }
    | {"mla-192/transmla?freqfold=1": {"valid_perplexity": 99.0}}
}


def test_conversions_the_largest_first_under_the_original() -> None:
    assert conversion(DOCUMENT).splitlines() == [
        "| values | method | WikiText-2 | Brown | PIQA | minutes |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| 384 | original | 20.00 | 20.00 | 68.0 % |  |",
        "| 192 | headwise (48 rotated) | 22.46 (×1.123) | 24.00 (×1.200) | 66.0 % | 2.0 |",
        "| 193 | headwise as deepseek_v3 (48 rotated) | 24.00 (×1.200) | 26.00 (×1.300) |  | 1.0 |",
        "| 192 | headwise on wikitext, news (48 rotated) | 26.00 (×1.300) | 22.00 (×1.100) |  | 1.0 |",
        "| 192 | TransMLA (FreqFold 4, 64 rotated) | 40.00 (×2.000) | 50.00 (×2.500) |  |  |",
        "| 128 | headwise (48 rotated) | 28.00 (×1.400) | 30.00 (×1.500) | 66.0 % | 1.5 |",
        "| 128, MQA | mean pooling | 26,168 (×1,308) | 18,000 (×900) |  |  |",
    ]


def test_a_text_that_was_calibrated_on_in_part_is_marked() -> None:
    shared = {".cache/wikitext-2.test.txt": 0.304, ".cache/brown.txt": 0.01}
    rows = {"a": row("mla-192", "headwise", 192, [1.123, 1.2], conversion={"seconds": 120.0}, shared=shared)}
    assert "| 22.46 (×1.123, 30% shared) | 24.00 (×1.200) |" in conversion({"rows": rows})


def test_points_lost() -> None:
    near = {
        "rate": 0.8,
        "reference_rate": 0.82,
        "difference": -0.02,
        "difference_low": -0.031,
        "difference_high": -0.01,
    }
    rows = {
        "original": {"ranks": [1]},
        "gqa:6/aligned boolq 16384": {
            "method": "aligned",
            "text": "boolq",
            "tokens": 16384,
            "recall_at_1": near,
            "recall_at_10": {"rate": 0.95, "reference_rate": 0.96},
        },
    }
    assert retrieval({"rows": rows}).splitlines()[2:] == [
        "| mha (12) | original |  | 82.00 |  | 96.00 |",
        "| gqa:6 | aligned | 16,384 tokens of boolq | 80.00 | 2.00 (1.00 to 3.10) | 95.00 |",
    ]
    rows["gqa:6/aligned boolq 16384"]["shared"] = 0.02
    assert "| 16,384 tokens of boolq, 2% shared |" in retrieval({"rows": rows})


def test_points_lost_by_weights_alone_and_by_the_most_prose() -> None:
    def kept(heads: int, method: str, tokens: int, difference: float) -> dict[str, Any]:
        rate = {"rate": 0.8 + difference, "reference_rate": 0.8, "difference": difference}
        rate |= {"difference_low": difference - 0.01, "difference_high": difference + 0.01}
        text = "wikitext" if tokens else ""
        return {"heads": heads, "method": method, "text": text, "tokens": tokens, "recall_at_1": rate}

    rows = [kept(6, "mean", 0, -0.2), kept(6, "aligned", 16, -0.05), kept(6, "aligned", 1024, -0.005)]
    rows += [kept(3, "first_head", 0, -0.7), {**kept(3, "aligned", 1024, -0.1), "text": "boolq"}]
    document = {"rows": {"original": {"ranks": [1]}} | {str(number): row for number, row in enumerate(rows)}}
    assert retrieval_short(document).splitlines()[2:] == [
        "| the model's own |  | 100.0 % | 80.00 |  |",
        "| gqa:6, mean pooling | 0 | 50.0 % | 60.00 | -20.00 (-21.00 to -19.00) |",
        "| gqa:6, aligned | 1,024 | 50.0 % | 79.50 | -0.50 (-1.50 to +0.50) |",
    ]


def test_words_that_a_speech_model_writes_wrongly() -> None:
    own = {"bytes": 6144.0, "kl": 0.0, "kl_999": 0.0, "same": 2, "errors": [1, 0]}
    own["word_error_rate"] = {"rate": 0.05, "low": 0.04, "high": 0.062}
    half = {"bytes": 3072.0, "kl": 0.0123, "kl_999": 0.4, "same": 1, "errors": [1, 1]}
    more = {"difference": 0.05, "difference_low": 0.0, "difference_high": 0.1}
    half["word_error_rate"] = {"rate": 0.1, "low": 0.0, "high": 0.2, **more}
    assert speech({"rows": {"original": own, "gqa:3/mean": half}}).splitlines()[2:] == [
        "| the model's own | 100.0 % | 0 | 0 | 5.0 (4.0 to 6.2) |  | 2 of 2 |",
        "| gqa:3, mean | 50.0 % | 0.0123 | 0.40 | 10.0 | +5.0 (+0.0 to +10.0) | 1 of 2 |",
    ]


def test_ways_by_model() -> None:
    """The best of as few bytes is in bold type, and of three samples the middle one is shown."""

    def kept(way: str, size: float, kl: float, **more: Any) -> dict[str, Any]:
        text = {"perplexity_ratio": 1 + kl, "kl": kl, "kl_999": 10 * kl}
        return {"model": "m", "way": way, "bytes": size, "texts": [text], **more}

    rows = [kept("mla@0.25", 0.25, kl, seconds=600 * kl) for kl in (0.3, 0.1, 0.2)]
    rows += [kept("coarse", 0.25, 0.5), kept("fine", 0.5, 0.4), kept("finest", 0.6, 0.01)]
    document = {"settings": {"texts": ["brown"]}, "rows": {str(number): row for number, row in enumerate(rows)}}
    problems = {"settings": {"source": "m.gguf"}, "rows": {"own": {"rate": 0.5}, "fine": {"rate": 0.415}}}
    answers = {"settings": {"source": "m.gguf"}, "rows": {"own": {"score": 0.75}, "finest": {"score": 0.7}}}
    assert by_model(document, problems, answers).splitlines()[2:] == [
        "| m | the model's own | 100.0 % | ×1.000 | 0 | 0 | 50 | 75 |  |",
        "| m | **finest** | 60.0 % | ×1.010 | 0.0100 | 0.10 |  | 70 |  |",
        "| m | fine | 50.0 % | ×1.400 | 0.4000 | 4.00 | 42 |  |  |",
        "| m | **mla@0.25** | 25.0 % | ×1.200 (1.100–1.300) | 0.2000 | 2.00 |  |  | 2.0 |",
        "| m | coarse | 25.0 % | ×1.500 | 0.5000 | 5.00 |  |  |  |",
    ]


def test_models_that_are_trained_here_and_further_ways_are_not_in_readme() -> None:
    """A way that is not shown still counts among those that a bold one loses less than."""
    text = {"perplexity_ratio": 1.1, "kl": 0.1, "kl_999": 1.0}
    ways = (
        ("real", "same@0.28", 0.28, 0.1),
        ("real", "kivi3:32", 0.28, 0.05),
        ("m, trained here", "same@0.28", 0.28, 0.1),
    )
    rows = [
        {"model": model, "way": way, "bytes": size, "texts": [text | {"kl": kl}], "seconds": 60}
        for model, way, size, kl in ways
    ]
    document = {"settings": {"texts": ["brown"]}, "rows": {str(number): row for number, row in enumerate(rows)}}
    tasks: dict[str, Any] = {"settings": {"source": "m.gguf"}, "rows": {}}
    assert by_model_short(document, tasks, tasks).splitlines()[2:] == [
        "| real | same@0.28 | 28.0 % | ×1.100 | 0.1000 | 1.00 |  |  | 1.0 |"
    ]


def test_tasks_of_a_kind() -> None:
    """A kind's score is the mean of its tasks', and that of all stands beside it."""
    tasks = {"niah_single_1": 1.0, "niah_single_2": 0.5, "niah_multikey_1": 0.25, "niah_multivalue": 0.6}
    tasks |= {"niah_multiquery": 0.2, "vt": 0.1, "cwe": 0.3, "fwe": 0.9}
    document = {"rows": {"own": {"score": 0.48125, "tasks": tasks}}}
    assert ruler(document).splitlines()[2:] == ["| own | 48 | 75 | 25 | 40 | 10 | 30 | 90 |"]


def test_length() -> None:
    def kept(name: str, nll: float) -> dict[str, Any]:
        scores = [{"start": 1, "stop": 1256, "nll": nll, "reference_nll": 3.4}]
        return {"name": name, "on": "brown", "texts": [{"by_position": scores}]}

    rows = {"a": kept("mla:0.5", 3.5), "b": kept("mla:0.25", 3.3)}
    assert positions({"rows": rows}).splitlines()[2:] == ["| brown | 1–1,255 | 3.400 | +0.100 | -0.100 |"]


def test_predictions_beside_measurements() -> None:
    formats = {"int8": (0.0021, 0.002), "int4": (0.12, 0.1), "int2": (2.0, 3.5)}
    rows = {name: {"predicted": one, "measured": other} for name, (one, other) in formats.items()}
    found = {"formats": rows, **agreement(rows)}
    fewer = {"formats": {"int8": rows["int8"]}, "rank correlation": 1.0, "within 1.5": 1.0, "largest factor": 1.05}
    assert quick({"rows": {"a": found, "b": fewer}}).splitlines()[2:] == [
        "| `int8` | 0.0021, 0.002 | 0.0021, 0.002 |",
        "| `int4` | 0.12, 0.1 |  |",
        "| `int2` | 2, 3.5 |  |",
        "| rank correlation | 1.000 | 1.000 |",
        "| within a factor of 1.5 | 67% | 100% |",
        "| largest factor | 1.75 | 1.05 |",
    ]


def test_the_stated_error_of_predictions_is_the_measured_one() -> None:
    models = json.loads((RESULTS / "quick.json").read_text())["rows"].values()
    pairs = [(one["predicted"], one["measured"]) for row in models for one in row["formats"].values()]
    within = {most: mean(max(a, b) <= most * min(a, b) for a, b in pairs) for most in (1.5, 2)}
    assert f"{within[1.5]:.0%} were within a factor of 1.5" in PREDICTED_ERROR
    assert f"{within[2]:.0%} within 2" in PREDICTED_ERROR
    assert len(models) == 4


def test_predicted_losses_bound_the_measured_rise_of_perplexity() -> None:
    """Advice holds exp(factor × KL) − 1 to a limit of perplexity: SmolLM2's formats on three texts."""
    predicted = json.loads((RESULTS / "quick.json").read_text())["rows"]["SmolLM2-135M"]["formats"]
    measured = json.loads((RESULTS / "formats.json").read_text())["rows"]
    pairs = [
        (
            Measured(target=name, cache_fraction=0.5, loss=math.expm1(kl), kl=kl, file="", is_predicted=True),
            text["perplexity_ratio"] - 1,
        )
        for name, kl in ((name, row["predicted"]) for name, row in predicted.items())
        if name in measured
        for text in measured[name]["evaluate"]["texts"]
    ]
    assert len(pairs) >= 30
    assert mean(loss <= point.loss_at_most for point, loss in pairs) >= 0.9
    assert mean(loss <= point.loss for point, loss in pairs) < 0.9  # the factor is needed


def test_eight_bits_are_as_safe_as_is_said() -> None:
    rows = json.loads((RESULTS / "prepared-llama.cpp.json").read_text())["rows"].values()
    found = [
        row for row in rows if (row["cache"], row["way"], row["name"]) == ("q8_0", "as it is", "Qwen2.5-Coder-0.5B")
    ]
    assert found
    for row in found:
        assert row["perplexity"] / row["full"]["perplexity"] <= 1 + SAFE_LOSS


def test_ablation() -> None:
    point = {
        "way": "headwise",
        "ratios": {"a.txt": 1.1, "b.txt": 1.25},
        "kl": 0.1,
        "seconds": 90,
        "held_out_loss": None,
    }
    folds = [{**point, "way": f"transmla:{fold}", "held_out_loss": loss} for fold, loss in ((1, 2.5), (4, 2.0))]
    assert ablation({"texts": ["x/a.txt", "b.txt"], "points": [point, *folds]}).splitlines()[2:] == [
        "| headwise | ×1.100 | ×1.250 | 0.100 | 1.5 |",
        "| TransMLA, FreqFold 4 | ×1.100 | ×1.250 | 0.100 | 1.5 |",
    ]
    notes = ["not measured", f"5.0% of the 100 tokens evaluated on lie in passages {SHARED}"]
    assert ablation({"texts": [], "points": [], "notes": notes}).splitlines()[2:] == ["", notes[1]]


def test_scale() -> None:
    split = {"reading": 1.25, "solving": 60.0, "writing": 0.5}
    row = {"layers": 32, "peak_rss_gb": 2.5, "seconds": 1800.0, "seconds_a_layer": split}
    rows = {"statistics": row, "text": row, "spread": {**row, "layers": 4}}
    assert large({"settings": {"windows": [8, 512]}, "rows": rows}).splitlines()[2:] == [
        "| statistics given | 32 | 2.50 | 1.2 | 60.0 | 0.5 | 30 |",
        "| calibrated on 8 windows of 512, without spread | 32 | 2.50 | 1.2 | 60.0 | 0.5 | 30 |",
        "| calibrated on 8 windows of 512 | 4 | 2.50 | 1.2 | 60.0 | 0.5 | 30 |",
    ]
    row = {"signals": {"SIGKILL": 2, "SIGINT": 1}, "moments": {"seconds": 3}, "left": {"nothing": 3}, "findings": []}
    killed = {"rows": {"heal": {**row, "outputs": 2}, "export": {**row, "outputs": 1, "findings": ["a"]}}}
    assert kills(killed).splitlines()[2:] == [
        "| heal | 2 | 1 | 0 | 0 | 3 | 0 | 0 | 2 | 0 |",
        "| export | 2 | 1 | 0 | 0 | 3 | 0 | 0 | 1 | 1 |",
        "| all | 4 | 2 | 0 | 0 | 6 | 0 | 0 | 3 | 1 |",
    ]


def test_tables_go_into_their_places_and_nowhere_else() -> None:
    text = (
        "a\n<!-- table: one -->\nold\nold\n<!-- end of table -->\nb\n<!-- table: two -->\n<!-- end of table -->\nc\n"
    )
    filled = fill(text, {"one": "| new |"})
    assert filled == text.replace("old\nold", "| new |")
    assert fill(filled, {"one": "| new |"}) == filled


@pytest.mark.parametrize(
    "document", ["README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")))]
)
def test_documents_show_what_the_results_give(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    tables = render_all(ROOT / RESULTS)
    assert set(re.findall("<!-- table: (.*?) -->", text)) <= set(tables)  # or `fill` leaves what stands there
    assert fill(text, tables) == text


def timed(length: int, batch: int, limit_ms: float) -> dict[str, Any]:
    ways = {
        "headwise": {"ms": 2.0, "gb_per_s": 40.0, "gflop_per_s": 80.0},
        "SDPA": {"ms": 9.0},
        "Flex": {"error": "no"},
    }
    values = {"shape": "32/8/128", "length": length, "batch": batch, "dtype": "float32"}
    rates = {"nbytes": 64_000_000, "read_bytes_per_second": 40e9}
    return {"name": f"{length} tokens", "values": values, "limit_ms": limit_ms, "ways": ways, **rates}


def test_speeds_are_multiples_of_headwises_time_and_of_the_limit() -> None:
    document = {"cases": [timed(512, 1, 1.6), timed(8192, 1, 1.6), timed(8192, 4, 1.6)]}
    assert decode(document).splitlines()[2:] == ["| 32/8/128 | float32 | 2.00 | 1.25 | 4.5 |  |  |  |"]
    lines = limits({"cases": [timed(8192, 1, 1.6), timed(8192, 4, 4.0)]}).splitlines()[2:]
    assert lines == [
        "| 32/8/128 | 1 | float32 | 2.00 | 40 | 80 | 40 | memory | 1.25 |",
        "| 32/8/128 | 4 | float32 | 2.00 | 40 | 80 | 40 | products | 0.50 |",
    ]
    narrow = {"cases": [timed(64, 1, 0.8), timed(8000, 1, 1.25)]}
    told = generate({"cases": [timed(64, 1, 1.6), timed(8000, 1, 2.5)]}, narrow).splitlines()
    assert told[0] == "| ms a token at | 64 tokens | 8000 tokens |"
    assert told[2:] == [
        "| headwise | 2.0 | 2.0 |",
        "| SDPA | 9.0 | 9.0 |",
        "| Flex |  |  |",
        "| (limit: weights and cache read once) | 1.6 | 2.5 |",
        "| headwise, bfloat16 | 2.0 | 2.0 |",
        "| SDPA, bfloat16 | 9.0 | 9.0 |",
        "| Flex, bfloat16 |  |  |",
        "| (limit, bfloat16: weights and cache read once) | 0.8 | 1.2 |",
    ]


def test_rivals_by_budget_the_best_first() -> None:
    def rival(method: str, wanted: float, ratio: float, settings: dict[str, Any]) -> dict[str, Any]:
        texts = {"wikitext-2.test": {"perplexity_ratio": ratio}, "brown": {"perplexity_ratio": 2 * ratio}}
        return {"method": method, "wanted": wanted, "fraction": wanted - 0.004, "settings": settings, "texts": texts}

    rows = {
        "original": {"texts": {"wikitext-2.test": {"nll": 3.0}, "brown": {"nll": 3.1}}, "fraction": 1.0},
        "care/0.125": rival("care", 0.125, 12.0, {"way": "CARE-E", "ranks": [12, 48]}),
        "care/0.25": rival("care", 0.25, 2.0, {"way": "CARE-U", "ranks": [48, 48]}),
        "kvquant/0.25": rival("kvquant", 0.25, 1.1, {"bits": 4, "outliers": 0.01}),
    }
    assert rivals({"rows": rows}).splitlines() == [
        "| budget | method | settings | bytes | WikiText-2 | Brown |",
        "| --- | --- | --- | ---: | ---: | ---: |",
        "| 25 % | KVQuant | 4 bits, 1% outliers | 24.6 % | ×1.100 | ×2.200 |",
        "| 25 % | CARE | CARE-U, ranks 48 to 48 | 24.6 % | ×2.000 | ×4.000 |",
        "| 12.5 % | CARE | CARE-E, ranks 12 to 48 | 12.1 % | ×12 | ×24 |",
    ]


def test_the_longest_training_on_each_mixture_is_shown_beside_none() -> None:
    def kept(ratio: float, tokens: int | None, **settings: float) -> dict[str, Any]:
        row: dict[str, Any] = {"evaluation": {"texts": [{"text": "a", "perplexity_ratio": ratio, "kl": 0.25}]}}
        if tokens is not None:
            row["healing"] = {"tokens": tokens, "texts": ["b", "c"], "seconds": 3.6 * tokens}
            if settings:
                row["healing"] |= {"objective_settings": settings, "texts": ["b", "c", "d"]}
        return row

    rows = {
        "mla:0.5 of 2000": kept(1.01, 2000),
        "mla:0.5 of 0": kept(1.06, None),
        "mla:0.333 of 9000": kept(1.5, 9000),
        "mla:0.5 of 1000": kept(1.03, 1000),
    }
    broad = {"mla:0.5 of 3000 text_weight=0.1": kept(0.97, 3000, text_weight=0.1)}
    assert healed({"settings": {"calibration_tokens": 512}, "rows": rows}, {"settings": {}, "rows": broad}) == [
        ["half of the values cached, without codes", "a"],
        ["calibrated on 512 tokens", "×1.060 (0.250)"],
        ["then trained on 2,000 tokens of 2 texts in 2.0 h", "×1.010 (0.250)"],
        ["then trained on 3,000 tokens of 3 texts in 3.0 h, `--text-weight 0.1`", "×0.970 (0.250)"],
    ]
