"""Make tables from the results, and insert them in the documents that show them.

    python -m benchmarks.tables                                        # print them
    python -m benchmarks.tables --write README.md docs/*.md            # insert them in these documents

A document marks the place of a table by a line ``<!-- table: NAME -->`` and a line ``<!-- end of table -->``; the
lines between them are replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.shared import shared_mark
from benchmarks.trust.fuzz.lines import share

from benchmarks import audit_tables, healing_tables, joined
from headwise.base.tables import Table
from headwise.conversion.frontiers.points import verdict_lines
from headwise.conversion.methods import all_methods
from headwise.costs.prediction import SERVING_ENGINES
from headwise.measure.texts.windows import SHARED
from headwise.models.specs import read_spec

RESULTS = Path("benchmarks/results")
Document = dict[str, Any]

METHODS = {
    method.name: method.label
    for method in sorted(all_methods(), key=lambda method: (not method.is_default, "mla" not in method.targets))
}
"""The labels of all methods by name, headwise's own first, in the order of tables."""


def conversion(document: Document) -> str:
    """The table of all conversions on all texts."""
    texts, rows = _texts(document), []
    for row in _conversions(document):
        scores = row["evaluate"]["texts"]
        ratios = [f"{_number(score['perplexity'])} ({_text_ratio(row, score)})" for score in scores]
        rows.append([_target(row), _method(row), *ratios, *_piqa(row), _minutes(row)])
    for row in _conversions(document)[:1]:
        original = [_number(score["reference_perplexity"]) for score in row["evaluate"]["texts"]]
        rows.insert(0, [f"{_values_of_original(row):.0f}", "original", *original, *_piqa_of_original(document), ""])
    head = ["values", "method", *texts, "PIQA", "minutes"]
    return table(head, rows, left=2)


def retrieval(document: Document) -> str:
    """The table of an encoder's conversions: points of R@1 lost."""
    rows = []
    for name, row in document["rows"].items():
        if "recall_at_1" in row:
            recall = row["recall_at_1"]
            lost, low, high = (-100 * recall[key] for key in ("difference", "difference_high", "difference_low"))
            method = METHODS.get(row["method"], row["method"])
            on = f"{row['tokens']:,} tokens of {row['text']}" if row["text"] else ""
            on += shared_mark(row.get("shared"))
            rows.append(
                [
                    name.partition("/")[0],
                    method,
                    on,
                    f"{100 * recall['rate']:.2f}",
                    f"{lost:.2f} ({low:.2f} to {high:.2f})",
                    f"{100 * row['recall_at_10']['rate']:.2f}",
                ]
            )
            original = f"{100 * recall['reference_rate']:.2f}", f"{100 * row['recall_at_10']['reference_rate']:.2f}"
    if rows:
        rows.insert(0, ["mha (12)", "original", "", original[0], "", original[1]])
    return table(["heads", "method", "calibrated on", "R@1 %", "points lost (95 %)", "R@10 %"], rows, left=3)


_MINILM_HEADS = 12
"""The key–value heads of all-MiniLM-L6-v2, before conversion."""


def retrieval_short(document: Document) -> str:
    """The table of an encoder's conversions by the weights alone and by the most prose, with their bytes."""
    rows = [row for row in document["rows"].values() if row.get("method") in ("aligned", "mean")]
    most = max(row["tokens"] for row in rows)
    lines = []
    for row in rows:
        if (row["text"], row["tokens"]) in (("", 0), ("wikitext", most)):
            recall = row["recall_at_1"]
            size = f"{100 * row['heads'] / _MINILM_HEADS:.1f} %"
            found = [f"{100 * recall['rate']:.2f}", _difference(recall, 2)]
            lines.append([f"gqa:{row['heads']}, {METHODS[row['method']]}", f"{row['tokens']:,}", size, *found])
    original = f"{100 * rows[0]['recall_at_1']['reference_rate']:.2f}"
    head = ["way", "tokens of WikiText-2", "bytes", "right passage %", "difference in points (95 %)"]
    return table(head, [["the model's own", "", "100.0 %", original, ""], *lines])


def speech(document: Document) -> str:
    """The table of Whisper's conversions: their bytes, divergences and words that are wrong."""
    lines, own = [], document["rows"]["original"]
    for name, row in document["rows"].items():
        wrong = row["word_error_rate"]
        is_own = row is own
        lines.append(
            [
                "the model's own" if is_own else name.replace("/", ", "),
                f"{100 * row['bytes'] / own['bytes']:.1f} %",
                *(["0", "0"] if is_own else [f"{row['kl']:.4f}", f"{row['kl_999']:.2f}"]),
                f"{100 * wrong['rate']:.1f}" + (f" ({100 * wrong['low']:.1f} to {100 * wrong['high']:.1f})" * is_own),
                "" if is_own else _difference(wrong, 1),
                f"{row['same']} of {len(row['errors'])}",
            ]
        )
    head = ["way", "bytes", "KL", "its 99.9 %", "wrong words %", "difference in points (95 %)", "written alike"]
    return table(head, lines)


def _difference(rate: dict[str, float], digits: int) -> str:
    """The difference of a rate from the reference's in percent, with its interval."""
    difference, low, high = (
        f"{100 * rate[name]:+.{digits}f}" for name in ("difference", "difference_low", "difference_high")
    )
    return f"{difference} ({low} to {high})"


def positions(document: Document) -> str:
    """The table of losses by position in a long context, of a model and of its conversions."""
    by_place: dict[tuple[str, str], list[str]] = {}
    names: list[str] = []
    for row in document["rows"].values():
        if row["name"] not in names:
            names.append(row["name"])
        for score in row["texts"][0]["by_position"]:
            place = f"{score['start']:,}–{score['stop'] - 1:,}"
            cells = by_place.setdefault((row["on"], place), [f"{score['reference_nll']:.3f}"])
            cells.append(f"{score['nll'] - score['reference_nll']:+.3f}")
    header = ["text", "positions", "original (nats)", *(f"`{name}`" for name in names)]
    return table(header, [[*place, *cells] for place, cells in by_place.items()], left=2)


