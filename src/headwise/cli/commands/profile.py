"""``headwise profile``: measure this machine for predictions, and check them on models that were not measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.tables import Table
from headwise.cli.app import MEASURE, Json, app, emit, out, progress_bar
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.measure.profiling import Check


@app.command(epilog="Example: headwise profile --check", rich_help_panel=MEASURE)
def profile(
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the profile is kept; headwise-machine.toml, or headwise-gpu.toml, by default."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Predict models that were not measured, and measure them too.")
    ] = False,
    places: Annotated[int, typer.Option(help="Sizes, contexts and batches that --check tries.")] = 12,
    seed: Annotated[int, typer.Option(help="Of what --check tries.")] = 0,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to measure, such as cuda; the CPU by default.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; torch's own number by default.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine in a minute or two, so that predict and advise know it by --hardware-file.

    With --check, a profile that FILE has already is kept.
    """
    from headwise.base.disk import refuse_no_file

    if not 1 <= places <= 1000:
        raise ArgumentError("places", places, "must be from 1 to 1000")
    import torch

    from headwise.costs.prediction import device as device_of
    from headwise.measure.profiling import check as checked
    from headwise.measure.profiling import profile as measured
    from headwise.measure.profiling import write_profile
    from headwise.measure.profiling.decoder import grids_of
    from headwise.measure.profiling.profile import name_of
    from headwise.runtime.hf.load import as_device

    place = as_device(device)
    if place.type not in ("cpu", "cuda"):
        raise ArgumentError("device", device, "must be cpu or cuda")
    name = name_of(place)
    output = output or Path(f"headwise-{name.removeprefix('this-')}.toml")
    refuse_no_file("output", output)
    if threads is not None:
        torch.set_num_threads(threads)
    took = None
    with progress_bar() as progress:
        if not check or not output.exists():
            found = measured(place, progress=progress)
            write_profile(found.device, output)
            took = found.seconds
        machine = device_of(name, output)
        result = None
        if check:
            known = grids_of(place)
            result = checked(machine, places=places, seed=seed, grids=known, place=place, progress=progress)
    if as_json:
        emit({"output": str(output), "seconds": took, "label": machine.label, "check": result and result.to_dict()})
        return
    if took is not None:
        peaks = ", ".join(f"{name} {peak / 1e9:,.0f} GFLOP/s" for name, peak in machine.peaks.items())
        out.print(f"machine  {escape(machine.label)}", soft_wrap=True)
        out.print(f"limits   reading {machine.bytes_per_second / 1e9:.1f} GB/s; products {peaks}", soft_wrap=True)
        out.print(f"wrote    {escape(str(output))}, after {took:.0f} s", soft_wrap=True)
    if result is not None:
        _print_check(result)
    else:
        out.print(f"use it   headwise predict SOURCE --hardware {name} --hardware-file {escape(str(output))}")


def _print_check(result: Check) -> None:
    from headwise.measure.profiling.check import points_by_mechanism

    table = Table(["ms", "measured", "predicted", "error"])
    for name, points in points_by_mechanism(result.points).items():
        table.add(name, mark="bold", gap=True)
        for point in points:
            cache = f", {point.cache}" if point.cache else ""
            label = f"{point.sizes}, {point.dtype}{cache}; {point.batch} × {point.context:,}"
            times = (f"{1e3 * seconds:,.2f}" for seconds in (point.measured, point.predicted))
            table.add(label, *times, f"{point.error:+.1%}")
    out.print_table(table)
    right, count = result.ranked
    out.print(f"{len(result.points)} points that were not measured before: median error {result.median_error:.1%},")
    out.print(f"90th percentile {result.high_error:.1%}; {right} of {count} pairs of mechanisms in the right order")
    out.print(f"at the pace of each measurement; at the profile's, the median is {result.median_error_unpaced:.1%}")
    holders = f"tensors of {len(result.memory)} decoders at their most"
    out.print(f"memory: largest error {result.memory_error:.1%}, of the {holders}")
