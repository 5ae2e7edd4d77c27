"""Plots by matplotlib: files of PNG or SVG, and pictures within web pages.

matplotlib is an extra, and is imported when something is drawn.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headwise.errors import MissingExtraError

if TYPE_CHECKING:
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

    data, metadata = io.BytesIO(), dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None
    # Names of elements that do not vary, texts that stay texts, and `$` in a name that begins no formula.
    with mpl.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none", "text.parse_math": False}):
        figure = draw()
        for axes in figure.axes:
            _label_logarithms(axes.xaxis)
            _label_logarithms(axes.yaxis)
        figure.savefig(data, format=kind, dpi=150, transparent=is_transparent, metadata=metadata)
    return data.getvalue()


def _label_logarithms(axis: Axis) -> None:
    """Label a logarithmic axis by numbers, where matplotlib would by formulas, which are not parsed."""
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

    low, high = axis.get_view_interval()
    if isinstance(axis.get_major_formatter(), LogFormatter):
        axis.set_major_formatter(
            FuncFormatter(lambda number, _: f"{number:,.0f}" if 1 <= number < 1e6 else f"{number:g}")
        )
    if isinstance(axis.get_minor_formatter(), LogFormatter):
        axis.set_minor_formatter(FuncFormatter(of_one_digit) if high < 100 * low else NullFormatter())


def of_one_digit(number: float, _: int) -> str:
    """The label of a tick between powers of ten: of some digits alone, so that labels have room.

    For example ``of_one_digit(0.2, 0)`` is ``"0.2"``, and ``of_one_digit(0.4, 0)`` is empty.
    """
    return f"{number:g}" if f"{number:e}"[0] in "2357" else ""
