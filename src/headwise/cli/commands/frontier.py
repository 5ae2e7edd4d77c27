"""``headwise frontier``: convert a model to many targets, and compare quality with cache size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.options import FrontierOptions, QuickFrontierOptions, declarations
from headwise.base.tables import Table
from headwise.cli.app import CHANGE, SOURCES, Json, app, duration, emit, out, progress_bar
from headwise.cli.options import takes_options
from headwise.cli.pages import Html, first_question, model_page, refuse_no_page, write_page
from headwise.cli.torchrun import as_one_process
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.conversion.frontiers.points import Frontier


@app.command(
    epilog="Example: headwise frontier smollm2-135m --calibrate study.txt --evaluate exam.txt --output out",
    rich_help_panel=CHANGE,
)
@takes_options(FrontierOptions)
def frontier(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    options: FrontierOptions,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="For the table, the JSON and the plot, required; with --quick for predicted.json, if anything.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Predict what every format of the cache and every engine's own cache loses, from one pass over 2,048"
            " tokens of the text, and measure nothing. --target chooses formats.",
        ),
    ] = False,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Quantise the cache, convert, or both, at several sizes: quality against cache, as a table, JSON and a plot."""
    if quick:
        _refuse_measurement_options(options, {"html": html})
        _quick(source, output, options, as_json=as_json)
        return
    if output is None:
        raise ArgumentError("output", None, "is required, unless --quick asks for predictions alone")
    refuse_no_page(html)
    with as_one_process(), progress_bar() as progress:
        from headwise.base.processes import process_index
        from headwise.conversion.frontiers import frontier as measure
        from headwise.conversion.frontiers.page import how, tables, title
        from headwise.conversion.frontiers.points import advice

        result = measure(source, output, options, progress=progress)
        is_first = process_index() == 0
    if not is_first:
        return
    if html is not None:
        _write_page(html, source, result, is_silent=as_json)
    if as_json:
        emit(result.to_dict())
        return
    out.print(f"[bold]{escape(title(result))}[/bold]")
    implied = 1 if result.methods else 2  # columns that the target implies, left out to fit a terminal
    for table in tables(result):
        rows = [_without(row, implied) for row in table.rows]
        headings = _without(table.heading, implied)
        # Headings with × hold the name of a text, which may be long.
        folded = [index for index, heading in enumerate(headings) if heading.startswith("×")]
        out.print_table(Table(headings, rows, folded=folded))
    for line in advice(result):
        out.print(line, markup=False)
    out.print(how(result), markup=False, style="dim")
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    name = "methods" if options.methods else "frontier"
    out.print(f"{escape(output)}: {name}.json, {name}.md{f', {name}.html' if options.plot else ''}")


def _refuse_measurement_options(options: FrontierOptions, others: Mapping[str, str | Path | None]) -> None:
    """Refuse options that only measurements take.

    Args:
        options: the options of the command.
        others: the command's other parameters, by name.

    Raises:
        ArgumentError: one of these options is set.
    """
    quick, declared = declarations(QuickFrontierOptions), declarations(FrontierOptions)
    changed = {
        name: getattr(options, name) for name, one in declared.items() if getattr(options, name) != one.default
    }
    for name, value in (changed | {name: value for name, value in others.items() if value is not None}).items():
        if name not in quick:
            raise ArgumentError(name, value, "does not go with --quick, which predicts and measures nothing")


def _quick(source: str, output: str | None, options: FrontierOptions, *, as_json: bool) -> None:
    """Print predictions, and write them where an output is named."""
    with progress_bar() as progress:
        from headwise.conversion.frontiers import quick_frontier

        own = {name: getattr(options, name) for name in declarations(QuickFrontierOptions)}
        result = quick_frontier(source, QuickFrontierOptions(**own), output=output, progress=progress)
    if as_json:
        emit(result.to_dict())
        return
    table = Table(["format", "KL, nats", "cache", "bytes a token", "runs in"])
    for point in result.points:
        table.add(
            point.target,
            f"{point.kl:.2g}" if point.kl < 0.1 else f"{point.kl:.2f}",
            f"{100 * point.cache_fraction:.1f}%",
            f"{point.cache_bytes_per_token:,.0f}",
            point.runs_in,
        )
    out.print_table(table)
    out.print(f"predicted from {result.tokens:,} tokens in {duration(result.seconds)}; {result.error}", markup=False)
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    if output is not None:
        out.print(f"{escape(output)}: predicted.json")


def _write_page(html: Path, source: str, result: Frontier, *, is_silent: bool) -> None:
    """Write the page of the model with what was measured of it."""
    from headwise.decide.advice import USUAL_LOSS, read_points
    from headwise.models.specs import read_spec

    model, document = read_spec(source), result.to_dict()
    measured = {} if result.methods else read_points(document, model)
    question = replace(first_question(model), max_quality_loss=USUAL_LOSS, is_usual=True)
    page = model_page(source, model, question, measured=measured, documents=[document])
    write_page(html, page, is_silent=is_silent)


def _without(row: Sequence[str], count: int) -> tuple[str, ...]:
    """Leave out ``count`` columns after the first."""
    return (row[0], *row[1 + count :])
