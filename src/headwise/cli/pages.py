"""Web pages and plots that commands write beside what they print: refused before any work, written after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headwise.base.pages import BLUE, GREY, ORANGE, Draw, as_file, label_logarithms, new_figure, refuse_no_matplotlib
from headwise.cli.app import out
from headwise.errors import ArgumentError, HeadwiseError, naming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwise.costs.formulas import Comparison
    from headwise.costs.prediction import Device, Prediction
    from headwise.decide.advice import Advice, Measured, Question
    from headwise.decide.report import Section
    from headwise.models.specs import ModelSpec
    from headwise.study.audit import MechanismBench

Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a web page.")]


def refuse_no_page(html: Path | None, *, has_plots: bool = True) -> None:
    """Refuse a page that cannot be made or written, before any work; nothing where none is asked for."""
    from headwise.base.disk import refuse_no_file

    if html is not None:
        if has_plots:
            refuse_no_matplotlib("html", str(html))
        refuse_no_file("html", html)


def write_page(html: Path, text: str, *, is_silent: bool = False) -> None:
    """Write a page in one step, so that no half of it is left, and say so."""
    _write("html", html, text.encode(), is_silent=is_silent)


def _write(option: str, file: Path, content: bytes, *, is_silent: bool) -> None:
    from headwise.base.checksums import write_among_others
    from headwise.base.disk import storage_errors

    with storage_errors(option, file):
        write_among_others(file, content)
    if not is_silent:
        out.print(f"wrote {escape(str(file))}", soft_wrap=True)


def first_question(model: ModelSpec, *, context: int = 4096, batch: int = 1, dtype: str = "bfloat16") -> Question:
    """What a page begins with where a command names no device; its reader may choose another."""
    from headwise.costs.prediction import Pass, device
    from headwise.decide.advice import Question
    from headwise.decide.report import DEFAULT_HARDWARE

    most = model.body.positions if model.body is not None and model.body.positions else context
    with naming(total="context"):
        step = Pass(batch=batch, total=min(context, most), dtype=dtype)
    return Question(hardware=device(DEFAULT_HARDWARE), step=step)


def model_page(
    source: str,
    model: ModelSpec,
    question: Question,
    *,
    measured: Mapping[str, Measured] | None = None,
    documents: Sequence[Mapping[str, Any]] = (),
    hardware: Mapping[str, Device] | None = None,
) -> str:
    """The page of a model with the results of a command below it; of results alone where its body is not known."""
    from headwise import __version__
    from headwise.decide.report import measured_steps, page, page_data, sections

    results: list[Section] = [section for document in documents for section in sections(document)]
    notes: list[str] = []
    try:
        found = page_data(
            model, question, measured or {}, source=source, hardware=hardware, steps=measured_steps(documents, source)
        )
    except HeadwiseError as error:
        if not results:
            raise
        notes, found = [f"the model is not shown: {error}"], None
    return page(found, results, title="" if found else Path(source).name, notes=notes, version=__version__)


def advice_figure(advice: Advice) -> Figure:
    """Every option's step time and known loss over its cache; hollow where the loss is predicted."""
    from headwise.decide.report.plots import place_option, quality

    figure, (times, losses) = new_figure(10, 4.6, 2)
    for option in advice.options:
        place_option(times, option, option.decode_seconds * 1e3, is_best=option is advice.best)
    label_logarithms(times.xaxis, "{x:g}")
    times.set_ylim(bottom=0)
    times.set_ylabel("predicted decode step, ms")
    times.set_title("orange: recommended; grey: refused", fontsize=9)
    quality(losses, advice.options, advice.question.max_quality_loss)
    hollow = "; hollow: predicted" * any(option.is_predicted for option in advice.options)
    losses.set_title(f"named: what no other option dominates{hollow}", fontsize=9)
    step, device = advice.question.step, advice.question.hardware.label
    figure.suptitle(f"{advice.source}, {step.batch:,} × {step.total:,} tokens, {device}", fontsize=11)
    return figure


def comparison_figure(comparison: Comparison) -> Figure:
    """The cache and a decoded token's FLOPs of each mechanism; the model itself in another colour."""
    rows = comparison.rows
    figure, (caches, flops) = new_figure(10, 1.4 + 0.24 * len(rows), 2, shares_y=True)
    colours = [ORANGE if row.is_source else BLUE for row in rows]
    names = [row.label for row in rows]
    _bars(caches, names, [row.kv_bytes / 2**20 for row in rows], colours, "cache, MiB")
    _bars(flops, names, [row.decode_flops / 1e9 for row in rows], colours, "attention of one more token, GFLOP")
    size = f"{comparison.context:,} tokens × {comparison.batch:,}, {comparison.dtype}"
    figure.suptitle(f"{comparison.source}, {size}; orange: the model itself", fontsize=11)
    return figure


def prediction_figure(prediction: Prediction) -> Figure:
    """Where the time of a decode step and of a prompt goes, operator by operator."""
    step = prediction.step
    figure, panels = new_figure(10, 1.6 + 0.24 * len(prediction.decode), 2)
    colours = {"memory": BLUE, "compute": ORANGE}
    titles = (f"a decode step of {step.batch:,} sequences, ms", f"a prompt of {step.total:,} tokens, ms")
    for axes, timed, title in zip(panels, (prediction.decode, prediction.prefill), titles, strict=True):
        ordered = sorted(timed, key=lambda one: -one.seconds)
        names, milliseconds = [one.name for one in ordered], [1e3 * one.seconds for one in ordered]
        _bars(axes, names, milliseconds, [colours.get(one.bound, GREY) for one in ordered], title)
    figure.suptitle(
        f"{prediction.source}, {prediction.device.label}; blue: bound by bytes, orange: by FLOPs, grey: by calls",
        fontsize=11,
    )
    return figure


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str], title: str) -> None:
    """Horizontal bars from the top down, each with its name."""
    places = range(len(names))
    axes.barh(places, values, color=colours)
    axes.set_yticks(places, names)
    if not axes.yaxis_inverted():  # panels may share the axis
        axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(title, fontsize=9)


def mechanisms_figure(report: MechanismBench) -> Figure:
    """Each mechanism's time, cache and similarity against the length."""
    figure, (times, memory, errors) = new_figure(12, 4.2, 3)
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
        axes.legend(fontsize=7)
    for axes in (times, memory):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    figure.suptitle(
        f"E = {report.hidden_size}, {report.num_heads} heads, {report.dtype}, {report.device}", fontsize=10
    )
    return figure


Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it: FILE.png or FILE.svg.")]

_KINDS = ("png", "svg")


def refuse_no_plot(plot: Path | None) -> None:
    """Refuse a picture that cannot be drawn or written, before any work; nothing where none is asked for."""
    from headwise.base.disk import refuse_no_file

    if plot is None:
        return
    if plot.suffix.lower().removeprefix(".") not in _KINDS:
        raise ArgumentError("plot", str(plot), f"must end in .{' or .'.join(_KINDS)}")
    refuse_no_matplotlib("plot", str(plot))
    refuse_no_file("plot", plot)


def write_plot(plot: Path, draw: Draw, *, is_silent: bool = False) -> None:
    """Draw a picture and write it in one step, so that no half of it is left.

    Args:
        plot: the file.
        draw: makes the figure.
        is_silent: whether nothing is printed.
    """
    data = as_file(draw, plot.suffix.lower().removeprefix("."))
    _write("plot", plot, data, is_silent=is_silent)
