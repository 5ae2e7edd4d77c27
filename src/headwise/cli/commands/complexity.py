"""``headwise complexity``: the time and space of one layer by stage, as formulas and numbers."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.columns import Columns
from rich.markup import escape

from headwise.base.tables import Table, bytes_text, count_text
from headwise.cli.app import DECIDE, SOURCES_OR_NAME, Json, app, emit, out


@app.command(epilog="Example: headwise complexity deepseek-v3 --tokens 1 --context 32768", rich_help_panel=DECIDE)
def complexity(
    source: Annotated[str, typer.Argument(help=SOURCES_OR_NAME, show_default=False)],
    tokens: Annotated[int, typer.Option(help="S, new tokens: 1 for a decode step.")] = 2048,
    context: Annotated[int | None, typer.Option(help="T, tokens attended to; the new ones when left out.")] = None,
    layer: Annotated[int, typer.Option(help="Which layer of the model.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--full", help="Count pairs under the causal mask, or all pairs; the model's mask when left out."
        ),
    ] = None,
    impl: Annotated[
        str, typer.Option(help="The mechanism's implementation; auto takes the one with the fewest FLOPs.")
    ] = "auto",
    kernel: Annotated[
        Literal["unfused", "fused", "padded"],
        typer.Option(
            help="Attention that stores its scores, one that does not, or one that also pads heads to one width."
        ),
    ] = "fused",
    dtype: Annotated[str, typer.Option(help="Of weights, activations and cache.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Print one layer's time and space by stage, as formulas and as numbers. Reads only the config."""
    from headwise.costs.formulas import Complexity
    from headwise.costs.formulas import complexity as complexity_of
    from headwise.costs.formulas.reports import SYMBOLS

    report: Complexity = complexity_of(
        source, tokens, context, index=layer, batch=batch, causal=causal, impl=impl, kernel=kernel, dtype=dtype
    )
    if as_json:
        emit(report.to_dict())
        return
    how = "" if report.impl == "direct" else f", {report.impl}"
    out.print(f"[bold]{escape(source)}[/bold], layer {layer}: {report.label}{how}, {kernel} kernel, {report.dtype}")
    legend = [f"{name} = {value:,} {SYMBOLS.get(name, 'bytes a value')}" for name, value in report.symbols.items()]
    out.print(Columns(legend, padding=(0, 2)))
    trained = bool(report.activations)  # a step that reads a cache is not trained
    headings = ["forward", *(["backward"] if trained else []), "parameters"]
    time = Table(["time", "FLOPs", *headings], words=(0, 1))
    for stage in report.stages:
        forward, backward = stage.forward_flops, stage.backward_flops
        time.add(
            stage.name,
            forward.formula if forward.value else "",
            count_text(forward.value) if forward.value else "",
            *([count_text(backward.value) if backward.value else ""] if trained else []),
            count_text(stage.parameters.value) if stage.parameters.value else "",
        )
    totals = [report.forward_flops, *([report.backward_flops] if trained else [])]
    time.add("in all", "", *map(count_text, totals), count_text(report.parameters), mark="bold")
    time.add("softmax, apart", report.softmax_flops.formula, count_text(report.softmax_flops.value))
    out.print_table(time)
    space = Table(["space", "bytes", ""], words=(0, 1))
    per_token = report.cache_bytes_per_token
    space.add("cache, a token", per_token.formula, f"{per_token.value:,} B")
    space.add("cache, all", "", bytes_text(report.cache_bytes))
    for name, amount in report.activations.items():
        space.add(name, amount.formula, bytes_text(amount.value))
    if report.activation_bytes is not None:
        space.add("kept for the backward pass", "", bytes_text(report.activation_bytes), mark="bold")
    out.print_table(space)
