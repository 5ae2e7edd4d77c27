"""A frontier as a reader sees it: a table in Markdown, and one self-contained page with a plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from html import escape

from headwise.documents import web_page
from headwise.errors import MissingExtraError
from headwise.frontiers.plot import figure
from headwise.frontiers.points import Frontier, Point, advice, last_name, name, ratio_text, short, shown, targets

REPORT_PIP = "pip install 'headwise[report]'"

_STYLE = """
tr.faint td { color: color-mix(in srgb, CanvasText 50%, Canvas); }
.small { font-size: .85rem; }
.plotly .xtitle, .plotly .ytitle, .plotly .legendtext, .plotly .xtick text, .plotly .ytick text,
.plotly .x2tick text, .plotly .annotation-text { fill: CanvasText !important; }
.plotly .gridlayer path { stroke: color-mix(in srgb, CanvasText 13%, Canvas) !important; }
"""


def refuse_no_plotly() -> None:
    """Refuse to begin what could not be finished.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise MissingExtraError("plot", True, f"needs the plotly package: {REPORT_PIP}; or go without the plot")


def tables(found: Frontier) -> list[list[tuple[str, ...]]]:
    """A table of text, heading first, then the source; among ways one for each target, whose heading it begins."""
    parts = [(target, [point for point in shown(found) if point.target == target]) for target in targets(found)]
    if not found.methods:
        parts = [("", shown(found))]
    texts = (f"× {short(text, found)}" for text in found.texts)
    heads = ("attention", "cache B/token", "share", *texts, "KL", "top-1", "s")
    whole = f"{found.cache_bytes_per_token:,.0f}"
    source = ("original", found.label, whole, "100%", *("1" for _ in found.texts), "0", "100%", "")
    return [[(head, *heads), source, *(_cells(point, found) for point in points)] for head, points in parts]


def _cells(point: Point, found: Frontier) -> tuple[str, ...]:
    return (
        name(point, found),
        point.label,
        f"{point.cache_bytes_per_token:,.0f}",
        f"{point.cache_fraction:.0%}",
        *(ratio_text(point.ratios[text]) for text in found.texts),
        f"{point.kl:.4f}",
        f"{point.top1_agreement:.1%}",
        f"{point.seconds:,.0f}",
    )


def title(found: Frontier) -> str:
    """What the findings are of."""
    if found.methods:
        return f"{last_name(found.source)}: ways to convert to {', '.join(targets(found))}"
    return f"{last_name(found.source)}: quality against cache"


def how(found: Frontier) -> str:
    """How it was measured, in a sentence or two."""
    texts = "; ".join(f"{short(text, found)}: {found.perplexities[text]:.3f}" for text in found.texts)
    libraries = ", ".join(f"{library} {version}" for library, version in sorted(found.versions.items()))
    studied, window = max(
        (point.conversion["calibration_tokens"], point.conversion["calibration_window"]) for point in found.points
    )
    study = f"Calibrated on {studied:,} tokens of {', '.join(map(last_name, found.calibrate))}"
    study += f" in windows of {window}, without training"
    return (
        f"×: perplexity over the original's ({texts}), on {found.tokens:,} tokens in windows of {found.window}."
        " KL, in nats a token, and top-1, how often both rank the same token first, are over all texts. s: seconds to"
        f" convert. {study if studied else 'Nothing needed calibration'}."
        f" {found.dtype}, {found.threads} threads; {libraries}."
    )


def markdown(found: Frontier) -> str:
    """Title, advice, tables and how it was measured."""
    lines = [f"# {title(found)}"]
    if told := advice(found):
        lines += ["", *(f"- {line}" for line in told)]
    for table in tables(found):
        heads, *rows = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table)
        lines += ["", heads, "|" + "|".join(["---", "---", *["---:"] * (len(table[0]) - 2)]) + "|", *rows]
    lines += ["", how(found)]
    lines += ["", *(f"- {note}" for note in found.notes)] if found.notes else []
    return "\n".join(lines) + "\n"


def page(found: Frontier) -> str:
    """One HTML file with everything in it, plotly's script too."""
    import plotly.io

    drawing = plotly.io.to_html(
        figure(found),
        config={"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
        include_plotlyjs=True,
        full_html=False,
        div_id="plot",
    )
    said = "" if found.methods else f"<h2>What to convert to</h2>\n{_list(advice(found))}\n"
    notes = f"{_list(found.notes)}\n" if found.notes else ""
    faint = {name(point, found) for point in found.points if point.dominated and not found.methods}
    return web_page(
        title(found),
        f"<p>{escape(_lead(found))}</p>\n{drawing}\n{said}"
        f"<h2>All of it</h2>\n{''.join(_table(table, faint) for table in tables(found))}"
        f'<p class="small">{escape(how(found))}</p>\n{notes}',
        _STYLE,
    )


def _table(table: list[tuple[str, ...]], faint: set[str]) -> str:
    heads, *rows = table
    body = "\n".join(f"<tr{' class=faint' if row[0] in faint else ''}>{_row('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table>\n<thead><tr>{_row("th", heads)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n"
    )


def _lead(found: Frontier) -> str:
    if found.methods:
        return "Each row is another way to the same cache. Further left is better; headwise's own is the diamond."
    return (
        "Each point is a conversion. Lower is better, further left is smaller. Faint ones are not worth having:"
        " another has no more cache and loses no more."
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
