"""``headwise inspect``: the layers, weights, cache and FLOPs of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.tables import Table, bytes_text, count_text
from headwise.cli.app import DECIDE, SOURCES_OR_NAME, Json, app, emit, out
from headwise.errors import ArgumentError
from headwise.models.specs.recurrent import NAMES as RECURRENT_NAMES

if TYPE_CHECKING:
    from headwise.costs.formulas import Inspection


_NAMES = {**RECURRENT_NAMES, "none": "without attention", "short_conv": "short convolution"}
_LONGEST_LIST = 20
"""The most characters of a list of layers before it is abbreviated."""


@app.command(epilog="Example: headwise inspect llama-3-8b --dtype float16", rich_help_panel=DECIDE)
def inspect(
    source: Annotated[str | None, typer.Argument(help=SOURCES_OR_NAME, show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="The cache's dtype.")] = "bfloat16",
    ranks: Annotated[int, typer.Option(help="Tensor-parallel ranks that the heads are split over.")] = 1,
    names: Annotated[bool, typer.Option("--list", help="List the catalog's names instead.")] = False,
    as_json: Json = False,
) -> None:
    """Describe a model layer by layer: what it stores, caches and computes. Reads only the config."""
    from headwise.costs.formulas import inspect as inspect_source
    from headwise.models.specs import catalog

    if names:
        if as_json:
            emit({"catalog": {name: entry["source"] for name, entry in catalog().items()}})
        else:
            for name, entry in catalog().items():
                out.print(f"{name:<20} {entry['source']}", soft_wrap=True)
        return
    if source is None:
        raise ArgumentError("source", source, "is required (or --list)")
    report = inspect_source(source, dtype=dtype, ranks=ranks)
    if as_json:
        emit(report.to_dict())
        return
    out.print(f"[bold]{escape(source)}[/bold]: {report.model_type}, hidden {report.hidden_size}")
    out.print(f"layers   {_attention(report)}")
    _print_cache(report)
    _print_flops(report)
    out.print()
    out.print_table(_layers_table(report))
    out.print()
    if report.weights is None:
        out.print("the whole model's weights and FLOPs are not known from this config")
    else:
        out.print_table(_weights_table(report))


def _attention(report: Inspection) -> str:
    """The number of layers of each kind: ``32 GQA``, or ``36 Gated DeltaNet, 12 GQA`` for a mixed stack."""
    counts: Counter[str] = Counter()
    for group in report.layers:
        counts[_NAMES.get(group.mechanism, group.mechanism.upper())] += len(group.layers)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _print_cache(report: Inspection) -> None:
    if not report.kv_bytes_per_token and not report.state_bytes:
        out.print("cache    none: every token sees every other")
        return
    out.print(
        f"cache    {bytes_text(report.kv_bytes_per_token)} a token ({report.kv_bytes_per_token:,} B, {report.dtype})"
        + (f" and {bytes_text(report.state_bytes)} of state" if report.state_bytes else "")
    )
    if report.source_kv_bytes_per_token:
        source = report.source_kv_bytes_per_token
        out.print(f"         {bytes_text(source)} a token of the encoder's output ({source:,} B)")
    if report.kv_bytes_at_longest:
        out.print(f"         {bytes_text(report.kv_bytes_at_longest)} at {report.max_position_embeddings:,} tokens")
    if report.ranks > 1:
        whole = report.kv_bytes_at_longest_of_rank
        out.print(
            f"         {bytes_text(report.kv_bytes_per_token_of_rank)} a token on each of {report.ranks} ranks"
            + (f", {bytes_text(whole)} at {report.max_position_embeddings:,}" if whole else "")
        )


def _print_flops(report: Inspection) -> None:
    if report.weights is None or report.active_weights is None or report.flops_of_first_token is None:
        return
    total, active = report.weights["total"], report.active_weights["total"]
    sparse = f", {count_text(active)} active for a token" if active != total else ""
    tied = "" if report.weights["head"] else ", head tied to the embedding"
    out.print(f"weights  {count_text(total)} parameters{sparse}{tied}")
    if report.weight_bytes is not None and _is_quantized(report):
        most = "at most " if report.weight_bytes_are_bound else ""
        size = bytes_text(report.weight_bytes["total"])
        out.print(f"         {most}{size} as stored: {escape(report.weight_format)}", soft_wrap=True)
    for note in report.weight_notes:
        out.print(f"note     {escape(note)}", soft_wrap=True)
    last = ""
    if report.flops_at_longest is not None and report.max_position_embeddings is not None:
        last = f", {count_text(report.flops_at_longest['total'])} at {report.max_position_embeddings:,} tokens"
    out.print(f"FLOPs    {count_text(report.flops_of_first_token['total'])} for the first token{last}")


def _layers_table(report: Inspection) -> Table:
    """A table with a row for each kind of layer; empty columns are left out."""
    windows = any(group.sliding_window is not None for group in report.layers)
    states = any(group.state_bytes for group in report.layers)
    headings = ["layers", "attention", *(["window"] if windows else []), "B/token", *(["state"] if states else [])]
    table = Table([*headings, "weights"], words=(0, 1))
    rotated = any(group.spec["rope"] for group in report.layers)
    names = _names_of([group.layers for group in report.layers])
    for group, name in zip(report.layers, names, strict=True):
        window = "" if group.sliding_window is None else f"{group.sliding_window:,}"
        state = bytes_text(group.state_bytes) if group.state_bytes else ""
        unrotated = rotated and group.spec["kind"] != "recurrent" and group.spec["rope"] is None
        table.add(
            name,
            group.label + (", no rope" if unrotated else ""),
            *([window] if windows else []),
            f"{group.kv_bytes_per_token:,}",
            *([state] if states else []),
            f"{group.attention_parameters:,}",
        )
    return table


def _weights_table(report: Inspection) -> Table:
    assert report.weights is not None
    assert report.active_weights is not None
    sparse, bytes_of = report.weights != report.active_weights, report.weight_bytes if _is_quantized(report) else None
    headings = ["weights", "all", "share", *(["active"] if sparse else []), *(["bytes"] if bytes_of else [])]
    table = Table(headings)
    for part, count in report.weights.items():
        if count:
            table.add(
                part.replace("_", " "),
                f"{count:,}",
                f"{100 * count / report.weights['total']:.1f}%",
                *([f"{report.active_weights[part]:,}"] if sparse else []),
                *([bytes_text(bytes_of[part])] if bytes_of else []),
                mark="bold" if part == "total" else "",
            )
    return table


def _is_quantized(report: Inspection) -> bool:
    from headwise.costs.formulas.layer import DTYPE_BYTES

    return report.weight_format not in DTYPE_BYTES or bool(report.weight_notes)


def _names_of(groups: Sequence[tuple[int, ...]]) -> list[str]:
    """Name each group of layers: ``0–29``, ``every 6th of 5–23``, or ``the other 22`` for one with no pattern."""
    names = [_pattern(group) for group in groups]
    irregular = names.count(None)
    return [
        name
        or (f"the other {len(group)}" if irregular == 1 < len(groups) else f"{group[0]}, {group[1]} … ({len(group)})")
        for name, group in zip(names, groups, strict=True)
    ]


def _pattern(indices: tuple[int, ...]) -> str | None:
    step = indices[1] - indices[0] if len(indices) > 2 else 0
    if step and indices == tuple(range(indices[0], indices[-1] + 1, step)):
        if step == 1:
            return f"{indices[0]}–{indices[-1]}"
        ordinal = {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
        return f"every {ordinal} of {indices[0]}–{indices[-1]}"
    whole = ", ".join(map(str, indices))
    return whole if len(whole) <= _LONGEST_LIST else None
