"""``headwise calibrate``: run a model on a text once, and keep its statistics for any number of conversions."""

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
    bytes_text,
    emit,
    out,
    progress_bar,
)
from headwise.cli.torchrun import as_one_process


@app.command(epilog="Example: headwise calibrate smollm2-135m ./smollm2-statistics --calibrate text.txt")
def calibrate(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    text: Annotated[
        list[str],
        typer.Option(
            "--calibrate",
            metavar="TEXT",
            help="A text to calibrate on; may be repeated, for a mixture.",
            show_default=False,
        ),
    ],
    calibration_tokens: CalibrationTokens = None,
    calibration_window: CalibrationWindow = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace statistics at OUT.")] = False,
    as_json: Json = False,
) -> None:
    """Keep the statistics of a model that conversions to any target use: convert --statistics OUT."""
    with as_one_process(), progress_bar() as progress:
        from headwise.conversion import calibrate as run_calibration

        done = run_calibration(
            source,
            output,
            calibrate=text,
            calibration_tokens=calibration_tokens,
            calibration_window=calibration_window,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        emit(done.to_dict())
        return
    size = f"{done.tokens:,} tokens, {done.layers} layers"
    out.print(f"[bold]{escape(source)}[/bold] calibrated on {size}, in {escape(output)}")
    out.print(f"on disk  {bytes_text(done.disk_bytes)}")
    out.print(f"{done.seconds:.1f} s, peak memory {bytes_text(done.peak_rss_bytes)}")
