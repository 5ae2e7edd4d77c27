"""``headwise frontier``: convert a model to many targets, and compare quality with cache size."""

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
    """Quantise the cache, convert, or both, at several sizes: quality against cache, as a table, JSON and a plot."""
    with progress_bar() as progress:
        from headwise.frontiers import frontier as measure
        from headwise.frontiers.page import how, tables, title
        from headwise.frontiers.points import advice

        result = measure(source, output, options, progress=progress)
    if as_json:
        emit(result.to_dict())
        return
    out.print(f"[bold]{escape(title(result))}[/bold]")
    for headings, *rows in tables(result):
        implied = 1 if result.methods else 2  # columns that the target implies, left out to fit a terminal
        table = numbers_table(*(escape(heading) for heading in _without(headings, implied)))
        for column, heading in zip(table.columns, _without(headings, implied), strict=True):
            # Headings with × hold the name of a text, which may be long.
            column.no_wrap, column.overflow = not heading.startswith("×"), "fold"
        for row in rows:
            table.add_row(*map(escape, _without(row, implied)))
        out.print(table)
    for line in advice(result):
        out.print(line, markup=False)
    out.print(how(result), markup=False, style="dim")
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    name = "methods" if options.methods else "frontier"
    out.print(f"{escape(output)}: {name}.json, {name}.md{f', {name}.html' if options.plot else ''}")


def _without(row: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Leave out so many columns after the first."""
    return (row[0], *row[1 + count :])
