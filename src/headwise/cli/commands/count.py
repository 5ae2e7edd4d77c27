"""``headwise count``: one layer's FLOPs by formula, counted while the layer runs, and by other tools."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.base.tables import Table
from headwise.cli.app import SOURCES_OR_NAME, STUDY, Json, app, emit, out


@app.command(epilog="Example: headwise count qwen3-0.6b --tokens 1 --context 4096", rich_help_panel=STUDY)
def count(
    source: Annotated[str, typer.Argument(help=SOURCES_OR_NAME, show_default=False)],
    tokens: Annotated[int, typer.Option(help="S, new tokens: 1 for a decode step.")] = 256,
    context: Annotated[int | None, typer.Option(help="T, tokens attended to; the new ones when left out.")] = None,
    layer: Annotated[int, typer.Option(help="Which layer of the model.")] = 0,
    as_json: Json = False,
) -> None:
    """Run one layer with random weights and compare counters: thop, fvcore, torchinfo, calflops, torch."""
    from headwise.study.counting import count_layer

    counts = count_layer(source, tokens, context, index=layer)
    if as_json:
        emit(counts.to_dict())
        return
    out.print(
        f"[bold]{escape(source)}[/bold], layer {layer}: {counts.label},"
        f" {counts.new_tokens:,} new of {counts.total_tokens:,} tokens"
    )
    table = Table(["counter", "prints", "FLOPs", "error", "parameters"], words=(0, 1))

    def row(name: str, prints: str, flops: int | None, parameters: int | None) -> None:
        error = "" if flops is None else f"{100 * (flops / counts.formula_flops - 1):+.1f} %"
        table.add(
            name,
            prints,
            "" if flops is None else f"{flops:,}",
            "0" if flops == counts.formula_flops else error,
            "" if parameters is None else f"{parameters:,}",
        )

    row("headwise, closed form", "FLOPs", counts.formula_flops, counts.parameters)
    row("headwise, counted", "FLOPs", counts.counted_flops, counts.parameters)
    for peer in counts.peers:
        name = peer.name if peer.version is None else f"{peer.name} {peer.version}"
        row(name, peer.error or peer.unit, peer.flops, peer.parameters)
    out.print_table(table)
    out.print("errors are of FLOPs at 2 a multiply-add, against the closed form of all pairs")
    if counts.counted_flops > counts.formula_flops:
        out.print("counted: with the padding that attention on the CPU gives heads of unequal widths")
    if counts.causal_flops != counts.counted_flops:
        out.print(f"a causal kernel computes about half of the pairs: {counts.causal_flops:,} FLOPs")
