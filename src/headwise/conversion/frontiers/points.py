"""The result of a frontier: its points, which of them are dominated, and what to do at each size.

There is a point for each candidate. From the measured points follows whether to quantise the cache, to convert the
model, or both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from headwise.base.documents import finite
from headwise.conversion.frontiers.candidate import Kind, Tried
from headwise.conversion.methods import find_method
from headwise.errors import ArgumentError
from headwise.measure.evaluation.beside_source import SAME_BYTES, log_perplexity_margin

LOSSES = (1.05, 1.15, 1.5)
"""The ratios of perplexity that recommendations are made for."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One conversion, or the source with its cache in a format of fewer bits, evaluated beside the source.

    Attributes:
        target: the target, as `read_target` spells it.
        kind: ``quantised``, ``converted``, ``both`` or ``published``.
        way: ``headwise``, ``headwise without`` some stages, a published method, or ``plain quantisation``.
        label: the mechanism and sizes of a layer.
        mechanism: ``MLA``, ``GQA``, ``MQA``, ``MHA`` or another, in capitals.
        cache_bytes_per_token: bytes a token that the cache allocates for an evaluation window: codes, scales, tokens
            that are stored as they are; numbers that are not in codes count as bfloat16.
        cache_fraction: these bytes as a fraction of the source's cache in bfloat16.
        perplexity_ratio: the conversion's perplexity over the source's, on all texts.
        ratios: the ratio on each text.
        kl: the mean KL(source ‖ point) a token, in nats; NaN where only perplexity was measured.
        kl_999: the 99.9 % quantile of the tokens' KL; NaN where it was not kept.
        top1_agreement: the fraction of positions where both predict the same token first; NaN as for ``kl``.
        top1_changed: the number of positions where they do not; None where it was not kept.
        held_out_loss: nats a token on windows that the calibration held out, by which the best variant of a method
            is chosen; None for methods without variants.
        seconds: the seconds of the conversion without its evaluation; of a continued conversion, the last run's; 0
            without a conversion.
        dominated: whether another point, or the source itself, has no more cache and no more perplexity, and less of
            one.
        conversion: the report of `headwise.convert`; None without a conversion.
        evaluation: the report of the evaluation.
    """

    target: str
    kind: Kind
    way: str
    label: str
    mechanism: str
    cache_bytes_per_token: float
    cache_fraction: float
    perplexity_ratio: float
    ratios: dict[str, float]
    kl: float
    kl_999: float
    top1_agreement: float
    top1_changed: int | None
    held_out_loss: float | None
    seconds: float
    dominated: bool
    conversion: dict[str, Any] | None
    evaluation: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Conversions of one model, and formats of its cache, evaluated on the same texts.

    Attributes:
        source: the source, as the user named it.
        label: the mechanism and sizes of the source's layers.
        calibrate: the calibration texts.
        calibration_tokens: the number of calibration tokens that the user asked for.
        methods: whether methods are compared at each target, rather than targets.
        texts: the evaluation texts.
        perplexities: the source's perplexity on each text.
        tokens: the number of scored predictions, on all texts.
        window: the number of tokens in each evaluation window.
        cache_bytes_per_token: the source's cache bytes a token, in bfloat16.
        dtype: the dtype that models were run in.
        threads: the number of torch's threads.
        versions: the versions of headwise and of the libraries it used.
        points: the points, in the order they were tried.
        verdict: the ranges of cache sizes and what loses least in each (`size_ranges`); empty for methods.
        made_with: what the numbers depend on besides the model, see `circumstances`.
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
    verdict: tuple[SizeRange, ...]
    made_with: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The frontier and its `advice` as JSON-able values, with None in place of infinities and NaN."""
        document: dict[str, Any] = finite(asdict(self))
        return {**document, "advice": advice(self)}


