"""A frontier as documents: tables in Markdown, and one self-contained page with a plot.

The plot is plotly's figure as plain JSON. plotly, which is an extra, is needed only to put its script and the figure
into the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from headwise.base.documents import web_page
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

COLOURS: dict[Kind, str] = {"quantised": "#d98218", "converted": "#c2487f", "both": "#3f7fd9", "published": "#2f9e76"}
_LEGEND: dict[Kind, str] = {
    "quantised": "quantised",
    "converted": "converted",
    "both": "converted and quantised",
    "published": "published methods",
}
_TARGETS = ("#3f7fd9", "#d98218", "#c2487f", "#2f9e76")
"""The colours of targets, where methods are compared."""

_LARGEST = 10.0
"""A ladder's plot ends at this ratio of perplexities, so that those near 1 are told apart."""

_LEAST_LOSS = 0.001
"""What loses less is drawn as if it lost this: a ladder's plot is logarithmic in what is lost, ratio - 1."""

_GREY = "#8b919b"
_FAINT = 0.4
_LADDER_TICKS = (*(1 + loss for loss in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)), 2, 3, 5)
_DIGITS = (1.0, 2.0, 5.0, 3.0, 1.5, 7.0, 1.2, 1.1, 4.0, 1.05, 1.3, 1.02, 1.01)
"""The first digits of ticks, in order of preference."""


def figure(frontier: Frontier) -> dict[str, Any]:
    """The plot as plotly's JSON: quality against cache, or the methods at each target one below the other."""
    return _methods(frontier) if frontier.methods else _ladder(frontier)


def plot_end(frontier: Frontier) -> float:
    """The largest ratio of perplexities that a ladder's plot shows before it is zoomed out."""
    return max(_LARGEST, min(point.perplexity_ratio for point in frontier.points))


def _ladder(frontier: Frontier) -> dict[str, Any]:
    points = [point for point in shown(frontier) if math.isfinite(point.perplexity_ratio)]
    source_bytes = frontier.cache_bytes_per_token
    # The line of the best points ends at the source, whatever points there are of more bytes. It is drawn first, so
    # that markers lie on it.
    best = sorted((p.cache_bytes_per_token, p.perplexity_ratio) for p in points if not p.dominated)
    best = [spot for spot in best if spot[0] < source_bytes] + [(source_bytes, 1.0)]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [x for x, _ in best],
            "y": [_lost(y) for _, y in best],
            "line": {"shape": "hv", "width": 1.5, "color": _GREY, "dash": "dot"},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    for kind, colour in COLOURS.items():
        points_of_kind = [point for point in points if point.kind == kind]
        if points_of_kind:
            traces += [_legend(_LEGEND[kind], colour), _marks(points_of_kind, _LEGEND[kind], colour, frontier)]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "original",
            "x": [source_bytes],
            "y": [_lost(1.0)],
            "text": ["original"],
            "textposition": "top center",
            "textfont": {"color": _GREY, "size": 13},
            "marker": {"symbol": "star", "size": 16, "color": _GREY},
            "hovertemplate": f"<b>original</b> · {escape(frontier.label)}<br>"
            f"{source_bytes:,.0f} B a token<extra></extra>",
        }
    )
    # One format that loses everything would squeeze all other points together: it is there when a reader zooms out.
    values, labels, span = _loss_axis(min(plot_end(frontier), max((p.perplexity_ratio for p in points), default=1.0)))
    return {
        "data": traces,
        "layout": _layout(
            xaxis=_cache_axis(points, frontier),
            yaxis={
                "title": {"text": "perplexity, × the original's (log scale of what is lost)", "standoff": 8},
                "type": "log",
                "tickvals": values,
                "ticktext": labels,
                "range": span,
            },
            height=540,
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        ),
    }