def kivi(document: Document) -> str:
    """The table of relative errors of what is coded by token and by channel."""
    errors = document["rows"]["errors"]["relative_errors"]
    kinds = list(dict.fromkeys(name.rpartition("/")[0] for name in errors))
    rows = [
        [f"{what}, {bits} bits", *(f"{100 * errors[f'{what}/{bits}/{way}']:.1f} %" for way in ("token", "channel"))]
        for what, bits in (kind.split("/") for kind in kinds)
    ]
    return table(["error of", "by token", "by channel"], rows)


def recall(document: Document) -> str:
    """The table of facts recalled with each cache, by the place of the fact in the context."""
    depths = sorted({row["depth"] for row in document["rows"].values()})
    by_cache: dict[str, dict[float, str]] = {}
    for row in document["rows"].values():
        (score,) = row["depths"]
        by_cache.setdefault(row["name"], {})[row["depth"]] = f"{score['found']:.2f}, {score['first']:.2f}"
    names = {"own": "the model's own"}
    rows = [
        [names.get(name, f"`{name}`"), *(scores.get(depth, "") for depth in depths)]
        for name, scores in by_cache.items()
    ]
    return table(["cache", *(f"depth {depth:g}" for depth in depths)], rows)


def ways(document: Document) -> str:
    """The table of all ways to a smaller cache on small models, each model's by the bytes that they take."""
    rows = []
    for model, row in document["rows"].items():
        points = sorted(row["points"], key=lambda point: -float(point["cache_fraction"]))
        for place, point in enumerate(points):
            ratios = map(_ratio, point["ratios"].values())
            name = "" if place else model
            rows.append([name, f"`{point['target']}`", f"{100 * point['cache_fraction']:.1f} %", *ratios])
    texts = [_text_name(text) for row in document["rows"].values() for text in row["points"][0]["ratios"]]
    return table(["model", "way", "bytes", *dict.fromkeys(texts)], rows, left=2)


def other_models(document: Document) -> str:
    """The table of models that nothing was tuned on: each method's range of ratios over its samples, on each text."""
    ratios: dict[tuple[str, str], list[list[float]]] = {}
    for row in document["rows"].values():
        scores = [float(score["perplexity_ratio"]) for score in row["evaluate"]["texts"]]
        ratios.setdefault((row["model"], row["method"]), []).append(scores)
    names = [_text_name(score["text"]) for score in next(iter(document["rows"].values()))["evaluate"]["texts"]]
    lines = [
        [model, f"`{method}`", str(len(scores)), *(_spread(column) for column in zip(*scores, strict=True))]
        for (model, method), scores in ratios.items()
    ]
    return table(["model", "method", "samples", *names], lines, left=2)


def ablation(document: Document) -> str:
    """The table of stages: headwise without each of them, and the published methods, TransMLA at its best fold."""
    names = [Path(text).stem for text in document["texts"]]
    folds = [point for point in document["points"] if point["held_out_loss"] is not None]
    best = min(folds, key=lambda point: float(point["held_out_loss"]), default=None)
    rows = [
        [
            point["way"].replace("transmla:", "TransMLA, FreqFold ").replace("mha2mla", "MHA2MLA"),
            *(_ratio(ratio) for ratio in point["ratios"].values()),
            f"{point['kl']:.3f}",
            f"{point['seconds'] / 60:.1f}",
        ]
        for point in document["points"]
        if point not in folds or point is best
    ]
    shared = [f"\n\n{note}" for note in document.get("notes", ()) if SHARED in note]
    return table(["", *names, "KL (nats)", "minutes"], rows) + "".join(shared)


def large(document: Document) -> str:
    """The table of time and memory of a 7B-shaped conversion."""
    text = "calibrated on {} windows of {}".format(*document["settings"]["windows"])
    names = {"statistics": "statistics given", "text": f"{text}, without spread", "spread": text}
    rows = []
    for name, row in document["rows"].items():
        split = row["seconds_a_layer"]
        parts = [f"{split[part]:.1f}" for part in ("reading", "solving", "writing")]
        rows.append(
            [names[name], f"{row['layers']}", f"{row['peak_rss_gb']:.2f}", *parts, f"{row['seconds'] / 60:.0f}"]
        )
    return table(["", "layers", "peak RSS GB", "s a layer: reading", "solving", "writing", "minutes"], rows)


def tiles(document: Document) -> str:
    """The table of decoding attention on a GPU: the fastest tile of headwise's kernel, and torch beside it."""
    rows = []
    for name, row in document["rows"].items():
        fastest = row["tiles"][0][0]
        theirs = [f"{row[way] * 1e3:.1f}" if way in row else "—" for way in ("sdpa_ms", "packed_ms")]
        rows.append([name, f"{row['limit_ms'] * 1e3:.1f}", f"{fastest * 1e3:.1f}", *theirs])
    return table(["heads × tokens, dtype", "reading alone, µs", "`split`", "torch's SDPA", "`packed`"], rows)


def crossover(document: Document) -> str:
    """The table of MLA's two implementations, and where they take as long."""
    shown = ("1", "32", "128", "512")
    rows = []
    for name, row in document["rows"].items():
        times = (row["ms"][new] for new in shown)
        cells = [f"{each['absorbed']:.1f} / {each['expanded']:.1f}" for each in times]
        rows.append([name, *cells, f"{row['measured']:.0f}", f"{row['by_flops']}"])
    heading = [f"{new} new" for new in shown]
    return table(["ms: absorbed / expanded", *heading, "as long at, measured", "by FLOPs"], rows)


