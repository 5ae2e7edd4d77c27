"""What to do at each size of the cache: quantise, convert, or both, from measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from headwise.conversion.frontiers.candidate import Kind
from headwise.measure.evaluation.plain_cache import SAME_BYTES, margin

_VERBS: dict[Kind, str] = {
    "quantised": "quantise",
    "converted": "convert",
    "both": "convert and quantise",
    "published": "use a published method",
}
"""What a user does for each kind, the least work first."""


class Measured(NamedTuple):
    """What a verdict needs of a point.

    Attributes:
        target: its name.
        kind: what is done to the cache.
        fraction: its bytes as a fraction of the source's cache in bfloat16.
        ratio: its perplexity over the source's.
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
            (`headwise.measure.evaluation.plain_cache.margin`); what takes the least work is first.
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
        if point is not None and math.log(point.ratio / best.ratio) <= margin(point.kl, best.kl, tokens)
    }
    return SizeRange(most=most, least=least, kinds=tuple(as_good), best=tuple(as_good.values()), ratio=best.ratio)


def _loss(point: Measured) -> tuple[float, float]:
    """By perplexity; of equal ones the smaller cache is the better."""
    return point.ratio, point.fraction


def verdict_lines(verdict: Sequence[SizeRange]) -> list[str]:
    """The ranges in words: what to do in one sentence, and a line for each range with its best points.

    For example ``"of a bfloat16 cache: down to 28.1% quantise (×1.007), then down to 15% convert and quantise
    (×1.052)"``, each with the perplexity over the source's that the smallest size costs. Where kinds differ by no
    more than chance, the sentence names the one that takes the least work, and the line all of them.

    Args:
        verdict: of `size_ranges`.
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
