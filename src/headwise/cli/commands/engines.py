"""``headwise engines``: which engines serve a model, and what to write for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.cli.app import SERVE, SOURCES, Json, app, emit, out, say

if TYPE_CHECKING:
    from headwise.serving.engines import Verdict


_SHOWN = 2
"""The most caches of an engine that are shown."""


@app.command(epilog="Example: headwise engines ./half", rich_help_panel=SERVE)
def engines(
    source: Annotated[str, typer.Argument(help=SOURCES)],
    tensor_parallel: Annotated[int, typer.Option(help="Devices that are to share out the model's heads.")] = 1,
    as_json: Json = False,
) -> None:
    """Say which engines serve a model, why others do not, and what to write for them. Nothing is run."""
    from headwise.serving.engines import engines as check

    report = check(source, tensor_parallel=tensor_parallel)
    if as_json:
        emit(report.to_dict())
        return
    out.print(f"[bold]{escape(source)}[/bold]: {report.model_type}, {report.label}")
    for verdict in report.verdicts:
        here = f", {verdict.installed} is installed" if verdict.installed else ""
        out.print()
        out.print(f"{verdict.engine}: {_answer(verdict)} ({verdict.checked}{here})", markup=False)
        for line in filter(None, (verdict.why, verdict.instead)):
            say(line, indent="  ")
        if verdict.command:
            say(f"  {verdict.command}")
        for line in filter(None, (_caches(verdict), verdict.caution)):
            say(line, indent="  ")


def _caches(verdict: Verdict) -> str | None:
    """The first few of an engine's own small caches; headwise advise lists all of them."""
    shown, left = verdict.caches[:_SHOWN], len(verdict.caches[_SHOWN:])
    return f"with a small cache: {' or '.join(shown)}{f', and {left} more' if left else ''}" if shown else None


def _answer(verdict: Verdict) -> str:
    """Whether an engine serves the folder: yes, no, or after an export, which takes seconds and changes nothing."""
    if verdict.serves:
        return "yes"
    return "after an export" if (verdict.instead or "").startswith("headwise export ") else "no"
