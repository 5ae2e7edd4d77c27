"""``headwise complexity``: one layer's time and space by stage, in formulas and numbers."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.columns import Columns
from rich.markup import escape

from headwise.cli.app import SOURCES_OR_NAME, Json, app, bytes_text, count_text, emit, numbers_table, out


@app.command(epilog="Example: headwise complexity deepseek-v3 --tokens 1 --context 32768")
def complexity(
    source: Annotated[str, typer.Argument(help=SOURCES_OR_NAME, show_default=False)],
    tokens: Annotated[int, typer.Option(help="S, new tokens: 1 for a decode step.")] = 2048,
    context: Annotated[int | None, typer.Option(help="T, tokens attended to; the new ones when not given.")] = None,
    layer: Annotated[int, typer.Option(help="Which layer of the model.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--full", help="Pairs under the causal mask, or all; the model's when unsaid."),
    ] = None,
    impl: Annotated[str, typer.Option(help="The mechanism's implementation, or auto: the fewest FLOPs.")] = "auto",
    kernel: Annotated[
        Literal["unfused", "fused", "padded"],
        typer.Option(help="Attention that holds its scores, or never does, or pads heads to one width too."),
    ] = "fused",
    dtype: Annotated[str, typer.Option(help="Of weights, activations and cache.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Print one layer's time and space by stage, as formulas and as numbers. Reads the config alone."""
    from headwise.cost import Complexity
    from headwise.cost import complexity as complexity_of
    from headwise.cost.reports.complexity import SYMBOLS

    found: Complexity = complexity_of(
        source, tokens, context, index=layer, batch=batch, causal=causal, impl=impl, kernel=kernel, dtype=dtype
    )
    if as_json:
        emit(found.to_dict())
        return
    how = "" if found.impl == "direct" else f", {found.impl}"
    out.print(f"[bold]{escape(source)}[/bold], layer {layer}: {found.label}{how}, {kernel} kernel, {found.dtype}")
    legend = [f"{name} = {value:,} {SYMBOLS.get(name, 'bytes a value')}" for name, value in found.symbols.items()]
    out.print(Columns(legend, padding=(0, 2)))
    trained = bool(found.activations)  # a step that reads a cache is none of training
    headings = ["forward", *(["backward"] if trained else []), "parameters"]
    time = numbers_table("time", "FLOPs", *headings)
    time.columns[1].justify = "left"
    for stage in found.stages:
        forward, backward = stage.forward_flops, stage.backward_flops
        time.add_row(
            stage.name,
            forward.formula if forward.value else "",
            count_text(forward.value) if forward.value else "",
            *([count_text(backward.value) if backward.value else ""] if trained else []),
            count_text(stage.parameters.value) if stage.parameters.value else "",
        )
    totals = [found.forward_flops, *([found.backward_flops] if trained else [])]
    time.add_row("in all", "", *map(count_text, totals), count_text(found.parameters), style="bold")
    time.add_row("softmax, apart", found.softmax_flops.formula, count_text(found.softmax_flops.value))
    out.print(time)
    space = numbers_table("space", "bytes", "")
    space.columns[1].justify = "left"
    per_token = found.cache_bytes_per_token
    space.add_row("cache, a token", per_token.formula, f"{per_token.value:,} B")
    space.add_row("cache, all", "", bytes_text(found.cache_bytes))
    for name, amount in found.activations.items():
        space.add_row(name, amount.formula, bytes_text(amount.value))
    if found.activation_bytes is not None:
        space.add_row("kept for the backward pass", "", bytes_text(found.activation_bytes), style="bold")
    out.print(space)
