"""The command-line application, and what its commands share: JSON on stdout, progress on stderr, tables, units."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from headwise.base.documents import finite
from headwise.base.printable import printable_json
from headwise.base.progress import Progress, TimeLeft
from headwise.cli.printable import PrintableConsole, held_back

DECIDE, CHANGE, MEASURE, SERVE, STUDY = "Decide", "Change", "Measure", "Serve", "Study"
"""The panels of ``headwise --help``, one of which each command names where it is registered."""

ORDER = (
    *("inspect", "compare", "complexity", "predict", "advise", "design", "guide", "report"),
    *("prepare", "convert", "heal", "frontier", "migrate", "calibrate", "sample"),
    *("evaluate", "verify", "generate", "profile", "doctor"),
    *("engines", "export", "serve"),
    *("audit", "bench", "count", "demo"),
)
"""All commands as ``headwise --help`` and the reference list them, and so the panels, by their first commands."""


class _Ordered(TyperGroup):
    """Commands that are listed in `ORDER`, and not as they are registered; one that it leaves out is listed last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    name="headwise",
    cls=_Ordered,
    help="Choose, convert, run and prove attention.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


out = PrintableConsole(highlight=False)
err = PrintableConsole(stderr=True, highlight=False)

SOURCES = "A model folder, a .gguf, smollm2-135m, or hf://owner/name."
SOURCES_OR_NAME = "A model folder, a .gguf, a config.json, a catalog name, smollm2-135m, or hf://owner/name."

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]

_PATIENCE = 2.0
"""Seconds until a progress bar appears."""


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Choose, convert, run and prove attention."""
    if version:
        from headwise import __version__

        out.print(f"headwise {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


LINE = 100
"""The most columns of a line of text; what is to be pasted, and names, may be longer."""


def say(text: str, *, indent: str = "", bold: int = 0) -> None:
    """Print a paragraph in lines of at most `LINE` columns, those below the first one indented.

    Command lines, which begin with two spaces, stay in one piece.

    Args:
        text: one paragraph.
        indent: the text before the first line; the others have two spaces more.
        bold: the number of characters at the beginning that are bold.
    """
    if not text.startswith("  "):
        wrapped = textwrap.wrap(
            text,
            LINE,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = "\n".join(wrapped)
    if bold:
        out.print(f"[bold]{escape(text[:bold])}[/bold]{escape(text[bold:])}", soft_wrap=True)
    else:
        out.print(text, markup=False, soft_wrap=True)


def emit(value: dict[str, Any]) -> None:
    """Print a JSON document, control characters escaped; infinities and NaN, which JSON cannot hold, become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a terminal without Unicode, or a file name that is not UTF-8
        text = json.dumps(finite(value), indent=2, allow_nan=False)
    sys.stdout.write(printable_json(text) + "\n")


class StoppedError(Exception):
    """An interruption with a message about the interrupted work; typer drops the message of a KeyboardInterrupt."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr once the work has taken two seconds; libraries print nothing meanwhile."""
    try:
        with held_back(err), _bar() as report:
            yield report
    except KeyboardInterrupt as error:
        if notes := getattr(error, "__notes__", ()):
            raise StoppedError(notes[0]) from None
        raise


class _Tasks:
    """Progress that is shown as one bar for each stage."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._tasks = bar, dict[str, Any]()
        self._training = dict[str, tuple[str, str]]()  # of a stage: how it goes, and the time that is left

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total, left="")
        elif done == 0:
            self._bar.reset(self._tasks[stage])  # the stage begins again with another model
        self._bar.update(self._tasks[stage], completed=done, total=total, left=self._left(stage, done, total))

    def report_training(self, stage: str, *, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """See `TrainingProgress`."""
        goes, left = f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", f", {duration(seconds_left)} left"
        self._training[stage] = goes, left
        self._bar.update(self._tasks[stage], left=goes + left)

    def _left(self, stage: str, done: int, total: int) -> str:
        """What is said of the time that is left, and of how a training goes."""
        if done == 0:  # it begins, or begins again with another model
            self._training.pop(stage, None)
        goes, left = self._training.get(stage, ("", ""))
        return goes + left if done < total else goes


class _TimedTasks(_Tasks):
    """Bars of stages, of which the last one says how much time is left."""

    _time: TimeLeft | None = None

    def expect(self, seconds: Mapping[str, float]) -> None:
        """See `TimedProgress`."""
        self._time = TimeLeft(seconds)

    def _left(self, stage: str, done: int, total: int) -> str:
        if self._time is None or stage in self._training:
            return super()._left(stage, done, total)
        self._time.report(stage, done, total)
        for task in self._tasks.values():
            self._bar.update(task, left="")
        return f"{duration(self._time.seconds)} left" if self._time.seconds else ""


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    quiet_transformers()
    left = TextColumn("{task.fields[left]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
    bar = Bar(*columns, console=err, redirect_stdout=False, redirect_stderr=False)
    patience = threading.Timer(_PATIENCE, bar.start)
    patience.daemon = True
    patience.start()
    # Only who watches is told how much time is left of a conversion, because the estimate takes time itself.
    report = _TimedTasks(bar) if err.is_terminal else _Tasks(bar)

    try:
        yield report
    except BaseException:
        _stop(patience)
        # Only the error should be visible; stopping the bar itself would print an empty line before it.
        bar.live.transient = True
        bar.live.stop()
        raise
    finally:
        _stop(patience)
        if bar.live.is_started:
            bar.stop()


def _stop(timer: threading.Timer) -> None:
    """Cancel a timer, and wait for the end of its function if that is already running."""
    timer.cancel()
    timer.join()


def quiet_transformers() -> None:
    """Keep transformers' progress bars and warnings off stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def duration(seconds: float) -> str:
    """Format a time roughly, such as ``2 min``."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def beyond(trained: int | None, context: int) -> list[str]:
    """A note, where a context is longer than those that a model was made for."""
    is_beyond = trained is not None and trained < context
    note = f"note: the model was made for {trained:,} tokens, and {context:,} are asked for: engines may refuse them"
    return [note] if is_beyond else []
