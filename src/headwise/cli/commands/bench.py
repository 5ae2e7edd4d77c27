"""``headwise bench``: ways to compute attention side by side, and the machine's limits beside them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from headwise.cli.app import SOURCES, Json, app, emit, numbers_table, out, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from headwise.bench import Bench, Case

OURS = "headwise"

commands = typer.Typer(help="Time ways to compute attention side by side, beside the machine's limits.")
app.add_typer(commands, name="bench")

Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="HEADS/KV_HEADS/HEAD_DIM, or HEADS/RANK+ROPE for absorbed MLA; may be repeated."),
]
Lengths = Annotated[list[int] | None, typer.Option("--length", help="Tokens; may be repeated.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="float32, bfloat16 or float16; may be repeated.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's own number when left out.", min=1, max=1024)]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller grid, in less than a minute.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")]


@commands.command(epilog="Example: headwise bench decode --quick")
def decode(
    shape: Shapes = None,
    length: Lengths = None,
    cache_mib: Annotated[
        int | None, typer.Option("--cache-mib", help="Instead of --length: tokens for a cache of so many MiB.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; may be repeated.")] = None,
    dtype: Dtypes = None,
    tokens: Annotated[int, typer.Option(help="New tokens a step.")] = 1,
    device: Device = "cpu",
    threads: Threads = None,
    quick: Quick = False,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """One decoding step of attention: headwise, SDPA, FlexAttention, and copies for every head."""
    with progress_bar() as progress:
        _prepare(threads, html)
        from headwise.bench import Shape, bench_decode

        found = bench_decode(
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
    _show(found, html, as_json=as_json)


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
    """Causal attention over a prompt."""
    with progress_bar() as progress:
        _prepare(threads, html)
        from headwise.bench import Shape, bench_prefill

        found = bench_prefill(
            shapes=[Shape.parse(text) for text in shape or ()],
            lengths=length,
            dtypes=dtype,
            device=device,
            quick=quick,
            progress=progress,
        )
    _show(found, html, as_json=as_json)


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
    """Whole attention layers: headwise, transformers, x-transformers, torch's, and the guides' way."""
    with progress_bar() as progress:
        _prepare(threads, html)
        from headwise.bench import bench_module

        found = bench_module(
            hidden_size=hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            lengths=length,
            dtypes=dtype,
            quick=quick,
            progress=progress,
        )
    _show(found, html, as_json=as_json)


@commands.command(epilog="Example: headwise bench generate smollm2-135m --context 64 --context 2048")
def generate(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    beside: Annotated[
        list[str] | None, typer.Option(metavar="DIR", help="Another model, optimised; may be repeated.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens in the cache; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="To run in.")] = "float32",
    engines: Annotated[
        bool, typer.Option("--engines/--no-engines", help="Ask llama.cpp and CTranslate2 too.")
    ] = True,
    threads: Threads = None,
    quick: Quick = False,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """A whole model, one token after another: stock, optimised, and other engines."""
    with progress_bar() as progress:
        _prepare(threads, html)
        from headwise.bench import bench_generate

        found = bench_generate(
            source,
            beside=beside or (),
            contexts=context,
            dtype=dtype,
            quick=quick,
            engines=engines,
            progress=progress,
        )
    _show(found, html, as_json=as_json)


def _prepare(threads: int | None, html: Path | None) -> None:
    """What is to be found out, or set, before anything is measured."""
    if html is not None:
        from headwise.checkpoints.disk import refuse_no_file

        refuse_no_file("html", html)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _show(found: Bench, html: Path | None, *, as_json: bool) -> None:
    command = shlex.join(["headwise", *sys.argv[1:]])
    if as_json:
        emit({**found.to_dict(), "command": command})
    else:
        _print(found)
    if html is not None:
        from headwise.bench import page
        from headwise.checkpoints.disk import clearly, write_among_others

        with clearly("html", html):
            write_among_others(html, page(found, command).encode())
        if not as_json:
            out.print(f"wrote {escape(str(html))}")


def _print(found: Bench) -> None:
    out.print(_wide(found) if len(found.ways()) <= _SIDE_BY_SIDE else _long(found))
    out.print("ms: medians of interleaved runs. limit: the larger of bytes over the read")
    out.print("bandwidth and FLOPs over 0.7 of the matmul peak, both measured beside each case;")
    out.print("×: how many times that")
    for way, ratio in found.speedups().items():
        out.print(f"{escape(way)}: {ratio:.1f} × the time of headwise, in the median")
    for note in (*found.notes, *_errors(found)):
        out.print(escape(note))


_SIDE_BY_SIDE = 6
"""Ways that fit beside each other in a terminal."""


def _wide(found: Bench) -> Table:
    """A row a case, a column a way."""
    others = [way for way in found.ways() if way != OURS]
    table = numbers_table("ms", "limit", OURS, "×", *(way.replace(", ", ",\n") for way in others))
    for case in found.cases:
        cells = [_ms(case, way) for way in others]
        table.add_row(escape(case.name), f"{case.limit_ms:.3g}", _ms(case, OURS), _times(case, OURS), *cells)
    return table


def _long(found: Bench) -> Table:
    """A row a way, under its case."""
    table = numbers_table("", "ms", "×", "GB/s", "GFLOP/s")
    for case in found.cases:
        table.add_row(f"[bold]{escape(case.name)}[/bold], limit", f"{case.limit_ms:.3g}", "1.00", "", "")
        for way, timing in case.ways.items():
            rates = [] if timing.ms is None else [f"{n / timing.ms / 1e6:.3g}" for n in (case.nbytes, case.flops)]
            table.add_row(f"  {escape(way)}", _ms(case, way), _times(case, way), *rates)
    return table


def _times(case: Case, way: str) -> str:
    ratio = case.ratio(way)
    return "–" if ratio is None else f"{ratio:.2f}"


def _ms(case: Case, way: str) -> str:
    timing = case.ways.get(way)
    return "–" if timing is None or timing.ms is None else f"{timing.ms:.3g}"


def _errors(found: Bench) -> list[str]:
    """Why some ways could not be run, each reason once."""
    said = ((way, timing.error) for case in found.cases for way, timing in case.ways.items() if timing.error)
    return list(dict.fromkeys(f"{way} {error}" for way, error in said))
