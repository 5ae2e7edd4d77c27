"""``headwise serve``: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headwise.cli.app import SERVE, SOURCES, Json, app, emit, say


@app.command(epilog="Example: headwise serve ./smollm2-mla --port 8000", rich_help_panel=SERVE)
def serve(
    model: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen at; 0 for any that is free.")] = 8000,
    dtype: Annotated[str | None, typer.Option(help="Dtype to run in; the stored one when left out.")] = None,
    device: Annotated[str | None, typer.Option(help="Device to run on, such as cuda; the CPU when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Serve a model over HTTP as OpenAI's interface: completions, chat and responses, one request at a time."""
    from headwise.serving.serve import serve as run

    def ready(url: str) -> None:
        if as_json:
            emit({"model": model, "url": url})
        else:
            say(f"{model} is served at {url}")
        sys.stdout.flush()  # a program that reads a pipe learns the port now, not when the server ends

    run(model, host=host, port=port, dtype=dtype, device=device, ready=ready)
