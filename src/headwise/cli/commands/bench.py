"""``headwise bench``: time implementations of attention side by side, beside the machine's limits."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from headwise.base.tables import Table
from headwise.cli.app import SOURCES, STUDY, Json, app, emit, out, progress_bar
from headwise.cli.pages import Html, Plot, refuse_no_page, refuse_no_plot, write_page, write_plot

if TYPE_CHECKING:
    from headwise.study.audit import MechanismBench
    from headwise.study.bench import Bench, Case

OURS = "headwise"

commands = typer.Typer(help="Time implementations of attention side by side, beside the machine's limits.")
app.add_typer(commands, name="bench", rich_help_panel=STUDY)

Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="HEADS/KV_HEADS/HEAD_DIM, or HEADS/RANK+ROPE for absorbed MLA; may be repeated."),
]
Lengths = Annotated[list[int] | None, typer.Option("--length", help="Tokens; may be repeated.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="float32, bfloat16 or float16; may be repeated.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Device to run on.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's own number when left out.", min=1, max=1024)]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller grid, in less than a minute.")]


@commands.command(epilog="Example: headwise bench decode --quick")
def decode(
    shape: Shapes = None,
    length: Lengths = None,
    cache_mib: Annotated[
        int | None, typer.Option("--cache-mib", help="Instead of --length: the size of the cache, in MiB.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; may be repeated.")] = None,
    dtype: Dtypes = None,
    tokens: Annotated[int, typer.Option(help="New tokens in a step.")] = 1,
    device: Device = "cpu",
    threads: Threads = None,
    quick: Quick = False,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Time one decoding step of attention: headwise, SDPA, FlexAttention, and keys repeated for every head."""
    with progress_bar() as progress:
        _prepare(threads, html)
        from headwise.study.bench import Shape, bench_decode

        report = bench_decode(
            shapes=[Shape.parse(text) for text in shape or ()],
            lengths=length,
            cache_mib=cache_mib,
            batches=batch,
            dtypes=dtype,
            tokens=tokens,
            device=device,
            quick=quick,
            progress=progress,
        )
    _show(report, html, as_json=as_json)


