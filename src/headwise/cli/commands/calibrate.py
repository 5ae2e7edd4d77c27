"""``headwise calibrate``: collect the statistics of a model on a text once, for any number of conversions."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.base.options import CalibrateOptions
from headwise.base.tables import bytes_text
from headwise.cli.app import CHANGE, SOURCES, Json, app, emit, out, progress_bar
from headwise.cli.options import takes_options
from headwise.cli.torchrun import as_one_process


@app.command(
    epilog="Example: headwise calibrate smollm2-135m ./smollm2-statistics --calibrate text.txt",
    rich_help_panel=CHANGE,
)
@takes_options(CalibrateOptions)
def calibrate(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    options: CalibrateOptions,
    as_json: Json = False,
) -> None:
    """Collect a model's statistics on a text, for conversions to any target with convert --statistics OUT."""
    with as_one_process(), progress_bar() as progress:
        from headwise.conversion import calibrate as collect

        report = collect(source, output, options, progress=progress)
    if as_json:
        emit(report.to_dict())
        return
    tokens = f"calibrated on {report.tokens:,} tokens, {report.layers} layers"
    out.print(f"[bold]{escape(source)}[/bold] {tokens}, in {escape(output)}")
    out.print(f"on disk  {bytes_text(report.disk_bytes)}")
    out.print(f"{report.seconds:.1f} s, peak memory {bytes_text(report.peak_rss_bytes)}")
