"""Pictures that commands write into a file beside what they print: PNG or SVG, by matplotlib."""

from __future__ import annotations

import importlib.util
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headwise.cli.app import out
from headwise.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from headwise.advice import Advice, Option

Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it: FILE.png or FILE.svg.")]

PLOT_PIP = "pip install 'headwise[plot]'"
_KINDS = ("png", "svg")
_BEST, _ALLOWED, _REFUSED = "#d98218", "#3f7fd9", "#a8adb5"
_LEAST_LOSS = 1e-3
"""What loses less is drawn as if it lost this much, on an axis of logarithms."""


def refuse_no_plot(plot: Path | None) -> None:
    """Refuse a picture that cannot be drawn or written, before any work; nothing where none is asked for."""
    from headwise.disk import refuse_no_file

    if plot is None:
        return
    if plot.suffix.lower().removeprefix(".") not in _KINDS:
        raise ArgumentError("plot", str(plot), f"must end in .{' or .'.join(_KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("plot", str(plot), f"needs the matplotlib package: {PLOT_PIP}; or go without it")
    refuse_no_file("plot", plot)


def write_advice_plot(plot: Path, advice: Advice, *, is_silent: bool = False) -> None:
    """Draw every option's step time and measured loss over its cache, and write the picture whole or not at all.

    Args:
        plot: the file.
        advice: what is drawn.
        is_silent: whether nothing is printed.
    """
    import matplotlib as mpl

    from headwise.disk import clearly, write_among_others

    kind = plot.suffix.lower().removeprefix(".")
    data = io.BytesIO()
    # Without a date, and with names that do not vary, equal answers make equal files; `$` in a name is no formula.
    with mpl.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none", "text.parse_math": False}):
        figure = _advice_figure(advice)
        figure.savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    with clearly("plot", plot):
        write_among_others(plot, data.getvalue())
    if not is_silent:
        out.print(f"wrote {escape(str(plot))}", soft_wrap=True)


def _advice_figure(advice: Advice) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    times, losses = figure.subplots(1, 2)
    losses.set_yscale("log")
    measured = [option for option in advice.options if option.loss is not None and math.isfinite(option.loss)]
    for axes, options in ((times, advice.options), (losses, measured)):
        for option in options:
            loss = max(option.loss or 0.0, _LEAST_LOSS)
            _point(axes, option, advice, option.decode_seconds * 1e3 if axes is times else 100 * loss)
        axes.set_xscale("log")
        axes.tick_params(which="both", labelsize=7)
        axes.set_xlabel("cache, KiB a token")
        axes.grid(visible=True, which="major", alpha=0.3)
    for axis in (times.xaxis, losses.xaxis, losses.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(_of_five)
    step = advice.question.step
    times.set_ylim(bottom=0)
    times.set_ylabel("predicted decode step, ms")
    losses.set_ylabel("measured rise of perplexity, %")
    times.set_title("orange: recommended; grey: refused", fontsize=9)
    losses.set_title("named: what no other option dominates", fontsize=9)
    limit = advice.question.max_quality_loss
    if limit:
        losses.axhline(100 * limit, color=_REFUSED, linewidth=1)
    device = advice.question.hardware.label
    figure.suptitle(f"{advice.source}, {step.batch:,} × {step.total:,} tokens, {device}", fontsize=11)
    return figure


def _of_five(number: float, _: int) -> str:
    """The label of a tick between powers of ten: of 2 and 5 alone, so that labels have room."""
    return f"{number:g}" if f"{number:e}"[0] in "25" else ""


def _point(axes: Any, option: Option, advice: Advice, y: float) -> None:
    """One option in one plot, with its name."""
    from headwise.advice import AS_IT_IS

    is_best = advice.best is not None and option.target == advice.best.target
    colour = _BEST if is_best else _ALLOWED if option.refused is None else _REFUSED
    x = option.cache_bytes_per_token / 1024
    axes.plot([x], [y], "o", color=colour, markersize=8 if is_best else 5)
    if is_best or (option.refused is None and not option.is_dominated) or option.target == AS_IT_IS:
        axes.annotate(option.target, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
