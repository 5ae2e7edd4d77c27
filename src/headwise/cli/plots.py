"""Pictures that commands write into a file beside what they print: PNG or SVG, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.costs.formulas import Comparison
    from headwise.costs.prediction import Prediction, Timed
    from headwise.decide.advice import Advice, Option
    from headwise.study.audit import MechanismBench
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from headwise.cli.app import out
from headwise.errors import ArgumentError, MissingExtraError

_BEST, _ALLOWED, _REFUSED = "#d98218", "#3f7fd9", "#a8adb5"
_LEAST_LOSS = 1e-3
"""What loses less is drawn as if it lost this much, on an axis of logarithms."""


def advice_figure(advice: Advice) -> Any:
    """Every option's step time and known loss over its cache; hollow where the loss is predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    times, losses = figure.subplots(1, 2)
    losses.set_yscale("log")
    known = [option for option in advice.options if option.loss is not None and math.isfinite(option.loss)]
    for axes, options in ((times, advice.options), (losses, known)):
        for option in options:
            loss = max(option.loss or 0.0, _LEAST_LOSS)
            y, is_hollow = (
                (option.decode_seconds * 1e3, False) if axes is times else (100 * loss, option.is_predicted)
            )
            _point(axes, option, advice, y, is_hollow=is_hollow)
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
    is_predicted = any(option.is_predicted for option in known)
    losses.set_ylabel(f"{'known' if is_predicted else 'measured'} rise of perplexity, %")
    hollow = "; hollow: predicted" * is_predicted
    times.set_title("orange: recommended; grey: refused", fontsize=9)
    losses.set_title(f"named: what no other option dominates{hollow}", fontsize=9)
    limit = advice.question.max_quality_loss
    if limit:
        losses.axhline(100 * limit, color=_REFUSED, linewidth=1)
    device = advice.question.hardware.label
    figure.suptitle(f"{advice.source}, {step.batch:,} × {step.total:,} tokens, {device}", fontsize=11)
    return figure


def _of_five(number: float, _: int) -> str:
    """The label of a tick between powers of ten: of 2 and 5 alone, so that labels have room."""
    return f"{number:g}" if f"{number:e}"[0] in "25" else ""


def _point(axes: Any, option: Option, advice: Advice, y: float, *, is_hollow: bool) -> None:
    """One option in one plot, with its name."""
    from headwise.decide.advice import AS_IT_IS

    is_best = advice.best is not None and option.target == advice.best.target
    colour = _BEST if is_best else _ALLOWED if option.refused is None else _REFUSED
    x = option.cache_bytes_per_token / 1024
    fill = "none" if is_hollow else "full"
    axes.plot([x], [y], "o", color=colour, fillstyle=fill, markersize=8 if is_best else 5)
    if is_best or (option.refused is None and not option.is_dominated) or option.target == AS_IT_IS:
        axes.annotate(option.target, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)


def comparison_figure(comparison: Comparison) -> Any:
    """The cache and a decoded token's FLOPs of each mechanism; the model itself in another colour."""
    from matplotlib.figure import Figure

    rows = comparison.rows
    figure = Figure(figsize=(10, 1.4 + 0.24 * len(rows)), layout="constrained")
    caches, flops = figure.subplots(1, 2, sharey=True)
    colours = [_BEST if row.is_source else _ALLOWED for row in rows]
    names = [row.label for row in rows]
    _bars(caches, names, [row.kv_bytes / 2**20 for row in rows], colours, "cache, MiB")
    _bars(flops, names, [row.decode_flops / 1e9 for row in rows], colours, "attention of one more token, GFLOP")
    size = f"{comparison.context:,} tokens × {comparison.batch:,}, {comparison.dtype}"
    figure.suptitle(f"{comparison.source}, {size}; orange: the model itself", fontsize=11)
    return figure


