"""``headwise advise``: what to do with a model's cache on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.advice import Engine, Goal, Hardware, answer, asked
from headwise.cli.app import DECIDE, SOURCES_OR_NAME, Json, app, progress_bar
from headwise.cli.options import Batch, Context, Dtype, HardwareFile, Ranks, Usable
from headwise.cli.pages import Html, Plot, refuse_no_page, refuse_no_plot
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.decide.advice import Measured, Question
    from headwise.models.specs import ModelSpec


@app.command(
    epilog="Example: headwise advise llama-3-8b --hardware h100 --context 32768 --batch 16", rich_help_panel=DECIDE
)
def advise(
    source: Annotated[str, typer.Argument(help=SOURCES_OR_NAME, show_default=False)],
    hardware: Hardware = None,
    hardware_file: HardwareFile = None,
    context: Context = 4096,
    batch: Batch = 1,
    goal: Goal = "balanced",
    dtype: Dtype = None,
    ranks: Ranks = 1,
    usable: Usable = 0.9,
    engine: Engine = None,
    max_quality_loss: Annotated[
        float | None,
        typer.Option(
            help="The largest known rise of perplexity, such as 0.05, which it is with --measured or --calibrate."
        ),
    ] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(help="A folder that headwise frontier or convert wrote of this model.")
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="A text to predict on what formats of the cache lose, by running the model: minutes."
        ),
    ] = None,
    html: Html = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Recommend a mechanism, a size and bits for a model's cache, or say that nothing should be changed."""
    from headwise.decide.advice import USUAL_LOSS
    from headwise.models.specs import read_spec

    model, question, notes = asked(
        read_spec(source),
        hardware=hardware,
        hardware_file=hardware_file,
        context=context,
        batch=batch,
        dtype=dtype,
        ranks=ranks,
        usable=usable,
        goal=goal,
        engine=engine,
        max_quality_loss=max_quality_loss,
    )
    if (measured or calibrate) and max_quality_loss is None:
        question = replace(question, max_quality_loss=USUAL_LOSS, is_usual=True)
    refuse_no_page(html)
    refuse_no_plot(plot)
    points, more = _known(source, model, question, measured or (), calibrate or ())
    answer(
        source,
        model,
        question,
        points,
        (*notes, *more),
        hardware_file=hardware_file,
        html=html,
        plot=plot,
        as_json=as_json,
    )


def _known(
    source: str, model: ModelSpec, question: Question, measured: Sequence[Path], texts: Sequence[str]
) -> tuple[dict[str, Measured], tuple[str, ...]]:
    """What was measured, and with texts what formats of which nothing is known are predicted to lose; and notes."""
    from headwise.decide.advice import advise_on, predictable, read_measured, read_points

    points = read_measured(measured, model)
    if not texts:
        return points, ()
    targets = predictable(model, points, question.engine, question.hardware)
    if not targets:
        rule = "predicts nothing: all that is tried is known already, or headwise does not round as its engine does"
        raise ArgumentError("calibrate", texts[0], rule)
    advise_on(model, question, points)  # refuses impossible questions before the work
    with progress_bar() as progress:
        from headwise.conversion.frontiers import quick_frontier

        result = quick_frontier(source, calibrate=texts, targets=targets, progress=progress)
    read = f"{result.tokens:,} tokens of {', '.join(result.calibrate)}"
    return points | read_points(result.to_dict(), model), (f"predicted from {read}", *result.notes)
