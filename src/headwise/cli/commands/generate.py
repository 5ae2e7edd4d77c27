"""``headwise generate``: continue a text."""

from __future__ import annotations

from typing import Annotated

import typer

from headwise.base.printable import printable
from headwise.cli.app import MEASURE, SOURCES, Json, app, emit, progress_bar


@app.command(
    epilog='Example: headwise generate ./smollm2-mla --prompt "The capital of France is"', rich_help_panel=MEASURE
)
def generate(
    model: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    prompt: Annotated[str, typer.Option(help="The text to continue.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to add.")] = 40,
    dtype: Annotated[str | None, typer.Option(help="Dtype to run in; the stored one when left out.")] = None,
    device: Annotated[str | None, typer.Option(help="Device to run on, such as cuda; the CPU when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt greedily."""
    with progress_bar() as progress:
        from headwise.runtime.hf import generate as generate_text

        progress("generating", 0, 1)
        continuation = generate_text(model, prompt, max_new_tokens=max_new_tokens, dtype=dtype, device=device)
        progress("generating", 1, 1)
    if as_json:
        emit(continuation.to_dict())
        return
    typer.echo(printable(prompt + continuation.text))
