"""``headwise frontier``: what a model should be converted to."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.cli.app import SOURCES, Json, app, emit, numbers_table, out, progress_bar
from headwise.cli.options import takes_options
from headwise.options import FrontierOptions


@app.command(epilog="Example: headwise frontier smollm2-135m --calibrate study.txt --evaluate exam.txt --output out")
@takes_options(FrontierOptions)
def frontier(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[str, typer.Option(metavar="DIR", help="For the table, the JSON and the plot.")],
    options: FrontierOptions,
    as_json: Json = False,
) -> None:
    """Convert to a ladder of targets and measure each: quality against cache, as a table, JSON and a plot."""
    with progress_bar() as progress:
        from headwise.frontiers import frontier as measure
        from headwise.frontiers.page import how, tables, title
        from headwise.frontiers.points import advice

        found = measure(source, output, options, progress=progress)
    if as_json:
        emit(found.to_dict())
        return
    out.print(f"[bold]{escape(title(found))}[/bold]")
    for heads, *rows in tables(found):
        shown = numbers_table(*(escape(head) for head in _narrow(heads)))
        for column, head in zip(shown.columns, _narrow(heads), strict=True):
            column.no_wrap, column.overflow = not head.startswith("×"), "fold"  # of a text, whose name may be long
        for row in rows:
            shown.add_row(*map(escape, _narrow(row)))
        out.print(shown)
    for line in advice(found):
        out.print(line, markup=False)
    out.print(how(found), markup=False, style="dim")
    for note in found.notes:
        out.print(f"note: {note}", markup=False)
    name = "methods" if options.methods else "frontier"
    out.print(f"{escape(output)}: {name}.json, {name}.md{f', {name}.html' if options.plot else ''}")


def _narrow(row: tuple[str, ...]) -> tuple[str, ...]:
    """Without what the converted layers are called: the target says enough."""
    return (row[0], *row[2:])
