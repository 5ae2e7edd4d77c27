"""All measured ways to shrink SmolLM2's cache on one axis of bytes, read from the results of four benchmarks.

Each row is perplexity on the same windows of the same texts, and bytes a token as a fraction of a bf16 cache.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.budgets import BUDGETS

from headwise.conversion.frontiers.candidate import Candidate, Kind
from headwise.conversion.frontiers.points import Frontier, collect
from headwise.measure.evaluation.beside_source import SAME_BYTES

PUBLISHED = {
    "kvquant": "KVQuant",
    "palu": "Palu",
    "care": "CARE",
    "svd-llm-v2": "SVD-LLM V2",
    "elitekv": "EliteKV",
    "transmla": "TransMLA",
}
"""The labels of `benchmarks.rivals`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured cache, as `headwise.conversion.frontiers.points.collect` takes it.

    Attributes:
        target: its name, such as ``kivi4``, ``mla@0.25`` or ``Palu@0.25``.
        kind: what is done to the cache.
        way: ``plain quantisation``, ``headwise`` or a published method.
        budget: the fraction of a bf16 cache that it was made for; None for a format, which has no choice.
        fraction: the fraction that it takes.
        ratio: perplexity over the original's on all texts.
        ratios: the same on each text.
        result: as `headwise.conversion.frontiers.run.result_of` returns it.
        versions: of headwise and the libraries that measured it.
    """

    target: str
    kind: Kind
    way: str
    budget: float | None
    fraction: float
    ratio: float
    ratios: dict[str, float]
    result: dict[str, Any]
    versions: dict[str, str]


def formats(results: Path) -> list[Row]:
    """The field's formats, with nothing converted."""
    rows = _kept(results / "formats.json")
    return [_row(kept, Candidate(name), kept["cache"]) for name, kept in rows.items()]


def conversions(results: Path) -> list[Row]:
    """headwise's conversions without codes, calibrated on WikiText-2 alone."""
    rows = []
    for kept in _kept(results / "conversion.json").values():
        if "evaluate" in kept and kept["method"] == "headwise" and len(kept["texts"]) == 1 and not kept.get("stock"):
            rank = kept["kv_lora_rank"]
            target = "mqa" if rank is None else f"mla:{rank}+{kept['qk_rope_head_dim']}"
            taken = {name: kept["evaluate"][name] / 2 for name in _BYTES}  # they were read off float32
            # Reports of that time do not name the window that the conversion was calibrated in, the default then.
            conversion = {"calibration_window": 512, **kept["conversion"]}
            rows.append(_row({**kept, "conversion": conversion}, Candidate(target), _cache(taken)))
    return rows


def samples(results: Path) -> dict[float, list[Row]]:
    """headwise's conversions with codes: a row for each calibration sample at each budget, the largest first."""
    rows: dict[float, list[Row]] = {}
    for kept in _kept(results / "budgets.json").values():
        candidate = Candidate(f"mla@{kept['budget']:g}")
        evaluation = kept["evaluate"]
        # A cache of codes is as large in every dtype; the source's was read off float32.
        whole = evaluation["reference_cache_bytes_per_token"] / 2
        cache = _cache({**evaluation, "reference_cache_bytes_per_token": whole})
        rows.setdefault(kept["budget"], []).append(_row(kept, candidate, cache))
    return dict(sorted(rows.items(), reverse=True))


def published(results: Path) -> list[Row]:
    """Methods of others, of which perplexity alone was measured."""
    kept = _kept(results / "rivals.json")
    rows = []
    for row in kept.values():
        if "method" not in row:
            continue
        texts = [
            {
                "text": name,
                "perplexity_ratio": score["perplexity_ratio"],
                "reference_perplexity": math.exp(kept["original"]["texts"][name]["nll"]),
            }
            for name, score in row["texts"].items()
        ]
        ratio = statistics.geometric_mean(text["perplexity_ratio"] for text in texts)  # the texts are equally long
        way = PUBLISHED[row["method"]]
        rows.append(
            Row(
                target=f"{way}@{row['wanted']:g}",
                kind="published",
                way=way,
                budget=row["wanted"],
                fraction=row["fraction"],
                ratio=ratio,
                ratios={name: score["perplexity_ratio"] for name, score in row["texts"].items()},
                result={
                    "conversion": None,
                    "label": settings(row["settings"]),
                    "evaluation": {
                        "texts": texts,
                        "perplexity_ratio": ratio,
                        "kl": math.nan,
                        "top1_agreement": math.nan,
                    },
                    "cache": {
                        "bytes_per_token": row["token_bytes"],
                        "source_bytes_per_token": kept["original"]["token_bytes"],
                    },
                },
                versions=row["run"]["versions"],
            )
        )
    return rows