def kills(document: Document) -> str:
    """The table of the commands whose runs were ended, what was left then, and the outputs that were compared."""
    signals, left = ("SIGKILL", "SIGINT", "SIGTERM"), ("nothing", "work that is kept", "the output in its place")
    rows = [
        [
            name,
            *(str(row["signals"].get(one, 0)) for one in signals),
            str(row["moments"].get("last operations", 0)),
            *(str(row["left"].get(one, 0)) for one in left),
            str(row["outputs"]),
            str(len(row["findings"])),
        ]
        for name, row in document["rows"].items()
    ]
    total = [str(sum(int(row[column]) for row in rows)) for column in range(1, len(rows[0]))]
    heading = ["command", *signals, "of them at the end", *(f"left: {one}" for one in left), "outputs equal", "wrong"]
    return table(heading, [*rows, ["all", *total]])


def fuzz(document: Document) -> str:
    """The table of malformed inputs: how they ended, the slowest, and the lines of the reader that were run."""
    rows = []
    for name, row in document["rows"].items():
        ended = dict(row["ended"])
        read, found = ended.pop("success", 0), len(row["findings"])
        run = f"{share(row['lines']):.0%}" if row["lines"] else "–"
        figures = [row["inputs"], read, sum(ended.values()) - ended.get("finding", 0), found]
        rows.append([name, *(f"{figure:,}" for figure in figures), f"{row['slowest_s']:.1f}", run])
    return table(["reader", "inputs", "read", "refused", "other ends", "slowest, s", "lines run"], rows)


def decode(document: Document) -> str:
    """The table of decoding at 8192 tokens: headwise's time, and the other implementations' times over it."""
    others = {
        "SDPA": "SDPA",
        "Flex": "FlexAttention",
        "packed": "packed, plain torch",
        "expanded": "copies for every head",
    }
    rows = []
    for case in document["cases"]:
        if (case["values"]["length"], case["values"]["batch"]) == (8192, 1):
            ms = case["ways"]["headwise"]["ms"]
            ratios = [_times(case["ways"].get(way, {}).get("ms"), ms) for way in others]
            limit = f"{ms / case['limit_ms']:.2f}"
            rows.append([case["values"]["shape"], case["values"]["dtype"], f"{ms:.2f}", limit, *ratios])
    return table(["heads", "dtype", "headwise ms", "× limit", *others.values()], rows, left=2)


def limits(document: Document) -> str:
    """The table of decoding with more cached bytes than the processor's caches hold: time over the limit."""
    rows = []
    for case in document["cases"]:
        timing, values = case["ways"]["headwise"], case["values"]
        reading = case["nbytes"] / case["read_bytes_per_second"] * 1e3
        bound = "memory" if reading >= 0.999 * case["limit_ms"] else "products"
        rows.append(
            [
                values["shape"],
                str(values["batch"]),
                values["dtype"],
                f"{timing['ms']:.2f}",
                f"{timing['gb_per_s']:.0f}",
                f"{timing['gflop_per_s']:.0f}",
                f"{case['read_bytes_per_second'] / 1e9:.0f}",
                bound,
                f"{timing['ms'] / case['limit_ms']:.2f}",
            ]
        )
    head = ["heads", "batch", "dtype", "ms", "GB/s", "GFLOP/s", "reading GB/s", "bound by", "× limit"]
    return table(head, rows, left=3)


def coded(document: Document) -> str:
    """The table of attention to codes: its time, that time over bfloat16's, and over the limit of its bytes."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, row in document["rows"].items():
        kind, _, details = name.partition(" ")
        if kind not in ("latents", "heads"):
            continue
        shape, form, tokens, _, *scored = details.split(", ")
        what = f"{kind} {shape}" + (" with content" if scored == ["content"] else "")
        over = row["bfloat16"]["first_over_this"]
        numbers = [f"{row['codes']['ms']:.2f}", f"{over:.2f}", f"{row['codes']['of_limit']:.2f}"]
        rows.setdefault((what, form, tokens), []).extend(numbers)
    head = ["cache", "format", "tokens", *("ms, {0}", "× bf16", "× limit") * 2]
    head = [word.format(("float32", "bfloat16")[i > 5]) for i, word in enumerate(head)]
    ordered = sorted(rows, key=lambda key: (not key[0].startswith("heads"), key[0], int(key[2])))
    return table(head, [[*key[:2], f"{int(key[2]):,}", *rows[key]] for key in ordered], left=2)


def coded_models(document: Document) -> str:
    """The table of whole models with caches in codes: bytes, and the time of a token."""
    rows = []
    for name, row in document["rows"].items():
        if name.startswith("models, "):
            for cache, way in row["ways"].items():
                times = (f"{way[dtype]['ms']:.0f}" for dtype in ("float32", "bfloat16"))
                rows.append([cache, f"{row['context']:,}", f"{100 * way['cache_fraction']:.1f} %", *times])
    return table(["cache", "tokens", "bytes", "ms a token, float32", "bfloat16"], rows)


def generate(float32: Document, bfloat16: Document) -> str:
    """The table of milliseconds a token of each way to run a model, at each context and in each dtype."""
    cases, rows = float32["cases"], []
    for dtype, document in (("", float32), (", bfloat16", bfloat16)):
        for way in document["cases"][0]["ways"]:
            times = [case["ways"][way].get("ms") for case in document["cases"]]
            rows.append([way + dtype, *("" if ms is None else f"{ms:.1f}" for ms in times)])
        limits = [f"{case['limit_ms']:.1f}" for case in document["cases"]]
        rows.append([f"(limit{dtype}: weights and cache read once)", *limits])
    return table(["ms a token at", *(case["name"] for case in cases)], rows)


def samples(document: Document) -> str:
    """The table of calibration samples: the ratio of each text, and under them the smallest and the largest."""
    rows = document["rows"]
    evaluations = [row["evaluate"]["texts"] for row in rows.values()]
    lines = [[name, *(_text_ratio(row, score) for score in row["evaluate"]["texts"])] for name, row in rows.items()]
    columns = [[score["perplexity_ratio"] for score in scores] for scores in zip(*evaluations, strict=True)]
    spread = [f"{_ratio(min(column))} to {_ratio(max(column))}" for column in columns]
    names = [_text_name(score["text"]) for score in evaluations[0]]
    return table(["articles of WikiText-2 train", *names], [*lines, ["all", *spread]])


def rivals(document: Document) -> str:
    """The table of published caches by the bytes that were asked for, the best on the first text first."""
    original = document["rows"]["original"]
    rows = [row for row in document["rows"].values() if "method" in row]
    rows.sort(key=lambda row: (-row["wanted"], next(iter(row["texts"].values()))["perplexity_ratio"]))
    lines = [
        [
            f"{100 * row['wanted']:g} %",
            joined.PUBLISHED[row["method"]],
            joined.settings(row["settings"]),
            f"{100 * row['fraction']:.1f} %",
            *(_ratio(score["perplexity_ratio"]) for score in row["texts"].values()),
        ]
        for row in rows
    ]
    head = ["budget", "method", "settings", "bytes", *(_text_name(f"{name}.txt") for name in original["texts"])]
    return table(head, lines, left=3)


def budgets(document: Document) -> str:
    """The table of budgets of bytes: the median of the samples' ratios on each text, and their range."""
    lines = []
    for budget in sorted({row["budget"] for row in document["rows"].values()}, reverse=True):
        rows = [row for row in document["rows"].values() if row["budget"] == budget]
        evaluations = [row["evaluate"] for row in rows]
        source = evaluations[0]["reference_cache_bytes_per_token"] / 2  # evaluated in float32
        stored = max(evaluation["cache_bytes_per_token"] for evaluation in evaluations) / source
        ratios = zip(*([score["perplexity_ratio"] for score in e["texts"]] for e in evaluations), strict=True)
        cells = [_spread(column) for column in ratios]
        asked = [row["choices"]["accuracy"] for row in rows if "choices" in row]
        rates = (f"{100 * asked[0][name]:.1f} %" for name in ("rate", "reference_rate")) if asked else ()
        piqa = " of ".join(rates)
        tokens = max(row["tokens"] for row in rows)
        lines.append([f"{100 * budget:g} %", f"{100 * stored:.2f} %", str(len(rows)), f"{tokens:,}", *cells, piqa])
    names = [_text_name(score["text"]) for score in evaluations[0]["texts"]]
    return table(["budget", "bytes", "samples", "tokens", *names, "PIQA"], lines)


