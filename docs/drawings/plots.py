"""Plots by matplotlib as SVG that is the same in every run, on a light page and on a dark one."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

INK = "#7a828e"
"""Of text and lines: a grey that is legible on white and on the dark background of the pages."""
BLUE, ORANGE, GREEN, PURPLE, RED = "#3f7fd9", "#d98218", "#2f9e76", "#8a63d2", "#c2487f"
WIDTH = 5.0
"""Inches. A figure is 360 units wide, about as wide as a telephone's page, so that text keeps its size there."""

_SETTINGS = {
    "svg.hashsalt": "headwise",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.fontsize": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 2.0,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
}


def styled() -> AbstractContextManager[None]:
    """The settings under which a figure is made and saved."""
    return mpl.rc_context(_SETTINGS)


def figure(height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of one column.

    Args:
        height: in inches.
        rows: axes, one above the other.
    """
    made = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = made.subplots(rows, 1, squeeze=False)
    return made, list(axes[:, 0])


def as_svg(made: Figure) -> str:
    """A figure as SVG, without a date and a background."""
    buffer = io.StringIO()
    made.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    # Names of clips and markers are digests of places, whose last bit differs between processors: number them.
    for count, name in enumerate(dict.fromkeys(re.findall(r'id="([a-z][0-9a-f]{10})"', text))):
        text = re.sub(rf"\b{name}\b", f"{name[0]}{count}", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def rounded(values: Iterable[float]) -> list[float]:
    """Numbers to six digits, so that the last bit of a sum, which differs between processors, is not drawn."""
    return [float(f"{value:.6g}") for value in values]


def number(value: float) -> str:
    """A number for a tick or a label, such as ``1,024``, ``0.01`` or ``10⁻⁶``."""
    if value >= 1000:
        return f"{value:,.0f}"
    if 0 < value < 0.001:
        digits, exponent = f"{value:.0e}".split("e")
        raised = f"10{str(int(exponent)).translate(_RAISED)}"
        return raised if digits == "1" else f"{digits}·{raised}"
    return f"{value:g}"


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def log_ticks(axes: Axes, axis: str, ticks: Sequence[float], base: float = 10) -> None:
    """Make an axis logarithmic, with exactly these ticks."""
    if axis == "x":
        axes.set_xscale("log", base=base)
    else:
        axes.set_yscale("log", base=base)
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    chosen.set_major_locator(FixedLocator(list(ticks)))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