def median(rows: Sequence[Row]) -> Row:
    """The row of the median sample by perplexity on all texts; of two in the middle the worse one."""
    return sorted(rows, key=lambda row: row.ratio)[len(rows) // 2]


def best_within(rows: Iterable[Row], budget: float) -> Row | None:
    """The row of least perplexity of those that take no more than a budget, or were made for it; None without any."""
    fitting = [row for row in rows if row.fraction <= SAME_BYTES * budget or row.budget == budget]
    return min(fitting, key=lambda row: (row.ratio, row.fraction), default=None)


def budgets(rows: Mapping[float, Sequence[Row]]) -> list[float]:
    """The budgets of the benchmark and of all rows, the largest first."""
    return sorted({*BUDGETS, *rows}, reverse=True)


def settings(chosen: Mapping[str, Any]) -> str:
    """A published cache's settings in words."""
    words = {
        "bits": "{} bits",
        "outliers": "{:.0%} outliers",
        "mean_rank": "mean rank {:.0f}",
        "way": "{}",
        "ranks": "ranks {0[0]} to {0[1]}",
        "frequencies": "{} frequencies a head",
        "latent": "latent {}",
        "freqfold": "FreqFold {}",
        "qk_rope_head_dim": "{} rotated",
        "kv_lora_rank": "latent {}",
    }
    return ", ".join(word.format(chosen[name]) for name, word in words.items() if name in chosen)


def frontier(results: Path, source: str, label: str) -> Frontier:
    """The frontier of all rows that are kept.

    Args:
        results: the folder of results files.
        source: the model that all of them are of.
        label: the mechanism and sizes of its layers.

    Raises:
        ValueError: there are none, or they were measured on different windows.
    """
    by_budget = samples(results)
    own = [*formats(results), *conversions(results), *map(median, by_budget.values())]
    if not own:
        raise ValueError(f"{results}: has no results of formats, conversions or budgets")
    rows = [*own, *published(results)]
    for row in rows:
        _refuse_other_texts(row, rows[0])
    reports = [row.result["conversion"] for row in own if row.result["conversion"] is not None]
    tokens = max((report["calibration_tokens"] for report in reports), default=0)
    notes = [
        "Published methods are written anew from their papers and simulated, and their bytes computed"
        " (docs/rivals.md). Their KL was not measured; in what chance explains, the rise of the mean negative"
        " log-likelihood stands for it.",
        *(
            f"{median(of_budget).target} is the median of {len(of_budget)} calibration samples, which have perplexity"
            f" × {min(row.ratio for row in of_budget):.4f} to × {max(row.ratio for row in of_budget):.4f}"
            for of_budget in by_budget.values()
            if len(of_budget) > 1
        ),
    ]
    return collect(
        [(row, row.result) for row in rows],
        source=source,
        label=label,
        calibrate=("WikiText-2 train",) if tokens else (),
        calibration_tokens=tokens,
        methods=False,
        versions={
            library: " and ".join(sorted({row.versions[library] for row in rows})) for library in rows[0].versions
        },
        notes=notes,
    )


def _refuse_other_texts(row: Row, first: Row) -> None:
    """Refuse a row that was measured on other windows than the first: the original has another perplexity there."""
    own, others = (one.result["evaluation"]["texts"] for one in (row, first))
    is_same = [text["text"] for text in own] == [text["text"] for text in others] and all(
        math.isclose(text["reference_perplexity"], other["reference_perplexity"], rel_tol=1e-4)
        for text, other in zip(own, others, strict=True)
    )
    if not is_same:
        raise ValueError(f"{row.target} was measured on other text than {first.target}")


_BYTES = ("cache_bytes_per_token", "reference_cache_bytes_per_token")


def _cache(evaluation: Mapping[str, Any]) -> dict[str, float]:
    return dict(
        zip(("bytes_per_token", "source_bytes_per_token"), (evaluation[name] for name in _BYTES), strict=True)
    )


def _row(kept: Mapping[str, Any], candidate: Candidate, cache: Mapping[str, float]) -> Row:
    """A row of an evaluation by headwise, its texts named without their folder."""
    evaluation = kept["evaluate"]
    texts = [{**score, "text": Path(score["text"]).stem} for score in evaluation["texts"]]
    return Row(
        target=candidate.target,
        kind=candidate.kind,
        way=candidate.way,
        budget=kept.get("budget"),
        fraction=cache["bytes_per_token"] / cache["source_bytes_per_token"],
        ratio=evaluation["perplexity_ratio"],
        ratios={score["text"]: score["perplexity_ratio"] for score in texts},
        result={
            "conversion": kept.get("conversion"),
            "evaluation": {**evaluation, "texts": texts},
            "cache": dict(cache),
        },
        versions=kept["run"]["versions"],
    )


def _kept(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of a results file by name; none without the file."""
    if not file.exists():
        return {}
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return rows
