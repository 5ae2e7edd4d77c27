"""``headwise predict``: time, memory and capacity of a model on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from headwise.cli.app import SOURCES_OR_NAME, Json, app, bytes_text, count_text, emit, numbers_table, out
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.prediction import Prediction, Timed


@app.command(epilog="Example: headwise predict llama-3-8b --hardware h100 --context 8192 --batch 16")
def predict(
    source: Annotated[str | None, typer.Argument(help=SOURCES_OR_NAME, show_default=False)] = None,
    hardware: Annotated[str | None, typer.Option(help="A device; see --list.", show_default=False)] = None,
    hardware_file: Annotated[Path | None, typer.Option(help="A TOML file with devices of your own.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences that are decoded together.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    cache_bits: Annotated[float | None, typer.Option(help="Of one cached value; the dtype's by default.")] = None,
    ranks: Annotated[int, typer.Option(help="Tensor-parallel devices.")] = 1,
    usable: Annotated[float, typer.Option(help="The share of a device's memory that may be used.")] = 0.9,
    names: Annotated[bool, typer.Option("--list", help="List the devices instead.")] = False,
    as_json: Json = False,
) -> None:
    """Predict how fast a model runs on a device, what memory it takes, and what fits. Reads only the config."""
    from headwise.prediction import device, devices
    from headwise.prediction import predict as predicted

    if names:
        found = devices(hardware_file)
        if as_json:
            emit({"devices": {name: {"label": each.label, "source": each.source} for name, each in found.items()}})
        else:
            for name, each in found.items():
                out.print(f"{name:<12} {each.label}: {each.source}", markup=False, soft_wrap=True)
        return
    if source is None or hardware is None:
        raise ArgumentError("source, hardware", (source, hardware), "are both required (or --list)")
    result = predicted(
        source,
        hardware=device(hardware, hardware_file),
        context=context,
        batch=batch,
        dtype=dtype,
        cache_bits=cache_bits,
        ranks=ranks,
        usable=usable,
    )
    if as_json:
        emit(result.to_dict())
        return
    _print(result)


def _print(result: Prediction) -> None:
    step, memory = result.step, result.memory
    many = f"{step.ranks} × " if step.ranks > 1 else ""
    out.print(f"[bold]{escape(result.source)}[/bold]: {result.label} on {many}{escape(result.device.label)}")
    out.print(
        f"decode   {_milliseconds(result.decode_seconds)} a step, {result.tokens_per_second:,.0f} tok/s", end=""
    )
    out.print(f" ({step.batch} × {step.total:,} tokens)")
    speed = step.total / result.prefill_seconds
    out.print(f"prefill  {_milliseconds(result.prefill_seconds)} a prompt of {step.total:,}, {speed:,.0f} tok/s")
    parts = ", ".join(f"{name} {bytes_text(getattr(memory, name))}" for name in ("weights", "cache", "workspace"))
    fits = "of" if result.fits else "and does not fit in"
    out.print(f"memory   {bytes_text(memory.total)} {fits} {bytes_text(result.usable_bytes)}")
    out.print(f"         {parts}")
    out.print(f"capacity {result.largest_batch:,} sequences of {step.total:,} tokens,", end=" ")
    out.print(f"or {result.longest_context:,} tokens in each of {step.batch}")
    out.print()
    out.print(_table(result))
    out.print()
    shares = result.efficiency
    how = "measured" if shares.is_measured else "assumed"
    out.print(f"{how}: {shares.compute:.0%} of the dense peak, {shares.memory:.0%} of the bandwidth,", end=" ")
    out.print(f"{shares.seconds * 1e6:.0f} µs for each operator")


def _table(result: Prediction) -> Table:
    table = numbers_table("operator", "decode ms", "share", "bound", "FLOPs", "bytes", "prefill ms")
    decode, prefill = _by_name(result.decode), _by_name(result.prefill)
    for name, runs in sorted(decode.items(), key=lambda item: -sum(timed.seconds for timed in item[1])):
        spent = sum(timed.seconds for timed in runs)
        moved = sum(each.operator.times * (each.operator.memory_bytes + each.operator.link_bytes) for each in runs)
        table.add_row(
            name,
            f"{spent * 1e3:.2f}",
            f"{spent / result.decode_seconds:.0%}",
            max(runs, key=lambda timed: timed.seconds).bound,
            count_text(sum(each.operator.times * each.operator.flops for each in runs)),
            bytes_text(moved),
            f"{sum(timed.seconds for timed in prefill.get(name, [])) * 1e3:.2f}",
        )
    return table


def _by_name(timed: Sequence[Timed]) -> dict[str, list[Timed]]:
    """The operators of each name: layers of several kinds have some in common."""
    found: dict[str, list[Timed]] = {}
    for each in timed:
        found.setdefault(each.operator.name, []).append(each)
    return found


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