def formats(document: Document) -> str:
    """The table of the field's formats, the largest first."""
    rows = sorted(
        document["rows"].items(),
        key=lambda row: (-_share_of(row[1]["cache"]), row[1]["evaluate"]["perplexity_ratio"]),
    )
    lines = [
        [
            f"`{name}`",
            f"{100 * _share_of(row['cache']):.1f} %",
            *(_ratio(score["perplexity_ratio"]) for score in row["evaluate"]["texts"]),
            f"{row['evaluate']['kl']:.4f}",
        ]
        for name, row in rows
    ]
    names = [_text_name(score["text"]) for _, row in rows[:1] for score in row["evaluate"]["texts"]]
    return table(["`--cache`", "bytes", *names, "KL (nats)"], lines)


def prepared(document: Document) -> str:
    """The table of models as they are and prepared, with an engine's caches: perplexity ratio, KL and its 99.9 %."""
    return _prepared(list(document["rows"].values()), with_quantile=True)


def prepared_short(document: Document) -> str:
    """The first model's, without the quantiles, and without full caches."""
    rows = list(document["rows"].values())
    return _prepared([row for row in rows if row["name"] == rows[0]["name"] and row["cache"] != "f16"])


def _prepared(rows: Sequence[dict[str, Any]], *, with_quantile: bool = False) -> str:
    named = {"as it is": "as it is", "weights": "by weights", "text": "on a text", "refitted": "refitted on it"}
    ways = {way: name for way, name in named.items() if any(row["way"] == way for row in rows)}
    order = sorted(rows, key=lambda row: 0 if row["name"] == rows[0]["name"] else 1)
    lines = []
    for name, cache, text in dict.fromkeys((row["name"], row["cache"], row["text"]) for row in order):
        cells = {row["way"]: row for row in rows if (row["name"], row["text"], row["cache"]) == (name, text, cache)}
        one = next(iter(cells.values()))
        part = f"{cache}, {100 * one['bytes'] / one['full']['bytes']:.0f} %"
        said = [
            f"×{row['perplexity'] / row['full']['perplexity']:.{3 + with_quantile}f}, {row['kl']:.4f}"
            + f" ({row['kl_999']:.2f})" * with_quantile
            if (row := cells.get(way))
            else "—"
            for way in ways
        ]
        lines.append([f"{name}, {_text_name(text)}", part, *said])
    return table(["model, text", "cache, bytes", *ways.values()], lines)


def beginnings(document: Document) -> str:
    """The table of perplexities with and without the BOS token, and of what int4 loses by each."""
    lines = [
        [
            f"{Path(row['model']).stem}, {_text_name(row['text'])}",
            *(_number(row[kind][0]) for kind in ("without", "with")),
            *(_ratio(row[kind][1] / row[kind][0]) for kind in ("without", "with")),
        ]
        for row in document["rows"].values()
    ]
    head = ["model, text", "without, as before", "with", "int4: ratio without, as before", "…, with"]
    return table(head, lines)


def humaneval(document: Document) -> str:
    """The table of HumanEval's problems that pass with each cache, beside those with the model's own."""
    rows = []
    for name, row in document["rows"].items():
        low, high = (f"{100 * end:.1f}" for end in row["interval"])
        beside = row.get("beside_own")
        alone = ["", ""] if beside is None else [str(beside["only_model"]), str(beside["only_reference"])]
        passed = f"{row['passed']} of {row['problems']}"
        rows.append([name, passed, f"{100 * row['rate']:.1f} ({low} to {high})", *alone])
    return table(["cache", "pass", "% (95 %)", "only with it", "only with the model's own"], rows)


RULER_GROUPS = {
    "one needle": "niah_single",
    "one of many": "niah_multikey",
    "several": ("niah_multivalue", "niah_multiquery"),
    "variables": "vt",
    "common words": "cwe",
    "frequent words": "fwe",
}
"""How the names of RULER's tasks begin, by what they have in common."""


