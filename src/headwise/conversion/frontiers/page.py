"""A frontier as documents: tables in Markdown, and one self-contained page with a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from headwise.base.documents import web_page
from headwise.conversion.frontiers.plot import figure, plot_end
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
