"""``headwise convert``: a model folder in, a smaller-cache model folder out."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.cli.app import (
    SOURCES,
    CalibrationTokens,
    CalibrationWindow,
    Json,
    app,
    bytes_text,
    emit,
    out,
    progress_bar,
)
from headwise.cli.scores import show_text
from headwise.cli.torchrun import as_one_process
from headwise.errors import ArgumentError


@app.command(
    epilog="Example: headwise convert smollm2-135m ./smollm2-mla --to mla --kv-budget 0.5 --calibrate text.txt"
)
def convert(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    to: Annotated[str, typer.Option(help="mha, gqa:K, mqa or mla.", show_default=False)],
    kv_budget: Annotated[
        float | None, typer.Option(help="mla: fraction of the source's cache to keep, 0 < F ≤ 1; 1 is lossless.")
    ] = None,
    kv_lora_rank: Annotated[int | None, typer.Option(help="mla: width of the latent, in place of a budget.")] = None,
    qk_rope_head_dim: Annotated[int | None, typer.Option(help="mla: width of the rotary key.")] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A text that layers are studied on, a file, a folder or hf-dataset://…; again for a mixture.",
        ),
    ] = None,
    calibration_tokens: CalibrationTokens = None,
    calibration_window: CalibrationWindow = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Of headwise calibrate, in the place of a text: no model is run to convert."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="How heads come to be shared: aligned (the default), mean or first_head. For mla a published method "
            "in the place of headwise's own: mha2mla, transmla or transmla:F."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Leave out sensitivity, spread, channels, sequence, refine or refit."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the output; the source's when left out.")] = None,
    format: Annotated[  # noqa: A002
        str, typer.Option(help="mla: headwise, or deepseek: a stock folder, with one plan for all layers.")
    ] = "headwise",
    evaluate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="What to evaluate on; when left out, text beyond the calibration's, or Python's language reference.",
        ),
    ] = None,
    no_evaluate: Annotated[bool, typer.Option("--no-evaluate", help="Do not evaluate at the end.")] = False,
    evaluation_windows: Annotated[int, typer.Option(help="How many windows of each text, of 2048 tokens.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model folder at OUT.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a model's attention to MHA, GQA, MQA or MLA and write a model folder."""
    if no_evaluate and evaluate:
        raise ArgumentError("evaluate", evaluate[0], "goes without --no-evaluate")
    with as_one_process(), progress_bar() as progress:
        from headwise.conversion import convert as convert_source
        from headwise.specs import HOSTED_PREFIX

        done = convert_source(
            source,
            output,
            to=to,
            kv_budget=kv_budget,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            calibrate=calibrate,
            calibration_tokens=calibration_tokens,
            calibration_window=calibration_window,
            statistics=statistics,
            method=method,
            without=without or (),
            dtype=dtype,
            format=format,  # type: ignore[arg-type]  # it says itself what it can be
            evaluate=evaluate or not no_evaluate,
            evaluation_windows=evaluation_windows,
            dry_run=dry_run,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        emit(done.to_dict())
        return
    before, after = done.kv_bytes_per_token_before, done.kv_bytes_per_token_after
    out.print(f"[bold]{escape(source)}[/bold] → {done.label} in {escape(output)}{' (dry run)' if dry_run else ''}")
    if before:  # an encoder keeps none
        out.print(f"cache a token  {before:,} → {after:,} B ({after / before:.0%}, {done.dtype})")
    out.print(f"parameters     {done.parameters_before:,} → {done.parameters_after:,}")
    out.print(f"on disk        {bytes_text(done.disk_bytes)}")
    peak = "" if done.peak_rss_bytes is None else f", peak memory {bytes_text(done.peak_rss_bytes)}"
    out.print(f"{'about ' if dry_run else ''}{done.seconds:.1f} s{peak}")
    if done.model_type.startswith(HOSTED_PREFIX) and not dry_run:
        out.print("run it with headwise.load, or in transformers after import headwise.hf")
    elif done.stock is not None:
        out.print("transformers loads it as deepseek_v3; headwise.optimize(model) makes it attend to its latents")
    for note in done.notes:
        out.print(f"note: {note}", markup=False)
    if done.evaluation is not None:
        show_text(done.evaluation, columns=("converted", "original"))
