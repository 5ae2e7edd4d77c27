"""``headwise predict``: how fast a model runs on a device, and what fits there."""

from __future__ import annotations

import textwrap
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.tables import Table, bytes_text, count_text, seconds_text
from headwise.cli.app import DECIDE, SOURCES_OR_NAME, Json, app, beyond, emit, out, say
from headwise.cli.options import Batch, Context, Dtype, HardwareFile, Ranks, Usable
from headwise.cli.pages import Plot, prediction_figure, refuse_no_plot, write_plot
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.costs.prediction import Prediction


@app.command(
    epilog="Example: headwise predict llama-3-8b --hardware h100 --context 8192 --batch 16", rich_help_panel=DECIDE
)
def predict(
    source: Annotated[str | None, typer.Argument(help=SOURCES_OR_NAME, show_default=False)] = None,
    hardware: Annotated[str | None, typer.Option(help="A device; see --list.", show_default=False)] = None,
    hardware_file: HardwareFile = None,
    context: Context = 4096,
    batch: Batch = 1,
    dtype: Dtype = None,
    cache_bits: Annotated[float | None, typer.Option(help="Of one cached value; the dtype's by default.")] = None,
    ranks: Ranks = 1,
    usable: Usable = 0.9,
    names: Annotated[bool, typer.Option("--list", help="List the devices instead.")] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Predict how fast a model runs on a device, what memory it takes, and what fits. Reads only the config."""
    from headwise.costs.prediction import device, devices
    from headwise.costs.prediction import predict as predicted

    refuse_no_plot(plot)
    if names:
        if plot is not None:
            raise ArgumentError("plot", str(plot), "goes without --list")
        found = devices(hardware_file)
        if as_json:
            emit({"devices": {name: {"label": each.label, "source": each.source} for name, each in found.items()}})
        else:
            for name, each in found.items():
                out.print(f"{name:<11} {each.label}", markup=False, soft_wrap=True)
                out.print(textwrap.indent(textwrap.fill(each.source, 66), 12 * " "), markup=False, soft_wrap=True)
        return
    if source is None:
        raise ArgumentError("source", None, "is required, or --list, which names devices")
    if hardware is None:
        raise ArgumentError("hardware", None, "is required: one of those that headwise predict --list names")
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
    if plot is not None:
        write_plot(plot, partial(prediction_figure, result), is_silent=as_json)
    if as_json:
        emit(result.to_dict())
        return
    _print_prediction(result)


def _print_prediction(result: Prediction) -> None:
    from headwise.costs.prediction import MOST

    step, memory, shares = result.step, result.memory, result.efficiency
    many = f"{step.ranks} × " if step.ranks > 1 else ""
    prompt = step.total / result.prefill_seconds
    parts = ", ".join(f"{name} {bytes_text(getattr(memory, name))}" for name in ("weights", "cache", "workspace"))
    most, misfit = ("at most ", "may not") if result.is_bound else ("", "does not")
    longest = "any length" if result.longest_context == MOST else f"{result.longest_context:,} tokens"
    largest = "any number" if result.largest_batch == MOST else f"{result.largest_batch:,}"
    speed = f", {result.tokens_per_second:,.0f} tok/s" if result.fits or result.is_bound else " if it fitted"
    lines = [
        f"[bold]{escape(result.source)}[/bold]: {result.label}",
        f"on       {many}{escape(result.device.label)}",
        f"decode   {most}{seconds_text(result.decode_seconds)} a step{speed}"
        f" ({step.batch:,} × {step.total:,} tokens)",
        f"prefill  {seconds_text(result.prefill_seconds)} a prompt of {step.total:,}, {prompt:,.0f} tok/s",
        f"memory   {most}{bytes_text(memory.total)} {'of' if result.fits else f'and {misfit} fit in'}"
        f" {bytes_text(result.usable_bytes)}",
        f"         {parts}",
        *([] if result.weights == step.dtype else [f"         weights as stored: {escape(result.weights)}"]),
        f"capacity {largest} sequences of {step.total:,} tokens",
        f"         {longest} in each of {step.batch:,}",
    ]
    allocated = []
    for found, fitting in result.engines:
        why = f": {', '.join(found.reasons)}" if found.reasons else ""
        many = "any number" if fitting == MOST else f"{fitting:,}"
        how = f" with {found.options}" if found.options else ""
        allocated.append(f"{many} as {found.engine} allocates{how} ({found.more:+.1%}{why})")
    for line in lines:
        out.print(line, soft_wrap=True)
    for line in allocated:
        say(line, indent=" " * 9)
    for note in [*beyond(result.trained_context, step.total), *(f"note: {note}" for note in result.notes)]:
        say(note)
    out.print()
    out.print_table(_table(result))
    out.print()
    if shares.is_measured:
        out.print(f"times: {escape(result.device.source)}, interpolated", soft_wrap=True)
        return
    link = f", {shares.link:.0%} of the link" if step.ranks > 1 else ""
    out.print(f"assumed: {shares.compute:.0%} of the peak,", end=" ")
    out.print(f"{shares.memory:.0%} of the bandwidth{link}, {shares.seconds * 1e6:.0f} µs")


def _table(result: Prediction) -> Table:
    table = Table(["operator", "decode ms", "share", "bound", "FLOPs", "bytes", "prefill"])
    decode, prefill = ({timed.name: timed for timed in part} for part in (result.decode, result.prefill))
    names = dict.fromkeys((*sorted(decode, key=lambda name: -decode[name].seconds), *prefill))
    for name in names:
        cells = ["", "", "", "", ""]
        if step := decode.get(name):
            moved = bytes_text(step.memory_bytes + step.link_bytes)
            share = f"{step.seconds / result.decode_seconds:.0%}"
            cells = [f"{step.seconds * 1e3:,.2f}", share, step.bound, count_text(step.flops), moved]
        table.add(name, *cells, f"{prefill[name].seconds * 1e3:,.1f}" if name in prefill else "")
    return table
