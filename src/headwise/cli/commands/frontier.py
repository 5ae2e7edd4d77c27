"""``headwise frontier``: what a model should be converted to."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.cli.app import (
    SOURCES,
    CalibrationTokens,
    CalibrationWindow,
    Json,
    app,
    emit,
    numbers_table,
    out,
    progress_bar,
)


@app.command(epilog="Example: headwise frontier smollm2-135m --calibrate study.txt --evaluate exam.txt --output out")
def frontier(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[str, typer.Option(metavar="DIR", help="For the table, the JSON and the plot.")],
    calibrate: Annotated[
        list[str],
        typer.Option(metavar="TEXT", help="To calibrate on; give it again for a mixture.", show_default=False),
    ],
    evaluate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="To measure on, may be repeated; when left out, text beyond the calibration's."
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="mla:F, mla:R+P, gqa:K, mqa or mha, may be repeated; a ladder when left out."),
    ] = None,
    methods: Annotated[
        bool, typer.Option("--methods", help="At each target, every stage left out in turn, and published methods.")
    ] = False,
    calibration_tokens: CalibrationTokens = None,
    calibration_window: CalibrationWindow = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens a window that is measured; 2048 or the positions when left out.")
    ] = None,
    windows: Annotated[int, typer.Option(help="How many windows of each text.")] = 6,
    dtype: Annotated[str | None, typer.Option(help="Of the conversions; the source's when left out.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the converted models in DIR/models.")] = False,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Write the page, which needs plotly.")] = True,
    as_json: Json = False,
) -> None:
    """Convert to a ladder of targets and measure each: quality against cache, as a table, JSON and a plot."""
    with progress_bar() as progress:
        from headwise.frontiers import frontier as climb
        from headwise.frontiers.page import how, tables, title
        from headwise.frontiers.points import advice

        found = climb(
            source,
            output,
            calibrate=calibrate,
            evaluate=evaluate,
            targets=target or (),
            methods=methods,
            calibration_tokens=calibration_tokens,
            calibration_window=calibration_window,
            window=window,
            windows=windows,
            dtype=dtype,
            keep=keep,
            plot=plot,
            progress=progress,
        )
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
    name = "methods" if methods else "frontier"
    out.print(f"{escape(output)}: {name}.json, {name}.md{f', {name}.html' if plot else ''}")


def _narrow(row: tuple[str, ...]) -> tuple[str, ...]:
    """Without what the converted layers are called: the target says enough."""
    return (row[0], *row[2:])