@commands.command(epilog="Example: headwise bench prefill --shape 32/8/128 --length 4096")
def prefill(
    shape: Shapes = None,
    length: Lengths = None,
    dtype: Dtypes = None,
    device: Device = "cpu",
    threads: Threads = None,
    quick: Quick = False,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Time causal attention over a prompt."""
    with progress_bar() as progress:
        _prepare(threads, html)
        from headwise.study.bench import Shape, bench_prefill

        report = bench_prefill(
            shapes=[Shape.parse(text) for text in shape or ()],
            lengths=length,
            dtypes=dtype,
            device=device,
            quick=quick,
            progress=progress,
        )
    _show(report, html, as_json=as_json)


@commands.command(epilog="Example: headwise bench module --hidden-size 2048 --heads 32 --kv-heads 8")
def module(
    hidden_size: Annotated[int, typer.Option(help="Width of the states.")] = 2048,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key–value heads of the grouped layers.")] = 8,
    length: Lengths = None,
    dtype: Dtypes = None,
    threads: Threads = None,
    quick: Quick = False,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Time whole attention layers: headwise, transformers, x-transformers, torch, and a textbook layer."""
    with progress_bar() as progress:
        _prepare(threads, html)
        from headwise.study.bench import bench_module

        report = bench_module(
            hidden_size=hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            lengths=length,
            dtypes=dtype,
            quick=quick,
            progress=progress,
        )
    _show(report, html, as_json=as_json)


@commands.command(epilog="Example: headwise bench generate smollm2-135m --context 64 --context 2048")
def generate(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    beside: Annotated[
        list[str] | None, typer.Option(metavar="DIR", help="Another model to time, optimised; may be repeated.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens in the cache; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype to run in.")] = "float32",
    engines: Annotated[
        bool, typer.Option("--engines/--no-engines", help="Time llama.cpp and CTranslate2 too.")
    ] = True,
    threads: Threads = None,
    quick: Quick = False,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Time a whole model that generates token by token: as loaded, optimised, and in other engines."""
    with progress_bar() as progress:
        _prepare(threads, html)
        from headwise.study.bench import bench_generate

        report = bench_generate(
            source,
            beside=beside or (),
            contexts=context,
            dtype=dtype,
            quick=quick,
            engines=engines,
            progress=progress,
        )
    _show(report, html, as_json=as_json)


@commands.command(epilog="Example: headwise bench mechanisms --length 256 --length 1024 --plot mechanisms.svg")
def mechanisms(
    hidden_size: Annotated[int, typer.Option(help="Width of the states.")] = 512,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    length: Lengths = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device to run on, such as cuda.")] = "cpu",
    passes: Annotated[int, typer.Option(help="Timed passes of each, after 30 that warm up.")] = 100,
    threads: Threads = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Time MHA, MQA, GQA, MLA and latent-space attention against the length, and compare their outputs."""
    refuse_no_plot(plot)
    with progress_bar() as progress:
        _prepare(threads, None)
        from headwise.study.audit.mechanisms import LENGTHS, bench_mechanisms

        report = bench_mechanisms(
            hidden_size=hidden_size,
            num_heads=heads,
            lengths=length or LENGTHS,
            batch=batch,
            dtype=dtype,
            device=device,
            passes=passes,
            progress=progress,
        )
    if as_json:
        emit(report.to_dict())
    else:
        _print_mechanisms(report)
    if plot is not None:
        from headwise.cli.pages import mechanisms_figure

        write_plot(plot, lambda: mechanisms_figure(report), is_silent=as_json)


def _print_mechanisms(report: MechanismBench) -> None:
    heading = ["tokens", "", "ms", "speed-up", "cache KiB", "peak MiB", "apart", "converted"]
    table = Table(heading, words=(0, 1))
    for row in report.rows:
        errors = (f"{one.relative_error:.3f}" if one is not None else "–" for one in (row.independent, row.converted))
        table.add(
            f"{row.length:,}",
            row.mechanism,
            f"{row.ms:.3g}",
            f"{row.speedup:.2f}",
            f"{row.cache_bytes / 1024:,.0f}",
            f"{row.peak_bytes / 1024**2:.1f}",
            *errors,
        )
    out.print_table(table)
    out.print(f"ms: medians of {report.passes} passes in turn, {report.dtype}; peak: tensors made in a pass")
    out.print("apart, converted: the output's relative error beside MHA's, of a layer with weights of its")
    out.print("own, and of one made of MHA's weights (which are random, so that no method finds much in them)")


def _prepare(threads: int | None, html: Path | None) -> None:
    """Check that the page can be written, and set torch's threads."""
    refuse_no_page(html, has_plots=False)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _show(report: Bench, html: Path | None, *, as_json: bool) -> None:
    command = shlex.join(["headwise", *sys.argv[1:]])
    if as_json:
        emit({**report.to_dict(), "command": command})
    else:
        _print(report)
    if html is not None:
        from headwise.study.bench.report import page

        write_page(html, page(report, command), is_silent=as_json)


def _print(report: Bench) -> None:
    out.print_table(_wide(report) if len(report.ways()) <= _SIDE_BY_SIDE else _long(report))
    out.print("ms: medians of interleaved runs. limit: the larger of bytes over the read")
    out.print("bandwidth and FLOPs over 0.7 of the matmul peak, both measured beside each case;")
    out.print("×: headwise's time over the limit")
    for way, ratio in report.speedups().items():
        out.print(f"{escape(way)}: {ratio:.1f} × the time of headwise, in the median")
    for note in (*report.notes, *_errors(report)):
        out.print(escape(note))


_SIDE_BY_SIDE = 6
"""The most implementations that fit beside each other in a terminal."""


def _wide(report: Bench) -> Table:
    """A table with a row for each case and a column for each implementation."""
    others = [way for way in report.ways() if way != OURS]
    table = Table(["ms", "limit", OURS, "×", *(way.replace(", ", ",\n") for way in others)])
    for case in report.cases:
        cells = [_ms(case, way) for way in others]
        table.add(case.name, f"{case.limit_ms:.3g}", _ms(case, OURS), _times(case, OURS), *cells)
    return table


def _long(report: Bench) -> Table:
    """A table with a row for each implementation, below the row of its case."""
    table = Table(["", "ms", "×", "GB/s", "GFLOP/s"])
    for case in report.cases:
        table.add(f"{case.name}, limit", f"{case.limit_ms:.3g}", "1.00", mark="bold")
        for way, timing in case.ways.items():
            rates = [] if timing.ms is None else [f"{n / timing.ms / 1e6:.3g}" for n in (case.nbytes, case.flops)]
            table.add(f"  {way}", _ms(case, way), _times(case, way), *rates)
    return table


def _times(case: Case, way: str) -> str:
    ratio = case.ratio(way)
    return "–" if ratio is None else f"{ratio:.2f}"


def _ms(case: Case, way: str) -> str:
    timing = case.ways.get(way)
    return "–" if timing is None or timing.ms is None else f"{timing.ms:.3g}"


def _errors(report: Bench) -> list[str]:
    """The reasons why some implementations could not be run, each once."""
    errors = ((way, timing.error) for case in report.cases for way, timing in case.ways.items() if timing.error)
    return list(dict.fromkeys(f"{way} {error}" for way, error in errors))
