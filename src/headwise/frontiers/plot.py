"""A frontier's plot, as plotly's JSON: nothing here needs plotly, and all of it can be looked at by a test."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from headwise.frontiers.points import Frontier, Point, name, ratio_text, short, shown, targets

COLOURS = {"MLA": "#3f7fd9", "GQA": "#d98218", "MQA": "#c2487f", "MHA": "#2f9e76"}
_GREY = "#8b919b"
_FAINT = 0.4
_DIGITS = (1.0, 2.0, 5.0, 3.0, 1.5, 7.0, 1.2, 1.1, 4.0, 1.05, 1.3, 1.02, 1.01)
"""Of ticks, the most wanted first."""


def figure(found: Frontier) -> dict[str, Any]:
    """The plot, as plotly's JSON: quality against cache, or the ways at each target one below the other."""
    return _ways(found) if found.methods else _ladder(found)


def _ladder(found: Frontier) -> dict[str, Any]:
    points = [point for point in shown(found) if math.isfinite(point.perplexity_ratio)]
    whole = found.cache_bytes_per_token
    best = sorted((p.cache_bytes_per_token, p.perplexity_ratio) for p in points if not p.dominated)
    best = [spot for spot in best if spot[0] < whole] + [(whole, 1.0)]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [x for x, _ in best],
            "y": [y for _, y in best],
            "line": {"shape": "hv", "width": 1.5, "color": _GREY, "dash": "dot"},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    for mechanism, colour in COLOURS.items():
        own = [point for point in points if point.mechanism == mechanism]
        if own:
            traces += [_legend(mechanism, colour), _marks(own, mechanism, colour, found)]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "original",
            "x": [whole],
            "y": [1.0],
            "text": ["original"],
            "textposition": "bottom center",
            "textfont": {"color": _GREY, "size": 13},
            "marker": {"symbol": "star", "size": 16, "color": _GREY},
            "hovertemplate": f"<b>original</b> · {escape(found.label)}<br>{whole:,.0f} B a token<extra></extra>",
        }
    )
    values, labels, span = _ratio_axis([point.perplexity_ratio for point in points])
    return {
        "data": traces,
        "layout": _layout(
            xaxis=_cache_axis(points, found),
            yaxis={
                "title": {"text": "perplexity, × the original's (log scale)", "standoff": 8},
                "type": "log",
                "tickvals": values,
                "ticktext": labels,
                "range": span,
            },
            height=540,
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        ),
    }


def _cache_axis(points: list[Point], found: Frontier) -> dict[str, Any]:
    """The axis of bytes of cache a token, with ticks at round shares of the source's."""
    whole = found.cache_bytes_per_token
    most = max([whole, *(point.cache_bytes_per_token for point in points)])
    step = 0.25 if most <= 1.5 * whole else 0.5 if most <= 3 * whole else math.ceil(most / whole / 6)
    ticks = [step * count for count in range(int(most / whole / step + 1e-9) + 1)]
    return {
        "title": {"text": f"cache bytes a token ({found.dtype}), and their share of the original's", "standoff": 12},
        "tickvals": [tick * whole for tick in ticks],
        "ticktext": [f"{tick * whole:,.0f}<br>{tick:.0%}" for tick in ticks],
        "range": [0, most * 1.08],
    }


def _legend(mechanism: str, colour: str) -> dict[str, Any]:
    """A mechanism's entry in the legend, which would be faint if its first point were."""
    marker = {"size": 13, "color": colour}
    place = {"x": [None], "y": [None], "legendgroup": mechanism}
    return {"type": "scatter", "mode": "markers", "name": mechanism, "marker": marker, **place}


def _marks(own: list[Point], mechanism: str, colour: str, found: Frontier) -> dict[str, Any]:
    """One mechanism's points, the dominated ones fainter."""
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": mechanism,
        "legendgroup": mechanism,
        "showlegend": False,
        "x": [point.cache_bytes_per_token for point in own],
        "y": [point.perplexity_ratio for point in own],
        "text": [point.target for point in own],
        "textposition": "top right",
        "textfont": {"color": [_faded(colour, point) for point in own], "size": 13},
        "marker": {
            "size": 13,
            "color": colour,
            "opacity": [_FAINT if point.dominated else 1.0 for point in own],
            "line": {"width": 0},
        },
        "customdata": [_hover(point, found) for point in own],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _ways(found: Frontier) -> dict[str, Any]:
    rows = [point for point in shown(found) if math.isfinite(point.perplexity_ratio)]
    colours = [*COLOURS.values(), _GREY]
    names = list(dict.fromkeys(name(point, found) for point in rows))
    traces = []
    for index, target in enumerate(targets(found)):
        own = [point for point in rows if point.target == target]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": target,
                "x": [point.perplexity_ratio for point in own],
                "y": [name(point, found) for point in own],
                "text": [f"× {ratio_text(point.perplexity_ratio)}" for point in own],
                "textposition": "middle right",
                "textfont": {"color": colours[index % len(colours)], "size": 12},
                "marker": {
                    "size": 12,
                    "color": colours[index % len(colours)],
                    "symbol": ["diamond" if point.way == "headwise" else "circle" for point in own],
                },
                "customdata": [_hover(point, found) for point in own],
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
                "range": [span[0], span[1] + 0.12 * (span[1] - span[0])],  # room for the last one's number
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
    """What both plots share; colours of text and grid are the page's, by its style."""
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


def _ratio_axis(ratios: list[float]) -> tuple[list[float], list[str], list[float]]:
    """Ticks of a log axis from about 1 to the worst ratio, their labels, and its range in powers of ten."""
    low, high = min([1.0, *ratios]), max([1.05, *ratios])
    pad = 0.09 * math.log10(high / low)
    span = [math.log10(low) - pad, math.log10(high) + pad]
    gap = (span[1] - span[0]) / 14  # no two labels nearer than that
    ticks: list[float] = []
    powers = sorted(range(math.floor(span[0]), math.ceil(span[1]) + 1), key=abs)
    for tick in (digit * 10.0**power for digit in _DIGITS for power in powers):
        at = math.log10(tick)
        if span[0] <= at <= span[1] and all(abs(at - math.log10(other)) >= gap for other in ticks):
            ticks.append(tick)
    ticks.sort()
    return ticks, [f"{tick:,.10g}" for tick in ticks], span


def _hover(point: Point, found: Frontier) -> str:
    ratios = [f"{escape(short(text, found))} × {ratio_text(ratio)}" for text, ratio in point.ratios.items()]
    lines = [
        f"<b>{escape(_full_name(point, found))}</b> · {escape(point.label)}",
        f"{point.cache_bytes_per_token:,.0f} B a token, {point.cache_fraction:.0%} of the original's",
        f"perplexity × {ratio_text(point.perplexity_ratio)}{' over all' if len(ratios) > 1 else ''}",
        *(ratios if len(ratios) > 1 else []),
        f"KL {point.kl:.4f} nats a token",
        f"top-1 agreement {point.top1_agreement:.1%}",
        f"converted in {point.seconds:,.0f} s",
        *(["another has no more of either"] if point.dominated and not found.methods else []),
    ]
    return "<br>".join(lines)


def _full_name(point: Point, found: Frontier) -> str:
    return f"{point.target}, {name(point, found)}" if found.methods else point.target


def _faded(colour: str, point: Point) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{0.65 if point.dominated else 1})"