def ruler(document: Document) -> str:
    """The table of RULER's scores with each cache: the mean over tasks, and those of tasks of a kind, in percent."""
    rows = []
    for name, row in document["rows"].items():
        groups = [
            statistics.fmean(score for task, score in row["tasks"].items() if task.startswith(begins))
            for begins in RULER_GROUPS.values()
        ]
        rows.append([name, *(f"{100 * score:.0f}" for score in (row["score"], *groups))])
    return table(["cache", "all", *RULER_GROUPS], rows)


def first_tokens(document: Document) -> str:
    """The table of ways to store first tokens: perplexities, beside four tokens in bfloat16."""
    rows = []
    for name, row in document["rows"].items():
        perplexity = row["perplexity"]
        ratios = {way: perplexity[way] / perplexity["four wide"] for way in FIRST_TOKENS if way != "four wide"}
        rows.append([name, _number(perplexity["four wide"]), *(f"×{ratio:.4f}" for ratio in ratios.values())])
    return table(["conversion and text", *FIRST_TOKENS.values()], rows)


def by_model(
    document: Document, problems: Document, answers: Document, *, shown: Collection[str] | None = None
) -> str:
    """The table of models × ways: what each stores, what it loses, what it solves and finds, and how long it took.

    Of several samples of a conversion, ratios are medians, with their range, and the KL is the median one; problems
    were solved, and answers found, with the first sample's. Ways that lose no more on the texts than any way of as
    few bytes, by the mean KL and within 2 %, are bold.

    Args:
        document: the rows of `benchmarks.by_model`.
        problems: those of `benchmarks.humaneval`.
        answers: those of `benchmarks.ruler`.
        shown: the ways to show; all when left out.
    """
    grouped: dict[tuple[str, str], list[Document]] = {}
    for row in document["rows"].values():
        grouped.setdefault((row["model"], row["way"]), []).append(row)
    medians = {key: sorted(rows, key=_mean_kl)[len(rows) // 2] for key, rows in grouped.items()}
    models, lines = list(dict.fromkeys(model for model, _ in medians)), []
    texts = [_text_name(text) for text in document["settings"]["texts"]]

    def tasks(model: str, way: str) -> list[str]:
        """The percentages of problems solved and of answers found, where they were measured."""
        found = []
        for measured, rate in ((problems, "rate"), (answers, "score")):
            rows = measured["rows"] if Path(measured["settings"]["source"]).stem == model else {}
            found.append(f"{100 * rows[way][rate]:.0f}" if way in rows else "")
        return found

    for model in models:
        if any(own := tasks(model, "own")):
            lines.append([model, "the model's own", "100.0 %", *([_ratio(1.0)] * len(texts)), "0", "0", *own, ""])
        ways = {way: row for (of, way), row in medians.items() if of == model}
        for way, row in sorted(ways.items(), key=lambda one: -one[1]["bytes"]):
            if shown is not None and way not in shown:
                continue
            others = [other for other in ways.values() if other["bytes"] < 1.02 * row["bytes"]]
            is_best = all(_mean_kl(row) <= _mean_kl(other) for other in others)
            rows = grouped[model, way]
            ratios = [
                _spread([each["texts"][number]["perplexity_ratio"] for each in rows]) for number in range(len(texts))
            ]
            divergence = [f"{_mean_kl(row):.4f}", f"{max(text['kl_999'] for text in row['texts']):.2f}"]
            minutes = f"{statistics.median(each['seconds'] for each in rows) / 60:.1f}" if "seconds" in row else ""
            name = f"**{way}**" if is_best else way
            size = f"{100 * row['bytes']:.1f} %"
            lines.append([model, name, size, *ratios, *divergence, *tasks(model, way), minutes])
    head = ["model", "way", "of bfloat16's bytes", *texts, "KL", "its 99.9 %", "HumanEval %", "RULER %", "minutes"]
    return table(head, lines, left=2)


def by_model_short(document: Document, problems: Document, answers: Document) -> str:
    """The rows of `by_model` that README shows: the real models, with a format's cache and at headwise's sizes."""
    rows = {key: row for key, row in document["rows"].items() if "trained here" not in row["model"]}
    engines = ("llama.cpp:q8_0", "llama.cpp:q8_0, prepared", "llama.cpp:q4_0", "llama.cpp:q4_0, prepared")
    shown = (*engines, "llama.cpp:q4_0, refitted", "kivi4", "same@0.28", "mla@0.19", "mla@0.125")
    return by_model(document | {"rows": rows}, problems, answers, shown=shown)


def _mean_kl(row: Document) -> float:
    """The mean over texts of a way's KL, in nats a token."""
    return statistics.mean(text["kl"] for text in row["texts"])


FIRST_TOKENS = {
    "four wide": "four in bfloat16",
    "own code": "the first in a code of its own",
    "one wide": "the first in bfloat16",
    "8 bits": "four in 8 bits",
    "none": "all in one code",
}
"""The ways to store first tokens, and their headings."""


def frontier(results: Path) -> str:
    """The table of budgets: headwise's conversion, and the best format and published method of no more bytes."""
    own, plain, published = joined.samples(results), joined.formats(results), joined.published(results)
    texts = list(dict.fromkeys(text for row in (*plain, *published) for text in row.ratios))
    lines = []
    for budget in joined.budgets(own):
        rows = own.get(budget, [])
        found: list[tuple[str, list[joined.Row]]] = [("headwise", rows)] if rows else []
        if (best := joined.best_within(plain, budget)) is not None:
            found.append((f"format `{best.target}`", [best]))
        if (best := joined.best_within(published, budget)) is not None:
            found.append((f"published: {best.way}, {best.result['label']}", [best]))
        for place, (name, of_name) in enumerate(found):
            stored = f"{100 * max(row.fraction for row in of_name):.1f} %"
            columns = ([row.ratios[text] for row in of_name if text in row.ratios] for text in texts)
            lines.append(["" if place else f"{100 * budget:g} %", name, stored, *map(_spread, columns)])
    return table(["budget", "cache", "bytes", *(_text_name(f"{text}.txt") for text in texts)], lines, left=2)


def verdict(results: Path) -> str:
    """What to do at which size, in the words of `headwise frontier`; empty where there is no choice."""
    found = joined.frontier(results, "", "")
    return "".join(f"> {line}" for line in verdict_lines(found.verdict)[:1])


def quick(document: Document) -> str:
    """The table of formats' losses, predicted and measured, of each model."""
    models = document["rows"]
    formats = dict.fromkeys(name for row in models.values() for name in row["formats"])
    rows = []
    for name in formats:
        found = [row["formats"].get(name) for row in models.values()]
        cells = ["" if one is None else f"{one['predicted']:.2g}, {one['measured']:.2g}" for one in found]
        rows.append([f"`{name}`", *cells])
    rows.append(["rank correlation", *(f"{row['rank correlation']:.3f}" for row in models.values())])
    rows.append(["within a factor of 1.5", *(f"{row['within 1.5']:.0%}" for row in models.values())])
    rows.append(["largest factor", *(f"{row['largest factor']:.2f}" for row in models.values())])
    return table(["KL, predicted and measured", *models], rows)


def simulated(document: Document) -> str:
    """The table of how far log-probabilities in an engine are from the simulation's: by token, and at most."""
    rows: dict[str, dict[str, Any]] = document["rows"]
    named = [key.rsplit(" ", 2) for key in rows]
    models = list(dict.fromkeys(model for model, _, _ in named))
    lines = []
    for engine, cache in dict.fromkeys((engine, cache) for _, engine, cache in named):
        found = [rows.get(f"{model} {engine} {cache}") for model in models]
        cells = ["" if row is None else f"{row['off by token']:.1g} ({row['largest']:.1g})" for row in found]
        lines.append([f"{engine}, {cache}", *cells])
    return table(["cache", *models], lines)


def advised(document: Document) -> str:
    """The table of what was advised by each goal: expected and measured."""
    rows = []
    for goal, row in document["rows"].items():
        found = row["evaluate"]
        of_this = ["as it is" if found is None else f"`{row['target']}`"]
        of_this += [
            f"{row[f'{kind}_ms']:.1f} ({row[f'{kind}_ms_as_it_is']:.1f})" for kind in ("predicted", "measured")
        ]
        if found is None:
            rows.append([goal, *of_this, f"{row['predicted_bytes']:,.0f}", "", "", ""])
            continue
        ratios = [f"×{score['perplexity_ratio']:.4f}" for score in found["texts"]]
        measured = f"{row['predicted_bytes']:,.0f}, {found['cache_bytes_per_token']:,.0f}"
        rows.append([goal, *of_this, measured, f"×{1 + row['kept_loss']:.4f}", ratios[0], ", ".join(ratios[1:])])
    head = [
        "goal",
        "what to do",
        "ms a step (as it is), predicted",
        "…, measured",
        "bytes a token: predicted, measured",
    ]
    return table([*head, "expected", "WikiText-2", "Brown, Austen"], rows, left=2)


def engines(document: Document) -> str:
    """The table of what engines do with each output: largest difference of log-probabilities, bytes of cache."""
    rows = document["rows"].values()
    columns = list(dict.fromkeys((row["engine"], row["dtype"]) for row in rows))
    cells = {(row["output"], row["engine"], row["dtype"]): _engine_cell(row) for row in rows}
    outputs = list(dict.fromkeys(row["output"] for row in rows))
    body = [[output, *(cells.get((output, *column), "") for column in columns)] for output in outputs]
    head = ["output", *(f"{engine}, {dtype.replace('float', 'f')}" for engine, dtype in columns)]
    return table(head, body, left=len(head))


def _engine_cell(row: Document) -> str:
    if not row["loads"]:
        return "no"
    greedy = "" if row["greedy_equal"] else f", greedy differs at a gap of {row['gap']:.0e}"
    if row["engine"] == "transformers":
        return f"the reference, {row['cache_bytes']:,.0f} B"
    wrong = "" if row["holds"] or row["dtype"] != "float32" else "**computes another model**, "
    if "mean_difference" in row:
        means = f"{row['mean_difference']:.3f} on average ({row['mean_difference_in_float64']:.3f})"
        return f"{wrong}{means}{greedy}, {row['cache_bytes']:,.0f} B"
    return f"{wrong}{row['difference']:.0e}{greedy}, {row['cache_bytes']:,.0f} B"


def layouts(document: Document) -> str:
    """The table of what each layout costs, beside headwise's own at the same bytes."""
    rows = document["rows"]
    own = next(iter(rows.values()))["evaluate"]["texts"]
    body = []
    for name, row in rows.items():
        cells = []
        for score, best in zip(row["evaluate"]["texts"], own, strict=True):
            ratio = score["perplexity_ratio"]
            cells += [f"×{ratio:.3f} ({ratio / best['perplexity_ratio']:.3f})"]
        body.append([name, *cells])
    return table(["layout", *(_text_name(score["text"]) for score in own)], body)


def serving(document: Document) -> str:
    """The table of speeds in engines: tokens a second, beside the original's, and how many texts fit in 1 GiB."""
    body, originals = [], {}
    for row in document["rows"].values():
        load = (row["engine"], row["context"], row["batch"])
        first = originals.setdefault(load, row)
        speeds = [f"{row[name]:,.0f} (×{row[name] / first[name]:.2f})" for name in ("prompt", "decode")]
        body.append(
            [row["engine"], f"{row['batch']} × {row['context']:,}", row["output"], *speeds, f"{row['fits']:,}"]
        )
    return table(["engine", "texts × tokens", "model", "prompt", "decode", "fit in 1 GiB"], body, left=3)


def healing(document: Document) -> str:
    """The table of healed conversions, beside what they were."""
    head, *rows = healing_tables.healing(document)
    return table([*head[:2], *map(_text_name, head[2:-1]), head[-1]], rows, left=2)


def healing_tasks(*documents: Document) -> str:
    """The table of PIQA and of planted facts after healing."""
    head, *rows = healing_tables.tasks(*documents)
    return table(head, rows, left=2)


def uptraining(document: Document) -> str:
    """The table of the GQA paper's comparison on a small decoder."""
    head, *rows = healing_tables.uptraining(document)
    return table(head, rows, left=2)


def migration(document: Document) -> str:
    """The table of the sizes that a migration tried."""
    head, *rows = healing_tables.migration(document)
    return table(head, rows, left=3)


def healed(*documents: Document) -> str:
    """The table of half of the values before and after training, for README."""
    head, *rows = healing_tables.healed(*documents)
    return table([head[0], *map(_text_name, head[1:])], rows)


def healing_tuning(document: Document) -> str:
    """The table of learning rates and what is trained."""
    head, *rows = healing_tables.tuning(document)
    return table(head, rows, left=2)


def audit_verdicts(document: Document) -> str:
    """The table of the guides' claims."""
    head, *rows = audit_tables.verdicts(document)
    return table(head, rows, left=3)


def audit_statements(document: Document) -> str:
    """The table of every statement of the guides' claims."""
    head, *rows = audit_tables.statements(document)
    return table(head, rows, left=5)


def trained(document: Document) -> str:
    """The table of decoders that were trained from scratch."""
    head, *rows = audit_tables.trained(document)
    return table(head, rows)


TABLES: dict[str, tuple[*tuple[str, ...], Callable[..., str]]] = {
    "first-tokens": ("first-token-formats.json", first_tokens),
    "conversion": ("conversion.json", conversion),
    "retrieval": ("retrieval.json", retrieval),
    "retrieval-short": ("retrieval.json", retrieval_short),
    "speech": ("speech.json", speech),
    "positions": ("long.json", positions),
    "kivi": ("kivi.json", kivi),
    "recall": ("recall.json", recall),
    "recall-keys": ("recall-keys.json", recall),
    "recall-together": ("recall-together.json", recall),
    "recall-strings": ("recall-strings.json", recall),
    "ways": ("ways.json", ways),
    "other-models": ("other-models.json", other_models),
    "ablation": ("ablation.json", ablation),
    "budgets": ("budgets.json", budgets),
    "budgets-recall": ("budgets-recall.json", budgets),
    "rivals": ("rivals.json", rivals),
    "formats": ("formats.json", formats),
    "beginnings": ("beginnings.json", beginnings),
    "by-model": ("by-model.json", "humaneval.json", "ruler.json", by_model),
    "by-model-short": ("by-model.json", "humaneval.json", "ruler.json", by_model_short),
    "humaneval": ("humaneval.json", humaneval),
    "ruler": ("ruler.json", ruler),
    "prepared": ("prepared-llama.cpp.json", prepared),
    "simulated": ("simulated.json", simulated),
    "prepared-short": ("prepared-llama.cpp.json", prepared_short),
    "prepared-mlx": ("prepared-mlx-lm.json", prepared),
    "prepared-vllm": ("prepared-vllm.json", prepared),
    "samples": ("samples.json", samples),
    "quick": ("quick.json", quick),
    "advised": ("advised.json", advised),
    "engines": ("engines.json", engines),
    "layouts": ("layouts.json", layouts),
    "serving": ("serving.json", serving),
    "large": ("large.json", large),
    "large-now": ("large-now.json", large),
    "large-cuda": ("large-cuda.json", large),
    "crossover": ("crossover.json", crossover),
    "tiles": ("tiles-cuda.json", tiles),
    "fuzz": ("trust/fuzz.json", fuzz),
    "kills": ("trust/kills.json", kills),
    "decode": ("decode.json", decode),
    "limits": ("decode-96mib.json", limits),
    "coded": ("coded.json", coded),
    "coded-avx2": ("coded-avx2.json", coded),
    "coded-models": ("coded.json", coded_models),
    "generate": ("generate.json", "generate-bfloat16.json", generate),
    "audit": ("audit.json", audit_verdicts),
    "audit-statements": ("audit.json", audit_statements),
    "trained": ("trained.json", trained),
    "trained-cuda": ("trained-cuda.json", trained),
    "healing": ("healing.json", healing),
    "healing-cuda": ("healing-cuda.json", healing),
    "healing-65536-cuda": ("healing-65536-cuda.json", healing),
    "healing-65536": ("healing-65536.json", healing),
    "healing-131072": ("healing-131072.json", healing),
    "healing-65536-own": ("healing-65536-own.json", healing),
    "healing-65536-broad": ("healing-65536-broad.json", healing),
    "healing-65536-wikitext": ("healing-65536-wikitext.json", healing),
    "uptraining": ("uptraining.json", uptraining),
    "migration": ("migration.json", migration),
    "healed": ("healing-65536.json", "healing-65536-broad.json", healed),
    "healing-tasks": ("healing-65536-cuda.json", "healing-65536-broad.json", healing_tasks),
    "healing-tuning": ("healing-tuning-cuda.json", healing_tuning),
    "healing-65536-tuning": ("healing-65536-tuning-cuda.json", healing_tuning),
}
"""The results files of each table and the function of them that makes it, by the table's name."""


def engine_caches(_: Path) -> str:
    """The small caches that engines have of their own, for heads of 128 channels; nothing of it is measured here."""
    model = read_spec("llama-3-8b")
    rows = []
    for engine in SERVING_ENGINES.values():
        for cache in engine.caches:
            bits = cache.bits(model)
            known = [
                *(["taken as safe"] if cache.is_safe else []),
                *([cache.limit] if cache.limit else []),
                *([f"heads in blocks of {cache.block}"] if cache.block > 1 else []),
                *([] if cache.stores_windows else ["no windows"]),
            ]
            rows.append((engine.title, f"`{cache.options}`", "; ".join(known), f"{bits:.3g}", f"{bits / 16:.0%}"))
    return table(("engine", "options", "what is known", "bits", "of 16"), rows, left=3)


def simulated_caches(_: Path) -> str:
    """The caches that a model is prepared for, of a layer with heads of 64 channels."""
    model, rows = read_spec("llama-3.2-1b"), []
    for name, engine in SERVING_ENGINES.items():
        for cache in (cache for cache in engine.caches if cache.is_simulated):
            share = replace(cache, unquantised_ends=0).bits(model) / 16
            heads = f"of a multiple of {cache.block} channels" if cache.block > 1 else "any"
            heads = "of 2ⁿ channels" if cache.rotates else heads
            rows.append((f"`{name}:{cache.name}`", f"`{cache.options}`", heads, f"{share:.0%}"))
    return table(("`--for`", "the engine's options", "heads", "bytes"), rows, left=3)


JOINED: dict[str, Callable[[Path], str]] = {
    "frontier": frontier,
    "verdict": verdict,
    "engine-caches": engine_caches,
    "simulated-caches": simulated_caches,
}
"""The functions that make tables of several results files in a folder, or of none, by the table's name."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table, whose first ``left`` columns are left-aligned words and the others right-aligned numbers."""
    return Table(head, [tuple(row) for row in rows], words=range(left)).markdown()


def render_all(results: Path) -> dict[str, str]:
    """All tables of which a folder has the results, by name."""
    tables = {}
    for name, (*files, render) in TABLES.items():
        if all((results / file).exists() for file in files):
            tables[name] = render(*(json.loads((results / file).read_text(encoding="utf-8")) for file in files))
    if (results / "formats.json").exists():
        tables |= {name: of_results(results) for name, of_results in JOINED.items()}
    return tables


def fill(text: str, tables: dict[str, str]) -> str:
    """Insert tables in their places in a document; a place whose table is missing is not changed."""

    def put(place: re.Match[str]) -> str:
        content = tables.get(place[2])
        return place[0] if content is None else f"{place[1]}\n{content}\n{place[3]}"

    return re.sub(r"(<!-- table: ([a-z0-9-]+) -->)\n.*?(<!-- end of table -->)", put, text, flags=re.DOTALL)


def _times(ms: float | None, headwise_ms: float) -> str:
    return "" if ms is None else f"{ms / headwise_ms:.1f}"


def _conversions(document: Document) -> list[dict[str, Any]]:
    """The evaluated rows, the largest cache first; rows that only tried settings are left out."""
    rows = [row for row in document["rows"].values() if "evaluate" in row]
    order = list(METHODS)
    return sorted(
        rows,
        key=lambda row: (
            -_requested_values(row),
            row["name"].startswith("mqa"),
            order.index(row["method"]),
            len(row["texts"]),
            row.get("stock", False),
        ),
    )


def _values_of_original(row: dict[str, Any]) -> float:
    """Values a token and layer that the original caches."""
    scores = row["evaluate"]
    return float(row["values"] * scores["reference_cache_bytes_per_token"] / scores["cache_bytes_per_token"])


def _texts(document: Document) -> list[str]:
    return [_text_name(score["text"]) for row in _conversions(document)[:1] for score in row["evaluate"]["texts"]]


def _text_name(path: str) -> str:
    names = {"wikitext-2.test": "WikiText-2", "wikitext-test": "WikiText-2", "wikitext-2.valid": "WikiText-2 valid"}
    stem = Path(path).stem
    return names.get(stem, stem.capitalize())


def _requested_values(row: dict[str, Any]) -> int:
    """The cached values a token that the target names, without the padding of a format."""
    rank = row["kv_lora_rank"]
    return int(row["values"] if rank is None else rank + row["qk_rope_head_dim"])


def _target(row: dict[str, Any]) -> str:
    return f"{row['values']}" + (", MQA" if row["kv_lora_rank"] is None else "")


def _method(row: dict[str, Any]) -> str:
    name = METHODS[row["method"]]
    if len(row["texts"]) > 1:
        name += " on " + ", ".join(row["texts"])
    if row.get("stock"):
        name += " as deepseek_v3"
    setting = row.get("setting", {})
    if "freqfold" in setting:
        name += f" (FreqFold {setting['freqfold']}, {setting['qk_rope_head_dim']} rotated)"
    elif setting:
        name += f" ({setting['qk_rope_head_dim']} rotated)"
    elif row["qk_rope_head_dim"] is not None:
        name += f" ({row['qk_rope_head_dim']} rotated)"
    return name


def _piqa(row: dict[str, Any]) -> list[str]:
    return [f"{100 * row['choices']['accuracy']['rate']:.1f} %" if "choices" in row else ""]


def _piqa_of_original(document: Document) -> list[str]:
    rates = [row["choices"]["accuracy"]["reference_rate"] for row in _conversions(document) if "choices" in row]
    return [f"{100 * rates[0]:.1f} %" if rates else ""]


def _minutes(row: dict[str, Any]) -> str:
    # A published method's time would be that of the search for its settings; its conversion takes seconds.
    return f"{row['conversion']['seconds'] / 60:.1f}" if row["method"] == "headwise" else ""


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def _text_ratio(row: dict[str, Any], score: dict[str, Any]) -> str:
    """The ratio of perplexities on a text, with the fraction of the text that is calibrated on, if any."""
    return _ratio(score["perplexity_ratio"]) + shared_mark(row.get("shared", {}).get(score["text"]))


def _share_of(cache: dict[str, float]) -> float:
    return cache["bytes_per_token"] / cache["source_bytes_per_token"]


def _spread(ratios: Sequence[float]) -> str:
    """The median of some samples' ratios, and if there are several their range."""
    if not ratios:
        return ""
    return _ratio(statistics.median(ratios)) + (f" ({min(ratios):.3f}–{max(ratios):.3f})" if len(ratios) > 1 else "")


def _ratio(value: float) -> str:
    return f"×{value:.3f}" if value < 10 else f"×{value:,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", nargs="+", type=Path, default=[], metavar="DOCUMENT")
    options = parser.parse_args(arguments)
    tables = render_all(options.results)
    for document in options.write:
        document.write_text(fill(document.read_text(encoding="utf-8"), tables), encoding="utf-8")
    if not options.write:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in tables.items()))


if __name__ == "__main__":
    main()
