"""Web pages and plots.

A page is one file that needs no other, by one template and in one style. Plots are files of PNG or SVG, and pictures
within pages; matplotlib, an extra, is imported when something is drawn.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from headwise.base.printable import printable
from headwise.base.tables import Cell, Table
from headwise.errors import MissingExtraError

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, RED, GREEN, PURPLE, OLIVE = "#3f7fd9", "#d98218", "#c2487f", "#2f9e76", "#8a63d2", "#7a8a2a"
COLOURS = (BLUE, ORANGE, RED, GREEN, PURPLE, OLIVE, "#c0504d", "#4aa3a2")
"""The colours of lines and points, in the order in which they are taken: legible on white and on a dark page."""
GREY = "#8b919b"

PLOT_PIP = "pip install 'headwise[plot]'"
"""The command that installs the package that plots need."""


def refuse_no_matplotlib(name: str, value: object) -> None:
    """Refuse a plot without matplotlib, before any work.

    For example ``refuse_no_matplotlib("plot", True)``.

    Args:
        name: the option that asks for the plot.
        value: the value of that option.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(name, value, f"needs the matplotlib package: {PLOT_PIP}; or go without it")


def new_figure(
    width: float, height: float, columns: int = 1, *, shares_y: bool = False
) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure with axes beside each other. For example ``new_figure(10, 4, 2)[1][0].plot([1, 2])``.

    Args:
        width: the width of the figure in inches.
        height: the height of the figure in inches.
        columns: axes.
        shares_y: whether their vertical axes are one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, columns, squeeze=False, sharey=shares_y)[0]
    for each in axes:
        each.grid(visible=True, which="major", alpha=0.3)
        each.set_axisbelow(True)
        each.tick_params(which="both", labelsize=8)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


Draw = Callable[[], "Figure"]
"""Makes a figure; see `new_figure`."""


def as_file(draw: Draw, kind: str) -> bytes:
    """A figure as a file of a kind, ``png`` or ``svg``; equal figures make equal files.

    For example ``as_file(lambda: new_figure(4, 3)[0], "svg")``.
    """
    return _saved(draw, kind, is_transparent=False)


def as_svg(draw: Draw) -> str:
    """A figure for a web page: without a background, and with lines and texts in the page's own colour.

    For example ``as_svg(lambda: new_figure(4, 3)[0])``.
    """
    text = _saved(draw, "svg", is_transparent=True).decode()
    return text[text.index("<svg") :].replace("#000000", "currentColor")


def _saved(draw: Draw, kind: str, *, is_transparent: bool) -> bytes:
    import matplotlib as mpl
    from matplotlib.text import Text as Words
    from matplotlib.ticker import FixedFormatter

    data, metadata = io.BytesIO(), dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None
    # Names of elements that do not vary, texts that stay texts, and `$` in a name that begins no formula.
    with mpl.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none", "text.parse_math": False}):
        figure = draw()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                label_logarithms(axis)
                if isinstance(formatter := axis.get_major_formatter(), FixedFormatter):
                    formatter.seq = [printable(label) for label in formatter.seq]
        for text in figure.findobj(Words):  # an SVG with a control character would be no XML
            text.set_text(printable(text.get_text()))
        figure.savefig(data, format=kind, dpi=150, transparent=is_transparent, metadata=metadata)
    return data.getvalue()


def label_logarithms(axis: Axis, style: str | None = None) -> None:
    """Label a logarithmic axis by numbers, where matplotlib would by formulas, which are not parsed.

    Every axis that is drawn is labelled so; a style has to be named before. For example
    ``label_logarithms(new_figure(4, 3)[1][0].xaxis, "{x:g}")``.

    Args:
        axis: the axis.
        style: the format of powers of ten, such as ``{x:g}``, and numbers between them are labelled too. When None
            they have commas, and numbers between them are labelled on an axis of at most two decades.
    """
    from matplotlib.ticker import LogFormatter, NullFormatter

    low, high = axis.get_view_interval()
    if isinstance(axis.get_major_formatter(), LogFormatter):
        axis.set_major_formatter(style or (lambda x, _: f"{x:,.0f}" if 1 <= x < 1e6 else f"{x:g}"))
    if isinstance(axis.get_minor_formatter(), LogFormatter):
        axis.set_minor_formatter(_of_one_digit if style or high < 100 * low else NullFormatter())


def _of_one_digit(number: float, _: float) -> str:
    """The label of a tick between powers of ten: of some digits alone, so that labels have room."""
    return f"{number:g}" if f"{number:e}"[0] in "2357" else ""


@dataclass(frozen=True)
class Text:
    """A paragraph, for example ``Text("What to do", "heading")``.

    Attributes:
        text: plain.
        kind: how it is set.
        anchor: what a cell's link leads to.
    """

    text: str
    kind: Literal["plain", "small", "heading", "strong", "code"] = "plain"
    anchor: str = ""


@dataclass(frozen=True)
class Picture:
    """A plot within a page.

    Attributes:
        svg: the drawing, as `headwise.base.pages.as_svg` makes it.
        caption: what the plot shows, in words, for a reader who hears the page.
        name: the name of the element in the page.
        is_wide: whether it keeps its size, and is scrolled on a narrow screen, as many names in it ask for.
    """

    svg: str
    caption: str
    name: str = ""
    is_wide: bool = False


Part = Text | Table | Picture | Sequence[str]
"""What a page consists of; a sequence of texts is a list of points."""


def web_page(title: str, parts: Sequence[Part], template: str = "base/page.html", **values: Any) -> str:
    """A self-contained HTML page that follows the reader's light or dark colour scheme; all texts are escaped.

    For example ``web_page("Results", [Text("What was measured."), Table(["", "ms"], [("one", "1.5")])])``.

    Args:
        title: the title of the window and of the heading.
        parts: below the heading, in their order.
        template: the Jinja template within the package; another one than the default extends it.
        values: the values that such a template takes.
    """
    return _environment().get_template(template).render(title=title, parts=parts, **values)


def _without_controls(value: Any) -> Any:
    return printable(value) if type(value) in (str, Cell) else value  # and not what a template marks as safe


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("headwise", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
