"""``headwise design``: what to build, and how to store its cache, where a model does not exist yet."""

from __future__ import annotations

from typing import Annotated

import typer

from headwise.base.tables import count_text
from headwise.cli.advice import Engine, Goal, Hardware, answer, asked
from headwise.cli.app import DECIDE, Json, app
from headwise.cli.options import Batch, Context, Dtype, HardwareFile, Ranks, Usable
from headwise.cli.pages import Html, Plot, refuse_no_page, refuse_no_plot

_SIZES = "Sizes of the model"


@app.command(
    epilog="Example: headwise design --hidden-size 4096 --num-heads 32 --hardware h100 --context 8192 --batch 32",
    rich_help_panel=DECIDE,
)
def design(
    parameters: Annotated[
        int | None, typer.Option(help="About so many, in the place of a hidden size.", rich_help_panel=_SIZES)
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Of a llama.", rich_help_panel=_SIZES)] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.", rich_help_panel=_SIZES)] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="As many by default.", rich_help_panel=_SIZES)] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Which need not divide the hidden size.", rich_help_panel=_SIZES)
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="Layers.", rich_help_panel=_SIZES)] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Of feed-forward networks.", rich_help_panel=_SIZES)
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="32,000 by default.", rich_help_panel=_SIZES)] = None,
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
            help="The largest rise of perplexity; none is known yet, so with a limit the cache stays as it is."
        ),
    ] = None,
    html: Html = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Recommend how to build a model that does not exist yet, and how to store its cache, on a device."""
    from headwise.costs.formulas.model import weights
    from headwise.decide.advice import design as designed

    sizes = {
        "parameters": parameters,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_layers": num_layers,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    model = designed(**{name: value for name, value in sizes.items() if value is not None})
    name = f"a design of {count_text(weights(model).total)} parameters, {model.num_layers} layers"
    model, question, notes = asked(
        model,
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
    refuse_no_page(html)
    refuse_no_plot(plot)
    answer(
        name,
        model,
        question,
        {},
        notes,
        hardware_file=hardware_file,
        html=html,
        plot=plot,
        as_json=as_json,
        is_design=True,
    )
