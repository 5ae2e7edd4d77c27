"""``headwise migrate``: the smallest cache whose loss is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.options.convert import MigrateOptions
from headwise.base.tables import Table
from headwise.cli.app import CHANGE, SOURCES, Json, app, emit, out, progress_bar
from headwise.cli.options import takes_options
from headwise.cli.torchrun import as_one_process

if TYPE_CHECKING:
    from headwise.conversion.migrate import Migration


@app.command(
    epilog="Example: headwise migrate smollm2-135m ./out --max-quality-loss 0.05 --calibrate a.txt --evaluate b.txt",
    rich_help_panel=CHANGE,
)
@takes_options(MigrateOptions)
def migrate(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    options: MigrateOptions,
    as_json: Json = False,
) -> None:
    """Find the smallest cache whose loss is allowed: verify, convert, train, verify."""
    with as_one_process(), progress_bar() as progress:
        from headwise.conversion.migrate import migrate as migrate_source

        report = migrate_source(source, output, options, progress=progress)
    if as_json:
        emit(report.to_dict())
    else:
        _show(report)
    if report.chosen is None:
        raise typer.Exit(1)


def _show(report: Migration) -> None:
    table = Table(["size", "B/token", "of the cache", "loss", "KL", "allowed"])
    for step in report.steps:
        table.add(
            f"{step.target}{', trained' if step.healed else ''}",
            f"{step.cache_bytes_per_token:,.0f}",
            f"{step.cache_bytes_per_token / report.cache_bytes_per_token:.1%}",
            f"{step.loss:+.2%}",
            f"{step.kl:.4f}",
            "yes" if step.is_allowed else "no",
        )
    out.print_table(table)
    if report.chosen is not None:
        chosen = report.chosen
        size = f"{chosen.cache_bytes_per_token:,.0f} B a token at a loss of {chosen.loss:.2%}"
        out.print(f"[bold]{chosen.target}[/bold] is in {escape(report.output)}: {size}")
        return
    nearest = report.nearest
    allowed = f"{report.max_quality_loss:.2%}"
    out.print(
        f"no size that was tried loses at most {allowed}; {nearest.target} came nearest with {nearest.loss:.2%}"
    )
    goes_on = "the same command goes on from there with a larger --max-quality-loss or another --target"
    out.print(f"{report.kept} has what was made: {goes_on}", markup=False, soft_wrap=True)
