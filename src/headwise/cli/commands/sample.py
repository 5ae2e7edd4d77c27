"""``headwise sample``: let a model write text to calibrate and train on."""

from __future__ import annotations

from typing import Annotated

import typer

from headwise.base.options.heal import SampleOptions
from headwise.cli.app import CHANGE, SOURCES, Json, app, emit, out, progress_bar
from headwise.cli.options import takes_options
from headwise.cli.torchrun import as_one_process


@app.command(epilog="Example: headwise sample smollm2-135m own.txt --tokens 200000", rich_help_panel=CHANGE)
@takes_options(SampleOptions)
def sample(
    model: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[str, typer.Argument(metavar="FILE", help="The text file to write.", show_default=False)],
    options: SampleOptions,
    as_json: Json = False,
) -> None:
    """Let a model write text, to calibrate and train on where none is at hand."""
    with as_one_process(), progress_bar() as progress:
        from headwise.measure.texts import sample as write_sample

        written = write_sample(model, output, options, progress=progress)
    if as_json:
        emit(written.to_dict())
        return
    speed = f"{written.tokens / max(written.seconds, 1e-9):,.0f} tokens/s"
    counts = f"{written.documents:,} documents, {written.tokens:,} tokens"
    out.print(f"{counts} in {written.output}; {written.seconds:,.0f} s, {speed}", markup=False)
