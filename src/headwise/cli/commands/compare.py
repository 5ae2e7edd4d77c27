"""``headwise compare``: the cost of a model with each mechanism, side by side."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer
from rich.markup import escape

from headwise.base.tables import Table, bytes_text, count_text
from headwise.cli.app import DECIDE, SOURCES_OR_NAME, Json, app, emit, out, progress_bar
from headwise.cli.pages import (
    Html,
    Plot,
    comparison_figure,
    first_question,
    model_page,
    refuse_no_page,
    refuse_no_plot,
    write_page,
    write_plot,
)


@app.command(epilog="Example: headwise compare llama-3-8b --context 32768 --batch 4", rich_help_panel=DECIDE)
def compare(
    source: Annotated[str, typer.Argument(help=SOURCES_OR_NAME, show_default=False)],
    context: Annotated[int, typer.Option(help="Tokens in the cache, and in the prefill.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    dtype: Annotated[str, typer.Option(help="The cache's dtype.")] = "bfloat16",
    match: Annotated[
        Literal["cache", "parameters"] | None,
        typer.Option(help="Compare each mechanism at the one size nearest the model's own cache or parameters."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also time one layer of each, in float32.")] = False,
    html: Html = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Compare the costs of mechanisms: cache, parameters, FLOPs, intensity. Reads only the config."""
    from headwise.costs.formulas import compare as compare_source

    refuse_no_page(html)
    refuse_no_plot(plot)
    comparison = compare_source(source, context=context, batch=batch, dtype=dtype, match=match)
    if measure:
        from headwise.measure.timing import measure_comparison

        with progress_bar() as progress:
            comparison = measure_comparison(comparison, progress=progress)
    if html is not None:
        from headwise.models.specs import read_spec

        model = read_spec(source)
        question = first_question(model, context=context, batch=batch, dtype=dtype)
        write_page(html, model_page(source, model, question, documents=[comparison.to_dict()]), is_silent=as_json)
    if plot is not None:
        write_plot(plot, partial(comparison_figure, comparison), is_silent=as_json)
    if as_json:
        emit(comparison.to_dict())
        return
    out.print(f"[bold]{escape(source)}[/bold] at {context:,} tokens × {batch}, {dtype} cache, causal")
    table = Table(["", "B/token", "cache", "params", "prefill", "decode", "FLOP/B"])
    convertible = [index for index, row in enumerate(comparison.rows) if row.is_source or row.convert_to is not None]
    for index, row in enumerate(comparison.rows):
        table.add(
            f"{row.label}{' ◂' if row.is_source else ''}",
            f"{row.kv_bytes_per_token:,}",
            bytes_text(row.kv_bytes),
            count_text(row.attention_parameters_per_layer),
            count_text(row.prefill_flops),
            count_text(row.decode_flops),
            f"{row.decode_intensity:.1f}",
            gap=match is None and index == convertible[-1] + 1,
        )
    out.print_table(table)
    out.print("params: of one attention layer; prefill, decode: FLOPs of all attention layers,")
    out.print("for the prompt and for one token")
    if match is None and len(convertible) > 1:
        out.print("MLA R + P: a latent of R numbers and a rotary key of P in each layer")
        out.print("above the gap: `headwise convert` makes these, --json says how; below: for comparison")
    if measure:
        timed = Table(["one layer, float32", "decode ms", "prefill ms"])
        for row in comparison.rows:
            timed.add(row.label, f"{row.decode_ms:.3f}", f"{row.prefill_ms:.1f}")
        out.print_table(timed)
        out.print("random weights, medians of interleaved runs on this machine")
