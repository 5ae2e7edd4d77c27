"""What a frontier found: a point for each conversion, which of them are worth having, and what to convert to."""

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
"""Ratios of perplexity that a user may be ready to accept."""

_MECHANISMS = {"mla": "MLA", "gqa": "GQA", "mqa": "MQA", "mha": "MHA"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One conversion, measured beside the source.

    Attributes:
        target: as it was asked for.
        way: ``headwise``, the same without some stages, or a published method.
        label: of a converted layer.
        mechanism: ``MLA``, ``GQA``, ``MQA`` or ``MHA``.
        cache_bytes_per_token: read off the cache's tensors.
        cache_fraction: of the source's.
        perplexity_ratio: the conversion's over the source's, over all texts.
        ratios: the same of each text.
        kl: mean KL(source ‖ conversion) a token, in nats.
        top1_agreement: fraction of positions where both rank the same token first.
        held_out_loss: nats a token on windows that the calibration held out, by which the best fold is chosen; None
            where nothing is.
        seconds: to convert, evaluation apart; of a conversion in several runs, the last one's.
        dominated: whether another point, or the source itself, has no more cache and no more perplexity, and less of
            one.
        conversion: all that `headwise.convert` said of it.
        evaluation: all that was measured.
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
    """Conversions of one model, on the same texts.

    Attributes:
        source: as it was named.
        label: of its layers.
        calibrate: the texts that were calibrated on.
        calibration_tokens: how many tokens of them were asked for.
        methods: whether ways are compared at the same target, rather than targets.
        texts: what was measured on.
        perplexities: the source's, of each text.
        tokens: predictions scored, of all texts.
        window: tokens in a window of them.
        cache_bytes_per_token: the source's.
        dtype: of the cache, and of all that was run.
        threads: torch's.
        versions: of headwise and of what its numbers come from.
        points: in the order they were tried.
        notes: what a user should know.
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
        """The findings as JSON-able values; a number that JSON has no word for is None."""
        found: dict[str, Any] = finite(asdict(self))
        return found


def collect(
    results: Sequence[tuple[Candidate, Mapping[str, Any]]], *, label: str, notes: Sequence[str], **about: Any
) -> Frontier:
    """Points of results, each a ``conversion`` and an ``evaluation``; ``about`` is the rest of a `Frontier`."""
    spots = [
        (float(result["evaluation"]["cache_bytes_per_token"]), float(result["evaluation"]["perplexity_ratio"]))
        for _, result in results
    ]
    first = results[0][1]["evaluation"]
    whole = float(first["reference_cache_bytes_per_token"])
    points = tuple(
        Point(
            target=candidate.target,
            way=candidate.way,
            label=result["conversion"]["label"],
            mechanism=_MECHANISMS[result["conversion"]["mechanism"]],
            cache_bytes_per_token=spot[0],
            cache_fraction=spot[0] / whole,
            perplexity_ratio=spot[1],
            ratios={text["text"]: text["perplexity_ratio"] for text in result["evaluation"]["texts"]},
            kl=result["evaluation"]["kl"],
            top1_agreement=result["evaluation"]["top1_agreement"],
            held_out_loss=result.get("held_out_loss"),
            seconds=result["conversion"]["seconds"],
            dominated=any(dominates(other, spot) for other in [(whole, 1.0), *spots]),
            conversion=dict(result["conversion"]),
            evaluation=dict(result["evaluation"]),
        )
        for (candidate, result), spot in zip(results, spots, strict=True)
    )
    return Frontier(
        label=label,
        texts=tuple(text["text"] for text in first["texts"]),
        perplexities={text["text"]: text["reference_perplexity"] for text in first["texts"]},
        tokens=first["tokens"],
        window=first["window"],
        cache_bytes_per_token=whole,
        dtype=first["dtype"],
        threads=first["threads"],
        points=points,
        notes=tuple(notes),
        **about,
    )


def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether a point is nowhere worse than another, and somewhere better; lower is better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def shown(found: Frontier) -> list[Point]:
    """The points as a table has them.

    A ladder's from the most cache to the least. Of ways to one target those in the order they were tried, and of a
    method's variants the best alone, as its authors report it: the best on held-out calibration text.
    """
    if not found.methods:
        return sorted(found.points, key=lambda point: (-point.cache_bytes_per_token, point.perplexity_ratio))
    best: dict[tuple[str, str], Point] = {}
    for point in found.points:
        if point.held_out_loss is not None:
            variants = point.target, find_method(point.way).label
            best[variants] = min(best.get(variants, point), point, key=_held_out_loss)
    return [point for point in found.points if point.held_out_loss is None or point in best.values()]


def name(point: Point, found: Frontier) -> str:
    """The name of a point's row: its target, or among ways to one target the way in words."""
    if not found.methods:
        return point.target
    with suppress(ArgumentError):
        return find_method(point.way).title
    return point.way.removeprefix("headwise ")  # an ablation


def targets(found: Frontier) -> list[str]:
    """The targets, in the order they were tried."""
    return list(dict.fromkeys(point.target for point in found.points))


def ratio_text(ratio: float) -> str:
    """A ratio of perplexities, with the digits that matter."""
    return f"{ratio:.4f}" if ratio < 2 else f"{ratio:,.2f}" if ratio < 100 else f"{ratio:,.0f}"


def last_name(path: str) -> str:
    """A path or a source without its folders, which are nobody else's business."""
    return path.rstrip("/").rpartition("/")[2] or path


def short(text: str, found: Frontier) -> str:
    """A text's name without its folder and without where in it windows begin, if that tells it from the others."""
    names = {other: re.sub(r" after [0-9,]+ tokens$", "", last_name(other)) for other in found.texts}
    return names[text] if len(set(names.values())) == len(names) else text


def advice(found: Frontier) -> list[str]:
    """What to convert to, in words: for a few losses, the smallest cache that stays within each; of ways nothing."""
    lines: list[str] = []
    if found.methods:
        return lines
    for loss in LOSSES:
        within = [point for point in found.points if point.perplexity_ratio <= loss and point.cache_fraction < 1]
        best = min(within, key=lambda point: (point.cache_bytes_per_token, point.perplexity_ratio), default=None)
        said = "nothing that was tried"
        if best is not None:
            said = f"{best.target}, {best.cache_fraction:.0%} of the cache (× {best.perplexity_ratio:.3f})"
        lines.append(f"perplexity up by at most {loss - 1:.0%}: {said}")
    return lines


def _held_out_loss(point: Point) -> float:
    assert point.held_out_loss is not None
    return point.held_out_loss
