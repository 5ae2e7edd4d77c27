"""``headwise export``: a model folder as one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from headwise.base.tables import bytes_text
from headwise.cli.app import SERVE, SOURCES, Json, app, emit, out, progress_bar


@app.command(epilog="Example: headwise export ./half half.gguf --outtype q8_0", rich_help_panel=SERVE)
def export(
    source: Annotated[str, typer.Argument(help=SOURCES)],
    output: Annotated[Path, typer.Argument(help="The .gguf file to write.")],
    kind: Annotated[
        str | None,
        typer.Option("--outtype", help="Of matrices: f32, f16, bf16 or q8_0; when left out, the source's own."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model as one GGUF file, which llama.cpp loads."""
    from headwise.conversion import export_gguf
    from headwise.models.checkpoints import open_checkpoint

    with progress_bar() as progress:
        notes = open_checkpoint(source).notes
        size = export_gguf(source, output, outtype=kind, overwrite=overwrite, progress=progress)  # type: ignore[arg-type]
    if as_json:
        emit({"source": source, "output": str(output), "bytes": size, "notes": list(notes)})
        return
    out.print(f"[bold]{escape(source)}[/bold] → {escape(str(output))}, {bytes_text(size)}", soft_wrap=True)
    for note in notes:
        out.print(f"note: {note}", markup=False)