def prediction_figure(prediction: Prediction) -> Any:
    """Where the time of a decode step and of a prompt goes, operator by operator."""
    from matplotlib.figure import Figure

    step = prediction.step
    figure = Figure(figsize=(10, 1.6 + 0.24 * len(prediction.decode)), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = (f"a decode step of {step.batch:,} sequences, ms", f"a prompt of {step.total:,} tokens, ms")
    for axes, timed, title in zip(panels, (prediction.decode, prediction.prefill), titles, strict=True):
        ordered = sorted(timed, key=lambda one: -one.seconds)
        names, milliseconds = [one.name for one in ordered], [1e3 * one.seconds for one in ordered]
        _bars(axes, names, milliseconds, [_colour(one) for one in ordered], title)
    figure.suptitle(
        f"{prediction.source}, {prediction.device.label}; blue: bound by bytes, orange: by FLOPs, grey: by calls",
        fontsize=11,
    )
    return figure


def _colour(timed: Timed) -> str:
    return {"memory": _ALLOWED, "compute": _BEST}.get(timed.bound, _REFUSED)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], colours: Sequence[str], title: str) -> None:
    """Horizontal bars from the top down, each with its name."""
    places = range(len(names))
    axes.barh(places, values, color=colours)
    axes.set_yticks(places, names)
    if not axes.yaxis_inverted():  # panels may share the axis
        axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.set_xlabel(title, fontsize=9)
    axes.grid(visible=True, axis="x", alpha=0.3)


def mechanisms_figure(report: MechanismBench) -> Any:
    """Each mechanism's time, cache and similarity against the length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    times, memory, errors = figure.subplots(1, 3)
    for name in dict.fromkeys(row.mechanism for row in report.rows):
        rows = [row for row in report.rows if row.mechanism == name]
        lengths = [row.length for row in rows]
        times.plot(lengths, [row.ms for row in rows], marker="o", markersize=3, label=name)
        memory.plot(lengths, [row.cache_bytes / 1024 for row in rows], marker="o", markersize=3, label=name)
        near = [(row.length, row.converted.relative_error) for row in rows if row.converted is not None]
        if near:
            errors.plot(*zip(*near, strict=True), marker="o", markersize=3, label=name)
    for axes, label in ((times, "ms a pass"), (memory, "cache, KiB"), (errors, "error of the converted layer")):
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=7)
    for axes in (times, memory):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    figure.suptitle(
        f"E = {report.hidden_size}, {report.num_heads} heads, {report.dtype}, {report.device}", fontsize=10
    )
    return figure


Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it: FILE.png or FILE.svg.")]

PLOT_PIP = "pip install 'headwise[plot]'"
_KINDS = ("png", "svg")


def refuse_no_plot(plot: Path | None) -> None:
    """Refuse a picture that cannot be drawn or written, before any work; nothing where none is asked for."""
    from headwise.base.disk import refuse_no_file

    if plot is None:
        return
    if plot.suffix.lower().removeprefix(".") not in _KINDS:
        raise ArgumentError("plot", str(plot), f"must end in .{' or .'.join(_KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("plot", str(plot), f"needs the matplotlib package: {PLOT_PIP}; or go without it")
    refuse_no_file("plot", plot)


def write_plot(plot: Path, draw: Callable[[], Any], *, is_silent: bool = False) -> None:
    """Draw a picture and write it whole, or not at all.

    Args:
        plot: the file.
        draw: makes the figure, of matplotlib; see `headwise.cli.plots`.
        is_silent: whether nothing is printed.
    """
    import matplotlib as mpl

    from headwise.base.disk import storage_errors, write_among_others

    kind = plot.suffix.lower().removeprefix(".")
    data = io.BytesIO()
    # Without a date, and with names that do not vary, equal answers make equal files; `$` in a name is no formula.
    with mpl.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none", "text.parse_math": False}):
        draw().savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    with storage_errors("plot", plot):
        write_among_others(plot, data.getvalue())
    if not is_silent:
        out.print(f"wrote {escape(str(plot))}", soft_wrap=True)
