"""The result of a frontier: a point for each conversion, the points that others dominate, and recommendations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from headwise.conversion.methods import find_method
from headwise.documents import finite
from headwise.errors import ArgumentError
from headwise.frontiers.ladder import Candidate

LOSSES = (1.05, 1.15, 1.5)
"""The ratios of perplexity that recommendations are made for."""

_MECHANISMS = {"mla": "MLA", "gqa": "GQA", "mqa": "MQA", "mha": "MHA"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One conversion, evaluated beside the source.

    Attributes:
        target: the target, as `read_target` spells it.
        way: ``headwise``, ``headwise without`` some stages, or a published method.
        label: the mechanism and sizes of a converted layer.
        mechanism: ``MLA``, ``GQA``, ``MQA`` or ``MHA``.
        cache_bytes_per_token: the bytes of the cache's tensors, a token.
        cache_fraction: these bytes as a fraction of the source's.
        perplexity_ratio: the conversion's perplexity over the source's, on all texts.
        ratios: the ratio on each text.
        kl: the mean KL(source ‖ conversion) a token, in nats.
        top1_agreement: the fraction of positions where both predict the same token first.
        held_out_loss: nats a token on windows that the calibration held out, by which the best variant of a method
            is chosen; None for methods without variants.
        seconds: the seconds of the conversion without its evaluation; of a continued conversion, the last run's.
        dominated: whether another point, or the source itself, has no more cache and no more perplexity, and less of
            one.
        conversion: the report of `headwise.convert`.
        evaluation: the report of the evaluation.
    """

    target: str
    way: str
    label: str
    mechanism: str
    cache_bytes_per_token: float
    cache_fraction: float
    perplexity_ratio: float
    ratios: dict[str, float]
    kl: float
    top1_agreement: float
    held_out_loss: float | None
    seconds: float
    dominated: bool
    conversion: dict[str, Any]
    evaluation: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Conversions of one model, evaluated on the same texts.

    Attributes:
        source: the source, as the user named it.
        label: the mechanism and sizes of the source's layers.
        calibrate: the calibration texts.
        calibration_tokens: the number of calibration tokens that the user asked for.
        methods: whether methods are compared at each target, rather than targets.
        texts: the evaluation texts.
        perplexities: the source's perplexity on each text.
        tokens: the number of scored predictions, on all texts.
        window: tokens in each evaluation window.
        cache_bytes_per_token: the source's cache bytes a token.
        dtype: the dtype of the caches and of the models that were run.
        threads: the number of torch's threads.
        versions: the versions of headwise and of the libraries it used.
        points: the points, in the order they were tried.
        notes: notes for the user.
    """

    source: str
    label: str
    calibrate: tuple[str, ...]
    calibration_tokens: int
    methods: bool
    texts: tuple[str, ...]
    perplexities: dict[str, float]
    tokens: int
    window: int
    cache_bytes_per_token: float
    dtype: str
    threads: int
    versions: dict[str, str]
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The frontier as JSON-able values, with None in place of infinities and NaN."""
        document: dict[str, Any] = finite(asdict(self))
        return document


