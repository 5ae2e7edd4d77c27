"""Pictures that commands write into a file beside what they print: PNG or SVG, by matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from headwise.cli.app import out
from headwise.errors import ArgumentError, MissingExtraError

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
        draw: makes the figure, of matplotlib; see `headwise.cli.figures`.
        is_silent: whether nothing is printed.
    """
    import matplotlib as mpl

    from headwise.base.disk import clearly, write_among_others

    kind = plot.suffix.lower().removeprefix(".")
    data = io.BytesIO()
    # Without a date, and with names that do not vary, equal answers make equal files; `$` in a name is no formula.
    with mpl.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none", "text.parse_math": False}):
        draw().savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    with clearly("plot", plot):
        write_among_others(plot, data.getvalue())
    if not is_silent:
        out.print(f"wrote {escape(str(plot))}", soft_wrap=True)
