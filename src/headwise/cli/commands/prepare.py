"""``headwise prepare``: a model that loses less in an engine's own small cache."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.cli.app import SOURCES, Json, app, emit, out, progress_bar
from headwise.cli.options import takes_options
from headwise.options.prepare import PrepareOptions


@app.command(epilog="Example: headwise prepare model.gguf prepared.gguf --for llama.cpp:q4_0")
@takes_options(PrepareOptions)
def prepare(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[
        str, typer.Argument(metavar="OUT", help="The .gguf, or the folder, to write.", show_default=False)
    ],
    options: PrepareOptions,
    as_json: Json = False,
) -> None:
    """Change a model's queries and keys, and nothing that it computes, so that an engine's small cache loses less."""
    from headwise.preparation import prepare as write_prepared

    with progress_bar() as progress:
        made = write_prepared(source, output, options, progress=progress)
    if as_json:
        emit(made.to_dict())
        return
    out.print(f"[bold]{escape(source)}[/bold] → {escape(made.output)}, {made.seconds:,.0f} s", soft_wrap=True)
    for cache in made.cache:
        ratios = {layer.layer: layer.loss[cache] for layer in made.layers if cache in layer.loss}
        least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        out.print(
            f"{cache}: scores lose ×{ratios[least]:.3f} of what they lost in layer {least}, ×{ratios[most]:.3f} in"
            f" layer {most}",
            markup=False,
        )
    for note in made.notes:
        out.print(f"note: {note}", markup=False)