def collect(
    results: Sequence[tuple[Candidate, Mapping[str, Any]]],
    *,
    source: str,
    label: str,
    calibrate: tuple[str, ...],
    calibration_tokens: int,
    methods: bool,
    versions: dict[str, str],
    notes: Sequence[str],
) -> Frontier:
    """Make a frontier of results.

    Args:
        results: each candidate with its ``conversion`` and ``evaluation``.
        source: the source, as the user named it.
        label: the mechanism and sizes of the source's layers.
        calibrate: the calibration texts.
        calibration_tokens: the number of calibration tokens that the user asked for.
        methods: whether methods are compared at each target, rather than targets.
        versions: the versions of headwise and of the libraries it used.
        notes: notes for the user.
    """
    spots = [
        (float(result["evaluation"]["cache_bytes_per_token"]), float(result["evaluation"]["perplexity_ratio"]))
        for _, result in results
    ]
    first = results[0][1]["evaluation"]
    source_bytes = float(first["reference_cache_bytes_per_token"])
    points = tuple(
        Point(
            target=candidate.target,
            way=candidate.way,
            label=result["conversion"]["label"],
            mechanism=_MECHANISMS[result["conversion"]["mechanism"]],
            cache_bytes_per_token=spot[0],
            cache_fraction=spot[0] / source_bytes,
            perplexity_ratio=spot[1],
            ratios={text["text"]: text["perplexity_ratio"] for text in result["evaluation"]["texts"]},
            kl=result["evaluation"]["kl"],
            top1_agreement=result["evaluation"]["top1_agreement"],
            held_out_loss=result.get("held_out_loss"),
            seconds=result["conversion"]["seconds"],
            dominated=any(dominates(other, spot) for other in [(source_bytes, 1.0), *spots]),
            conversion=dict(result["conversion"]),
            evaluation=dict(result["evaluation"]),
        )
        for (candidate, result), spot in zip(results, spots, strict=True)
    )
    return Frontier(
        source=source,
        label=label,
        calibrate=calibrate,
        calibration_tokens=calibration_tokens,
        methods=methods,
        texts=tuple(text["text"] for text in first["texts"]),
        perplexities={text["text"]: text["reference_perplexity"] for text in first["texts"]},
        tokens=first["tokens"],
        window=first["window"],
        cache_bytes_per_token=source_bytes,
        dtype=first["dtype"],
        threads=first["threads"],
        points=points,
        versions=versions,
        notes=tuple(notes),
    )


def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether a point is no worse than another in both numbers, and better in one; lower is better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def shown(frontier: Frontier) -> list[Point]:
    """The points of a table, in order.

    A ladder's points run from the most cache to the least. Methods are in the order they were tried; of a method's
    variants only the best on held-out calibration text is shown, as authors report the best.
    """
    if not frontier.methods:
        return sorted(frontier.points, key=lambda point: (-point.cache_bytes_per_token, point.perplexity_ratio))
    best: dict[tuple[str, str], Point] = {}
    for point in frontier.points:
        if point.held_out_loss is not None:
            variants = point.target, find_method(point.way).label
            best[variants] = min(best.get(variants, point), point, key=_held_out_loss)
    return [point for point in frontier.points if point.held_out_loss is None or point in best.values()]


def name(point: Point, frontier: Frontier) -> str:
    """The name of a point's row: its target, or in a comparison of methods its method."""
    if not frontier.methods:
        return point.target
    with suppress(ArgumentError):
        return find_method(point.way).title
    return point.way.removeprefix("headwise ")  # an ablation


def targets(frontier: Frontier) -> list[str]:
    """The targets, in the order they were tried."""
    return list(dict.fromkeys(point.target for point in frontier.points))


def ratio_text(ratio: float) -> str:
    """A ratio of perplexities, with fewer digits the larger it is."""
    return f"{ratio:.4f}" if ratio < 2 else f"{ratio:,.2f}" if ratio < 100 else f"{ratio:,.0f}"


def last_name(path: str) -> str:
    """The last name of a path or a source: its folders are private to the user's machine."""
    return path.rstrip("/").rpartition("/")[2] or path


def short(text: str, frontier: Frontier) -> str:
    """A text's name without its folder and its windows' start, if that still tells it from the other texts."""
    names = {other: re.sub(r" after [0-9,]+ tokens$", "", last_name(other)) for other in frontier.texts}
    return names[text] if len(set(names.values())) == len(names) else text


def advice(frontier: Frontier) -> list[str]:
    """Recommended conversions, in words: the smallest cache within each of `LOSSES`; none for methods."""
    lines: list[str] = []
    if frontier.methods:
        return lines
    for loss in LOSSES:
        within = [point for point in frontier.points if point.perplexity_ratio <= loss and point.cache_fraction < 1]
        best = min(within, key=lambda point: (point.cache_bytes_per_token, point.perplexity_ratio), default=None)
        recommendation = "nothing that was tried"
        if best is not None:
            recommendation = f"{best.target}, {best.cache_fraction:.0%} of the cache (× {best.perplexity_ratio:.3f})"
        lines.append(f"perplexity up by at most {loss - 1:.0%}: {recommendation}")
    return lines


def _held_out_loss(point: Point) -> float:
    assert point.held_out_loss is not None
    return point.held_out_loss