def _cache_axis(points: list[Point], frontier: Frontier) -> dict[str, Any]:
    """The axis of bytes of cache a token, on a log scale, with ticks at halves of the source's."""
    source_bytes = frontier.cache_bytes_per_token
    shares = [1.0, *(point.cache_bytes_per_token / source_bytes for point in points)]
    low, high = min(*shares, 0.5), max(shares)
    ticks = [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    title = "cache bytes a token, and their share of the original's in bfloat16 (log scale)"
    return {
        "title": {"text": title, "standoff": 12},
        "type": "log",
        "tickvals": [tick * source_bytes for tick in ticks],
        "ticktext": [f"{tick * source_bytes:,.0f}<br>{100 * tick:.4g}%" for tick in ticks],
        "range": [math.log10(low * source_bytes / 1.4), math.log10(high * source_bytes * 1.12)],
    }


def _legend(kind: str, colour: str) -> dict[str, Any]:
    """A kind's entry in the legend, apart from its points, whose first may be faint."""
    marker = {"size": 13, "color": colour}
    place = {"x": [None], "y": [None], "legendgroup": kind}
    return {"type": "scatter", "mode": "markers", "name": kind, "marker": marker, **place}


def _marks(points: list[Point], kind: str, colour: str, frontier: Frontier) -> dict[str, Any]:
    """The points of one kind, dominated ones faint."""
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": kind,
        "legendgroup": kind,
        "showlegend": False,
        "x": [point.cache_bytes_per_token for point in points],
        "y": [_lost(point.perplexity_ratio) for point in points],
        "text": [point.target for point in points],
        # The best points have nothing below and to the left of them, where a name would cover another.
        "textposition": ["top right" if point.dominated else "bottom left" for point in points],
        "textfont": {"color": [_faded(colour, point) for point in points], "size": 13},
        "marker": {
            "size": 13,
            "color": colour,
            "opacity": [_FAINT if point.dominated else 1.0 for point in points],
            "line": {"width": 0},
        },
        "customdata": [_hover(point, frontier) for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _methods(frontier: Frontier) -> dict[str, Any]:
    rows = [point for point in shown(frontier) if math.isfinite(point.perplexity_ratio)]
    colours = [*_TARGETS, _GREY]
    names = list(dict.fromkeys(name(point, frontier) for point in rows))
    traces = []
    for index, target in enumerate(targets(frontier)):
        points = [point for point in rows if point.target == target]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": target,
                "x": [point.perplexity_ratio for point in points],
                "y": [name(point, frontier) for point in points],
                "text": [f"× {ratio_text(point.perplexity_ratio)}" for point in points],
                "textposition": "middle right",
                "textfont": {"color": colours[index % len(colours)], "size": 12},
                "marker": {
                    "size": 12,
                    "color": colours[index % len(colours)],
                    "symbol": ["diamond" if point.way == "headwise" else "circle" for point in points],
                },
                "customdata": [_hover(point, frontier) for point in points],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    values, labels, span = _ratio_axis([point.perplexity_ratio for point in rows])
    return {
        "data": traces,
        "layout": _layout(
            xaxis={
                "title": {"text": "perplexity, × the original's (log scale; left is better)", "standoff": 12},
                "type": "log",
                "tickvals": values,
                "ticktext": labels,
                "range": [span[0], span[1] + 0.12 * (span[1] - span[0])],  # room for the last number
            },
            yaxis={"categoryorder": "array", "categoryarray": names[::-1], "automargin": True},
            height=160 + 34 * len(names),
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            showlegend=len(traces) > 1,
        ),
    }


def _layout(
    *, xaxis: dict[str, Any], yaxis: dict[str, Any], height: int, legend: dict[str, Any], showlegend: bool = True
) -> dict[str, Any]:
    """The layout that both plots share; the page's style sets the colours of text and grid."""
    axis = {"zeroline": False, "gridwidth": 1, "automargin": True, "fixedrange": False}
    return {
        "xaxis": {**axis, **xaxis},
        "yaxis": {**axis, **yaxis},
        "height": height,
        "legend": legend,
        "showlegend": showlegend,
        "margin": {"l": 70, "r": 30, "t": 40, "b": 70},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": _GREY},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left"},
        "hovermode": "closest",
    }


def _lost(ratio: float) -> float:
    """Where a ratio of perplexities lies on a ladder's plot."""
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


def _hover(point: Point, frontier: Frontier) -> str:
    ratios = [f"{escape(short(text, frontier))} × {ratio_text(ratio)}" for text, ratio in point.ratios.items()]
    is_dominated = point.dominated and not frontier.methods
    lines = [
        f"<b>{escape(_full_name(point, frontier))}</b> · {escape(point.label)}",
        f"{point.cache_bytes_per_token:,.0f} B a token, {point.cache_fraction:.1%} of the original's in bfloat16",
        f"perplexity × {ratio_text(point.perplexity_ratio)}{' over all' if len(ratios) > 1 else ''}",
        *(ratios if len(ratios) > 1 else []),
        *([] if math.isnan(point.kl) else [f"KL {point.kl:.4f} nats a token"]),
        *([] if math.isnan(point.top1_agreement) else [f"top-1 agreement {point.top1_agreement:.1%}"]),
        *([] if point.conversion is None else [f"converted in {point.seconds:,.0f} s"]),
        *(["dominated: another point has no more of either"] if is_dominated else []),
    ]
    return "<br>".join(lines)


def _full_name(point: Point, frontier: Frontier) -> str:
    return f"{point.target}, {name(point, frontier)}" if frontier.methods else point.target


def _faded(colour: str, point: Point) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{0.65 if point.dominated else 1})"


