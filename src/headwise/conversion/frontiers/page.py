"""A frontier as documents: tables in Markdown, and one self-contained page with a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headwise.base.pages import BLUE, GREEN, GREY, ORANGE, RED, Part, Picture, Text, as_svg, new_figure, web_page
from headwise.base.tables import Table
from headwise.conversion.frontiers.candidate import Kind
from headwise.conversion.frontiers.points import (
    Frontier,
    Point,
    advice,
    last_name,
    name,
    ratio_text,
    short,
    shown,
    targets,
)
from headwise.conversion.output.card import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS: dict[Kind, tuple[str, str]] = {
    "quantised": ("quantised", ORANGE),
    "converted": ("converted", RED),
    "both": ("converted and quantised", BLUE),
    "published": ("published methods", GREEN),
}
"""The name of each kind in the legend, and its colour."""

_TARGETS = (BLUE, ORANGE, RED, GREEN, GREY)
"""The colours of targets, where methods are compared."""

_LARGEST = 10.0
"""A ladder's plot ends at this ratio of perplexities, so that those near 1 are told apart."""

_LEAST_LOSS = 0.001
"""The least loss that is drawn; smaller ones are drawn as this one: a ladder's plot is logarithmic in what is lost,
ratio - 1."""

_FAINT = 0.4
_LADDER_TICKS = (*(1 + loss for loss in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)), 2, 3, 5)
_DIGITS = (1.0, 2.0, 5.0, 3.0, 1.5, 7.0, 1.2, 1.1, 4.0, 1.05, 1.3, 1.02, 1.01)
"""The first digits of ticks, in order of preference."""


def figure(frontier: Frontier) -> Figure:
    """The plot: quality against cache, or the methods at each target one below the other."""
    return _methods(frontier) if frontier.methods else _ladder(frontier)


def plot_end(frontier: Frontier) -> float:
    """The largest ratio of perplexities that a ladder's plot shows."""
    return max(_LARGEST, min(point.perplexity_ratio for point in frontier.points))


def _ladder(frontier: Frontier) -> Figure:
    made, (axes,) = new_figure(10, 6.4)
    points = [point for point in shown(frontier) if math.isfinite(point.perplexity_ratio)]
    source_bytes = frontier.cache_bytes_per_token
    # The line of the best points ends at the source, whatever points there are of more bytes. It is drawn first, so
    # that markers lie on it.
    best = sorted((p.cache_bytes_per_token, p.perplexity_ratio) for p in points if not p.dominated)
    best = [spot for spot in best if spot[0] < source_bytes] + [(source_bytes, 1.0)]
    x, y = [spot[0] for spot in best], [_lost(spot[1]) for spot in best]
    axes.step(x, y, ":", where="post", color=GREY, label="best so far")
    for kind, (label, colour) in _KINDS.items():
        of_kind = [point for point in points if point.kind == kind]
        if of_kind:  # its entry in the legend is apart from its points, whose first may be faint
            axes.scatter([], [], color=colour, label=label)
        for point in of_kind:
            _mark(axes, point, colour)
    axes.plot([source_bytes], [_lost(1.0)], "*", color=GREY, markersize=12)
    axes.annotate("original", (source_bytes, _lost(1.0)), xytext=(0, 7), textcoords="offset points", ha="center")
    # One format that loses everything would squeeze all other points together.
    values, labels, span = _loss_axis(min(plot_end(frontier), max((p.perplexity_ratio for p in points), default=1.0)))
    axes.set_yscale("log")
    axes.set_yticks(values, labels)
    axes.set_yticks([], minor=True)
    axes.set_ylim(10 ** span[0], 10 ** span[1])
    axes.set_ylabel("perplexity, × the original's (log scale of what is lost)")
    _cache_axis(axes, points, source_bytes)
    made.legend(loc="outside upper left", ncols=5, frameon=False)
    return made


def _mark(axes: Axes, point: Point, colour: str) -> None:
    """A point of a ladder with its name; a dominated one is faint."""
    spot = (point.cache_bytes_per_token, _lost(point.perplexity_ratio))
    alpha = _FAINT if point.dominated else 1.0
    axes.plot(*spot, "o", color=colour, alpha=alpha, markersize=7, markeredgewidth=0)
    # The best points have nothing below and to the left of them, where a name would cover another.
    axes.annotate(
        point.target,
        spot,
        xytext=(4, 4) if point.dominated else (-4, -11),
        textcoords="offset points",
        ha="left" if point.dominated else "right",
        fontsize=8,
        color=colour,
        alpha=0.65 if point.dominated else 1.0,
        annotation_clip=True,
    )


