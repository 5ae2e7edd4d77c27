"""``headwise evaluate``: what a conversion did to a model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.cli.app import SOURCES, Json, app, emit, numbers_table, out, progress_bar


@app.command(epilog="Example: headwise evaluate ./smollm2-mla --against smollm2-135m --text text.txt --windows 6")
def evaluate(
    model: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    text: Annotated[str, typer.Option(metavar="FILE", help="UTF-8 text to predict.", show_default=False)],
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="The reference, such as what it was converted from.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens a window; 2048, or the model's positions if fewer, when left out.")
    ] = None,
    windows: Annotated[int, typer.Option(help="How many windows, from the beginning.")] = 6,
    context: Annotated[
        int | None, typer.Option(help="Tokens in the cache while decoding is timed; 512, or as many as fit.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="To run in; as stored when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on text: perplexity, divergence, agreement, bytes of cache, time a token."""
    with progress_bar() as progress:
        from headwise.evaluation import evaluate as evaluate_model

        found = evaluate_model(
            model,
            text=text,
            against=against,
            window=window,
            windows=windows,
            context=context,
            dtype=dtype,
            progress=progress,
        )
    if as_json:
        emit(found.to_dict())
        return
    how = f"windows of {found.window}; {found.dtype}, {found.threads} threads"
    out.print(f"{found.tokens:,} tokens of {escape(text)}, {how}")
    table = numbers_table("", "model", "reference") if against is not None else numbers_table("", "model")
    rows: list[tuple[str, float, float | None, str]] = [
        ("perplexity", found.perplexity, found.reference_perplexity, ".3f"),
        ("cache B/token", found.cache_bytes_per_token, found.reference_cache_bytes_per_token, ",.0f"),
        (f"decode ms/token at {found.context}", found.decode_ms, found.reference_decode_ms, ".1f"),
    ]
    for name, own, reference, style in rows:
        table.add_row(name, format(own, style), *([] if reference is None else [format(reference, style)]))
    out.print(table)
    if against is not None:
        out.print(
            f"perplexity ratio {found.perplexity_ratio:.4f} · KL {found.kl:.4f} nats a token"
            f" · same first choice {found.top1_agreement:.1%}"
        )
