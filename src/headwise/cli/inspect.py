"""``headwise inspect``: what a model's attention is, and what it caches."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.cli.app import SOURCES_OR_NAME, Json, app, bytes_text, emit, numbers_table, out
from headwise.errors import ArgumentError


@app.command(epilog="Example: headwise inspect llama-3-8b --dtype float16")
def inspect(
    source: Annotated[str | None, typer.Argument(help=SOURCES_OR_NAME, show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="The cache's dtype.")] = "bfloat16",
    names: Annotated[bool, typer.Option("--list", help="List the catalog's names instead.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a model's attention is and what a token costs in its cache. Reads the config alone."""
    from headwise.cost import inspect as inspect_source
    from headwise.specs import catalog

    if names:
        if as_json:
            emit({"catalog": {name: entry["source"] for name, entry in catalog().items()}})
        else:
            for name, entry in catalog().items():
                out.print(f"{name:<20} {entry['source']}")
        return
    if source is None:
        raise ArgumentError("source", source, "is required (or --list)")
    found = inspect_source(source, dtype=dtype)
    if as_json:
        emit(found.to_dict())
        return
    out.print(
        f"[bold]{escape(source)}[/bold]: {found.model_type}, {found.num_layers} layers, hidden {found.hidden_size}"
    )
    out.print(
        f"{found.mechanism.upper()} · {bytes_text(found.kv_bytes_per_token)} of cache a token"
        f" ({found.kv_bytes_per_token:,} B, {found.dtype})"
    )
    if found.kv_bytes_at_longest:
        out.print(f"{bytes_text(found.kv_bytes_at_longest)} at its longest, {found.max_position_embeddings:,} tokens")
    table = numbers_table("layers", "attention", "window", "cache B/token", "parameters")
    for group in found.layers:
        table.add_row(
            _ranges(group.layers),
            group.label,
            "" if group.sliding_window is None else f"{group.sliding_window:,}",
            f"{group.kv_bytes_per_token:,}",
            f"{group.attention_parameters:,}",
        )
    out.print(table)


def _ranges(indices: tuple[int, ...]) -> str:
    """``0–29``, or ``0, 2, 4 … (18)`` when the layers alternate."""
    if indices == tuple(range(indices[0], indices[-1] + 1)):
        return str(indices[0]) if len(indices) == 1 else f"{indices[0]}–{indices[-1]}"
    shown = ", ".join(map(str, indices[:3]))
    return f"{shown} … ({len(indices)})" if len(indices) > 3 else shown