def _cache_axis(axes: Axes, points: list[Point], source_bytes: float) -> None:
    """Make the horizontal axis one of bytes of cache a token, with ticks at halves of the source's."""
    shares = [1.0, *(point.cache_bytes_per_token / source_bytes for point in points)]
    low, high = min(*shares, 0.5), max(shares)
    ticks = [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    axes.set_xscale("log")
    axes.set_xticks(
        [tick * source_bytes for tick in ticks], [f"{tick * source_bytes:,.0f}\n{100 * tick:.4g}%" for tick in ticks]
    )
    axes.set_xticks([], minor=True)
    axes.set_xlim(low * source_bytes / 1.4, high * source_bytes * 1.12)
    axes.set_xlabel("cache bytes a token, and their share of the original's in bfloat16 (log scale)")


def _methods(frontier: Frontier) -> Figure:
    rows = [point for point in shown(frontier) if math.isfinite(point.perplexity_ratio)]
    names = list(dict.fromkeys(name(point, frontier) for point in rows))
    made, (axes,) = new_figure(10, 1.6 + 0.36 * len(names))
    for index, target in enumerate(targets(frontier)):
        colour = _TARGETS[index % len(_TARGETS)]
        axes.scatter([], [], color=colour, label=target)
        for point in (one for one in rows if one.target == target):
            spot = (point.perplexity_ratio, names.index(name(point, frontier)))
            axes.plot(*spot, "D" if point.way == "headwise" else "o", color=colour, markersize=7)
            axes.annotate(
                f"× {ratio_text(point.perplexity_ratio)}",
                spot,
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=colour,
            )
    ticks, labels, span = _ratio_axis([point.perplexity_ratio for point in rows])
    axes.set_xscale("log")
    axes.set_xticks(ticks, labels)
    axes.set_xticks([], minor=True)
    axes.set_xlim(10 ** span[0], 10 ** (span[1] + 0.12 * (span[1] - span[0])))  # room for the last number
    axes.set_xlabel("perplexity, × the original's (log scale; left is better)")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if len(targets(frontier)) > 1:
        made.legend(loc="outside upper left", ncols=5, frameon=False)
    return made


def _lost(ratio: float) -> float:
    """The place of a ratio of perplexities on a ladder's plot."""
    return max(ratio - 1, _LEAST_LOSS)


def _loss_axis(worst: float) -> tuple[list[float], list[str], list[float]]:
    """Ticks of a ladder's axis up to the worst ratio, their labels, and its range in powers of ten."""
    powers = [10.0**power for power in range(1, math.ceil(math.log10(max(worst, 10.0))) + 1)]
    ticks = [tick for tick in (*_LADDER_TICKS, *powers) if tick <= max(worst, 1.05)]
    span = [math.log10(_LEAST_LOSS) - 0.3, math.log10(_lost(max(worst, 1.05))) + 0.15]
    labels = [f"{tick:,.10g}" for tick in ticks]
    return [_lost(tick) for tick in ticks], [f"≤ {labels[0]}", *labels[1:]], span


def _ratio_axis(ratios: list[float]) -> tuple[list[float], list[str], list[float]]:
    """Ticks of a log axis from about 1 to the worst ratio, their labels, and its range in powers of ten."""
    low, high = min([1.0, *ratios]), max([1.05, *ratios])
    pad = 0.09 * math.log10(high / low)
    span = [math.log10(low) - pad, math.log10(high) + pad]
    gap = (span[1] - span[0]) / 14  # the least distance between two labels
    ticks: list[float] = []
    powers = sorted(range(math.floor(span[0]), math.ceil(span[1]) + 1), key=abs)
    for tick in (digit * 10.0**power for digit in _DIGITS for power in powers):
        position = math.log10(tick)
        if span[0] <= position <= span[1] and all(abs(position - math.log10(other)) >= gap for other in ticks):
            ticks.append(tick)
    ticks.sort()
    return ticks, [f"{tick:,.10g}" for tick in ticks], span


def tables(frontier: Frontier) -> list[Table]:
    """Tables of the source and of points; of methods there is one for each target."""
    parts = [(target, [point for point in shown(frontier) if point.target == target]) for target in targets(frontier)]
    if not frontier.methods:
        parts = [("", shown(frontier))]
    texts = (f"× {short(text, frontier)}" for text in frontier.texts)
    kind = () if frontier.methods else ("kind",)
    greedy = ("equal", "until", "ties") if _are_continued(frontier) else ()
    measured = ("KL", "99.9%", "top-1", "changed", *greedy, "s")
    heading = ("attention", *kind, "cache B/token", "share", *texts, *measured)
    same = ("0", "0", "100%", "0", *("" for _ in greedy), "")
    numbers = (f"{frontier.cache_bytes_per_token:,.0f}", "100%", *("1" for _ in frontier.texts), *same)
    found = []
    for head, points in parts:
        table = Table((head, *heading), words=range(2 + len(kind)))
        table.add("original", frontier.label, *("" for _ in kind), *numbers)
        for point in points:
            table.add(*_cells(point, frontier), mark="faint" if point.dominated and not frontier.methods else "")
        found.append(table)
    return found


def _cells(point: Point, frontier: Frontier) -> tuple[str, ...]:
    return (
        name(point, frontier),
        point.label,
        *(() if frontier.methods else (point.kind,)),
        f"{point.cache_bytes_per_token:,.0f}",
        f"{point.cache_fraction:.1%}",
        *(ratio_text(point.ratios[text]) for text in frontier.texts),
        *("" if math.isnan(nats) else f"{nats:.4f}" for nats in (point.kl, point.kl_999)),
        "" if math.isnan(point.top1_agreement) else f"{point.top1_agreement:.1%}",
        "" if point.top1_changed is None else f"{point.top1_changed:,}",
        *(_greedy(point.evaluation.get("continuations")) if _are_continued(frontier) else ()),
        "" if point.conversion is None else f"{point.seconds:,.0f}",
    )


def _are_continued(frontier: Frontier) -> bool:
    return any(point.evaluation.get("continuations") for point in frontier.points)


def _greedy(found: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """The cells of a point's continuations, a `Continuations` as a dict; empty where there are none."""
    if found is None:
        return ("", "", "")
    parting = found["prompts"] - found["equal"]
    ties = f"{found['near_ties']}/{parting}" if parting else ""
    return (f"{found['equal']}/{found['prompts']}", f"{found['median_equal']:g}", ties)


def title(frontier: Frontier) -> str:
    """The title of a frontier's documents."""
    if frontier.methods:
        return f"{last_name(frontier.source)}: ways to convert to {', '.join(targets(frontier))}"
    return f"{last_name(frontier.source)}: quality against cache"


def how(frontier: Frontier) -> str:
    """The measurement, in a few sentences."""
    texts = "; ".join(f"{short(text, frontier)}: {frontier.perplexities[text]:.3f}" for text in frontier.texts)
    libraries = ", ".join(f"{library} {version}" for library, version in sorted(frontier.versions.items()))
    conversions = [point.conversion for point in frontier.points if point.conversion is not None]
    tokens, window = max(
        ((one["calibration_tokens"], one["calibration_window"]) for one in conversions), default=(0, 0)
    )
    calibration = f"Calibrated on {tokens:,} tokens of {', '.join(map(last_name, frontier.calibrate))}"
    calibration += f" in windows of {window}, without training"
    return (
        f"Cache B/token: bytes that the cache allocates for a window of {frontier.window} tokens, over these tokens,"
        " with scales and tokens stored as they are; numbers that are not in codes count as bfloat16. Share: of the"
        f" original's in bfloat16. ×: perplexity over the original's ({texts}), on {frontier.tokens:,} tokens."
        " KL, in nats a token, its 99.9% quantile, and top-1, how often both predict the same token first, are over"
        " all texts; changed: at how many tokens they do not. s: seconds to convert."
        f"{_how_continued(frontier)}"
        f" {calibration if tokens else 'No conversion used a calibration text'}."
        f" {frontier.dtype}, {frontier.threads} threads; {libraries}."
    )


def _how_continued(frontier: Frontier) -> str:
    found = next((one for point in frontier.points if (one := point.evaluation.get("continuations"))), None)
    if found is None:
        return ""
    return (
        f" Greedy continuations of {found['tokens']} tokens, of prompts of {found['prompt_tokens']}: equal, how many"
        " are the original's throughout; until, the median number of equal tokens; ties, how many part where the"
        f" original's two likeliest tokens are at most {found['near_tie']:g} nats apart."
    )


def markdown(frontier: Frontier) -> str:
    """The Markdown document: title, recommendations, tables and measurement; names in it are plain text."""
    lines = [f"# {one_line(title(frontier))}"]
    if recommendations := advice(frontier):
        lines += ["", *(f"- {one_line(line)}" for line in recommendations)]
    for table in tables(frontier):
        heading, *rows = (tuple(map(one_line, row)) for row in (table.heading, *table.rows))
        lines += ["", replace(table, heading=heading, rows=rows).markdown()]
    lines += ["", one_line(how(frontier))]
    lines += ["", *(f"- {one_line(note)}" for note in frontier.notes)] if frontier.notes else []
    return "\n".join(lines) + "\n"


def page(frontier: Frontier) -> str:
    """The page: one HTML file that contains all it needs."""
    plot = as_svg(lambda: figure(frontier))
    parts: list[Part] = [Text(_lead(frontier)), Picture(plot, "Loss and cache of each", name="plot", is_wide=True)]
    if not frontier.methods:
        parts += [Text("What to do", "heading"), advice(frontier)]
    parts += [Text("All that was tried", "heading"), *tables(frontier), Text(how(frontier), "small")]
    return web_page(title(frontier), [*parts, *([frontier.notes] if frontier.notes else [])])


def _lead(frontier: Frontier) -> str:
    if frontier.methods:
        return "Each row is a method at the same cache. Further left is better; headwise's own is the diamond."
    published = " Published methods are beside them." if any(p.kind == "published" for p in frontier.points) else ""
    end = plot_end(frontier)
    beyond = sum(end < point.perplexity_ratio < math.inf for point in frontier.points)
    return (
        f"Each point is a conversion, a format of the original's cache, or both.{published} Lower is better, further"
        " left is smaller. Faint points are dominated: another point has no more cache and loses no more."
        + (f" The plot ends at × {end:.3g}, and {beyond} of the table's rows lie beyond." if beyond else "")
    )
