"""``headwise convert``: convert a model's attention and write a model folder with a smaller cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.options import ConvertOptions
from headwise.base.tables import bytes_text
from headwise.cli.app import CHANGE, SOURCES, Json, app, emit, out, progress_bar, say
from headwise.cli.options import show_text, takes_options
from headwise.cli.torchrun import as_one_process

if TYPE_CHECKING:
    from headwise.conversion import Conversion
    from headwise.conversion.report import Balance


@app.command(
    epilog="Example: headwise convert smollm2-135m ./smollm2-mla --to mla --kv-budget 0.5 --calibrate text.txt",
    rich_help_panel=CHANGE,
)
@takes_options(ConvertOptions)
def convert(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    options: ConvertOptions,
    as_json: Json = False,
) -> None:
    """Convert a model's attention to MHA, GQA, MQA or MLA and write a model folder."""
    with as_one_process(), progress_bar() as progress:
        from headwise.conversion import convert as convert_source

        report = convert_source(source, output, options, progress=progress)
    if as_json:
        emit(report.to_dict())
    else:
        _show(report)


def _show(report: Conversion) -> None:
    from headwise.costs.formulas.layer import dtype_bytes
    from headwise.models.specs import HOSTED_PREFIX

    before, after = report.kv_bytes_per_token_before, report.kv_bytes_per_token_after
    dry_run = " (dry run)" if report.dry_run else ""
    out.print(f"[bold]{escape(report.source)}[/bold] → {report.label} in {escape(report.output)}{dry_run}")
    if report.coded:  # as large in every dtype, so that its share is of a cache as it would be served
        of_bfloat16 = after / (before * dtype_bytes("bfloat16") / dtype_bytes(report.dtype))
        out.print(
            f"cache a token  {before:,} ({report.dtype}) → {after:,} B in codes ({of_bfloat16:.1%} of bfloat16)"
        )
    elif before:  # an encoder has no cache
        out.print(f"cache a token  {before:,} → {after:,} B ({after / before:.0%}, {report.dtype})")
    out.print(f"parameters     {report.parameters_before:,} → {report.parameters_after:,}")
    out.print(f"on disk        {bytes_text(report.disk_bytes)}")
    peak = "" if report.peak_rss_bytes is None else f", peak memory {bytes_text(report.peak_rss_bytes)}"
    if report.peak_device_bytes is not None:
        peak += f", of the GPU {bytes_text(report.peak_device_bytes)}"
    evaluating = f", and {report.seconds_evaluating:.1f} s to evaluate it" if report.seconds_evaluating else ""
    out.print(f"{'about ' if report.dry_run else ''}{report.seconds:.1f} s{evaluating}{peak}")
    if report.balance is not None:
        for line in _weighed(report.balance):
            say(line)
    if report.model_type.startswith(HOSTED_PREFIX) and not report.dry_run:
        # Loaded by transformers, a cache of codes would be stored unquantised; a note says so.
        out.print(
            f"run it with headwise.load{'' if report.coded else ', or in transformers after import headwise.hf'}"
        )
    elif report.format.startswith("gguf"):
        out.print(f"llama.cpp loads it: llama-server -m {report.output}/model.gguf", markup=False)
    elif report.format.startswith("deepseek"):
        out.print("transformers loads it as deepseek_v3; after headwise.optimize(model) it attends to its latents")
    for note in report.notes:
        say(f"note: {note}")
    if report.evaluation is not None:
        show_text(report.evaluation, columns=("converted", "original"))
    if report.plain is not None:
        say(report.plain.line)


def _weighed(balance: Balance) -> list[str]:
    """What a conversion gains and costs, in sentences."""
    (cache, less), (weights, more) = balance.cache_bytes, balance.weight_bytes
    lines = [
        f"at {balance.context:,} tokens the cache takes {bytes_text(less)} (16 bits: {bytes_text(cache)}), and the "
        f"weights {bytes_text(more)} (now {bytes_text(weights)}): {bytes_text(abs(balance.saved))} "
        f"{'less' if balance.saved > 0 else 'more'} in all"
    ]
    if balance.even_at is None:
        lines.append("no memory is saved, however long the texts are")
    elif balance.even_at > 0:
        lines.append(f"memory is saved from {balance.even_at:,} tokens on, of all sequences together")
    if balance.flops is not None:
        lines.append(
            f"a decode step there computes ×{balance.flops:.2f} and reads ×{balance.bytes_read:.2f}, "
            "with weights of 16 bits"
        )
    return lines