def collect(
    results: Sequence[tuple[Tried, Mapping[str, Any]]],
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
        results: each candidate with what `result_of` returns; without a conversion, ``label`` may say what was done.
        source: the source, as the user named it.
        label: the mechanism and sizes of the source's layers.
        calibrate: the calibration texts.
        calibration_tokens: the number of calibration tokens that the user asked for.
        methods: whether methods are compared at each target, rather than targets.
        versions: the versions of headwise and of the libraries it used.
        notes: notes for the user.
    """
    first = results[0][1]["evaluation"]
    source_bytes = float(results[0][1]["cache"]["source_bytes_per_token"])
    others = [(source_bytes, 1.0), *(_spot(result) for _, result in results)]

    def point(candidate: Tried, result: Mapping[str, Any]) -> Point:
        spot, conversion, evaluation = _spot(result), result["conversion"], result["evaluation"]
        return Point(
            target=candidate.target,
            kind=candidate.kind,
            way=candidate.way,
            label=result.get("label", label) if conversion is None else conversion["label"],
            mechanism=label.partition(" ")[0] if conversion is None else conversion["mechanism"].upper(),
            cache_bytes_per_token=spot[0],
            cache_fraction=spot[0] / source_bytes,
            perplexity_ratio=spot[1],
            ratios={text["text"]: text["perplexity_ratio"] for text in evaluation["texts"]},
            kl=evaluation["kl"],
            kl_999=evaluation.get("kl_999", math.nan),
            top1_agreement=evaluation["top1_agreement"],
            top1_changed=evaluation.get("top1_changed"),
            held_out_loss=result.get("held_out_loss"),
            seconds=0.0 if conversion is None else conversion["seconds"],
            dominated=any(dominates(other, spot) for other in others),
            conversion=None if conversion is None else dict(conversion),
            evaluation=dict(evaluation),
        )

    points = tuple(point(candidate, result) for candidate, result in results)
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
        verdict=() if methods else size_ranges(list(map(_measured, points)), first["tokens"]),
        versions=versions,
        notes=tuple(notes),
    )


def _spot(result: Mapping[str, Any]) -> tuple[float, float]:
    """The bytes of a result's cache, a token, and its ratio of perplexities."""
    return float(result["cache"]["bytes_per_token"]), float(result["evaluation"]["perplexity_ratio"])


def _measured(point: Point) -> Measured:
    # Where the KL was not measured, the rise of the mean negative log-likelihood stands for it: both are in nats a
    # token, and they are equal where the text is what the source would write.
    kl = math.log(point.perplexity_ratio) if math.isnan(point.kl) else point.kl
    return Measured(point.target, point.kind, point.cache_fraction, point.perplexity_ratio, kl)


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
            best[variants] = min(best.get(variants, point), point, key=lambda one: one.held_out_loss or 0.0)
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
    """Recommendations in words: the verdict, then the smallest cache within each of `LOSSES`; none for methods."""
    if frontier.methods:
        return []
    lines = verdict_lines(frontier.verdict)
    for loss in LOSSES:
        within = [point for point in frontier.points if point.perplexity_ratio <= loss and point.cache_fraction < 1]
        best = min(within, key=lambda point: (point.cache_bytes_per_token, point.perplexity_ratio), default=None)
        recommendation = "nothing that was tried"
        if best is not None:
            recommendation = f"{best.target}, {best.cache_fraction:.1%} of the cache (× {best.perplexity_ratio:.3f})"
        lines.append(f"perplexity up by at most {loss - 1:.0%}: {recommendation}")
    return lines


_VERBS: dict[Kind, str] = {
    "quantised": "quantise",
    "converted": "convert",
    "both": "convert and quantise",
    "published": "use a published method",
}
"""What a user does for each kind, the least work first."""


class Measured(NamedTuple):
    """The numbers of a point that a verdict needs.

    Attributes:
        target: the name of the point's target.
        kind: the kind of change that is made to the cache.
        fraction: the bytes of its cache as a fraction of the source's cache in bfloat16.
        ratio: the ratio of its perplexity to the source's.
        kl: the mean KL(source ‖ point) a token, in nats.
    """

    target: str
    kind: Kind
    fraction: float
    ratio: float
    kl: float


@dataclass(frozen=True, kw_only=True)
class SizeRange:
    """A range of sizes of the cache in which the same kinds of points lose least.

    Attributes:
        most: the upper end of the range, as a fraction of the source's cache in bfloat16.
        least: the lower end, which is the size of a point.
        kinds: the kind of the best points, and other kinds whose best points differ from them by no more than chance
            (`headwise.measure.evaluation.beside_source.log_perplexity_margin`); what takes the least work is first.
        best: the targets that are best at some size of the range, from the largest, and those of other kinds that
            are as good.
        ratio: the perplexity, over the source's, of the best point at the lower end: the most that the range costs.
    """

    most: float
    least: float
    kinds: tuple[Kind, ...]
    best: tuple[str, ...]
    ratio: float


def size_ranges(points: Sequence[Measured], tokens: int) -> tuple[SizeRange, ...]:
    """Divide the sizes of the cache into ranges by what loses least in each, from the largest sizes to the smallest.

    At each size all points that are no larger (by `SAME_BYTES`) compete. For example, with ``int8`` at 53 %,
    ``kivi4`` at 28 % and ``mla@0.15`` at 15 % the ranges may be 100 to 28 % (quantise) and 28 to 15 % (convert and
    quantise).

    Args:
        points: the measured points; those whose cache is no smaller than the source's in bfloat16 are left out, and
            so are those without a finite perplexity.
        tokens: the number of predictions that all were scored on.

    Returns:
        The ranges; none where there are no points of two kinds to choose between.
    """
    points = [point for point in points if point.fraction < 1 and math.isfinite(point.ratio)]
    if len({point.kind for point in points}) < 2:
        return ()
    found: list[SizeRange] = []
    most = 1.0
    for least in sorted({point.fraction for point in points}, reverse=True):
        one = _at(least, most, points, tokens)
        most = least
        if found and found[-1].kinds == one.kinds:
            best = tuple(dict.fromkeys((*found[-1].best, *one.best)))
            found[-1] = replace(found[-1], least=least, best=best, ratio=one.ratio)
        else:
            found.append(one)
    return tuple(found)


def _at(least: float, most: float, points: Iterable[Measured], tokens: int) -> SizeRange:
    """The best kinds where the points of size ``least`` are the largest that fit."""
    fitting = [point for point in points if point.fraction <= SAME_BYTES * least]
    best = min(fitting, key=_loss)
    own = {kind: min((point for point in fitting if point.kind == kind), key=_loss, default=None) for kind in _VERBS}
    as_good = {
        kind: point.target
        for kind, point in own.items()
        if point is not None
        and math.log(point.ratio / best.ratio) <= log_perplexity_margin(point.kl, best.kl, tokens)
    }
    return SizeRange(most=most, least=least, kinds=tuple(as_good), best=tuple(as_good.values()), ratio=best.ratio)


def _loss(point: Measured) -> tuple[float, float]:
    """The key that orders points by perplexity; of equal ones the smaller cache is the better."""
    return point.ratio, point.fraction


def verdict_lines(verdict: Sequence[SizeRange]) -> list[str]:
    """The ranges in words: what to do in one sentence, and a line for each range with its best points.

    For example ``"of a bfloat16 cache: down to 28.1% quantise (×1.007), then down to 15% convert and quantise
    (×1.052)"``, each with the perplexity over the source's that the smallest size costs. Where kinds differ by no
    more than chance, the sentence names the one that takes the least work, and the line all of them.

    Args:
        verdict: the ranges that `size_ranges` returned.
    """
    if not verdict:
        return []
    steps = []
    for kind, run in groupby(verdict, key=lambda one: one.kinds[0]):
        smallest = list(run)[-1]
        steps.append(f"down to {_percent(smallest.least)} {_VERBS[kind]} (×{smallest.ratio:.4g})")
    return [f"of a bfloat16 cache: {', then '.join(steps)}", *map(_line, verdict)]


def _line(one: SizeRange) -> str:
    """One range: what to do, and by which points."""
    chance = " (no difference beyond chance)" if len(one.kinds) > 1 else ""
    verbs = ", or ".join(_VERBS[kind] for kind in one.kinds)
    return f"{_percent(one.most)} to {_percent(one.least)}, {verbs}{chance}: {', '.join(one.best)}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