_STYLE = """
tr.faint td { color: color-mix(in srgb, CanvasText 50%, Canvas); }
.small { font-size: .85rem; }
.plotly .xtitle, .plotly .ytitle, .plotly .legendtext, .plotly .xtick text, .plotly .ytick text,
.plotly .x2tick text, .plotly .annotation-text { fill: CanvasText !important; }
.plotly .gridlayer path { stroke: color-mix(in srgb, CanvasText 13%, Canvas) !important; }
"""


def tables(frontier: Frontier) -> list[list[tuple[str, ...]]]:
    """The rows of tables: a heading, the source, then points; methods have a table for each target."""
    parts = [(target, [point for point in shown(frontier) if point.target == target]) for target in targets(frontier)]
    if not frontier.methods:
        parts = [("", shown(frontier))]
    texts = (f"× {short(text, frontier)}" for text in frontier.texts)
    kind = () if frontier.methods else ("kind",)
    heading = ("attention", *kind, "cache B/token", "share", *texts, "KL", "top-1", "s")
    numbers = (f"{frontier.cache_bytes_per_token:,.0f}", "100%", *("1" for _ in frontier.texts), "0", "100%", "")
    source = ("original", frontier.label, *("" for _ in kind), *numbers)
    return [[(head, *heading), source, *(_cells(point, frontier) for point in points)] for head, points in parts]


def _cells(point: Point, frontier: Frontier) -> tuple[str, ...]:
    return (
        name(point, frontier),
        point.label,
        *(() if frontier.methods else (point.kind,)),
        f"{point.cache_bytes_per_token:,.0f}",
        f"{point.cache_fraction:.1%}",
        *(ratio_text(point.ratios[text]) for text in frontier.texts),
        "" if math.isnan(point.kl) else f"{point.kl:.4f}",
        "" if math.isnan(point.top1_agreement) else f"{point.top1_agreement:.1%}",
        "" if point.conversion is None else f"{point.seconds:,.0f}",
    )


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
        " KL, in nats a token, and top-1, how often both predict the same token first, are over all texts. s: seconds"
        f" to convert. {calibration if tokens else 'No conversion used a calibration text'}."
        f" {frontier.dtype}, {frontier.threads} threads; {libraries}."
    )


def markdown(frontier: Frontier) -> str:
    """The Markdown document: title, recommendations, tables and measurement."""
    lines = [f"# {title(frontier)}"]
    if recommendations := advice(frontier):
        lines += ["", *(f"- {line}" for line in recommendations)]
    words = 2 if frontier.methods else 3  # columns of words, before those of numbers
    for table in tables(frontier):
        heading, *rows = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table)
        lines += ["", heading, "|" + "|".join([*["---"] * words, *["---:"] * (len(table[0]) - words)]) + "|", *rows]
    lines += ["", how(frontier)]
    lines += ["", *(f"- {note}" for note in frontier.notes)] if frontier.notes else []
    return "\n".join(lines) + "\n"


def page(frontier: Frontier) -> str:
    """The page: one HTML file that contains all it needs, plotly's script included."""
    import plotly.io

    plot = plotly.io.to_html(
        figure(frontier),
        config={"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
        include_plotlyjs=True,
        full_html=False,
        div_id="plot",
    )
    recommendations = "" if frontier.methods else f"<h2>What to do</h2>\n{_list(advice(frontier))}\n"
    notes = f"{_list(frontier.notes)}\n" if frontier.notes else ""
    faint = {name(point, frontier) for point in frontier.points if point.dominated and not frontier.methods}
    return web_page(
        title(frontier),
        f"<p>{escape(_lead(frontier))}</p>\n{plot}\n{recommendations}"
        f"<h2>All that was tried</h2>\n{''.join(_table(table, faint) for table in tables(frontier))}"
        f'<p class="small">{escape(how(frontier))}</p>\n{notes}',
        _STYLE,
    )


def _table(table: list[tuple[str, ...]], faint: set[str]) -> str:
    heading, *rows = table
    body = "\n".join(f"<tr{' class=faint' if row[0] in faint else ''}>{_row('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table>\n<thead><tr>{_row("th", heading)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n"
    )


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


def _row(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
