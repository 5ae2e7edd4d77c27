"""``headwise prepare``: a model that loses less in an engine's own small cache."""

from __future__ import annotations

import shlex
from statistics import geometric_mean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.options.convert import PrepareOptions
from headwise.base.tables import Table
from headwise.cli.app import CHANGE, SOURCES, Json, app, emit, out, progress_bar, say
from headwise.cli.options import takes_options

if TYPE_CHECKING:
    from headwise.conversion.preparation import Preparation
    from headwise.conversion.preparation.proof import Loss


@app.command(epilog="Example: headwise prepare model.gguf prepared.gguf --for llama.cpp:q4_0", rich_help_panel=CHANGE)
@takes_options(PrepareOptions)
def prepare(
    source: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    output: Annotated[
        str,
        typer.Argument(metavar="OUT", help="The .gguf to write, or of a folder also the folder.", show_default=False),
    ],
    options: PrepareOptions,
    as_json: Json = False,
) -> None:
    """Change a model's queries and keys, and nothing that it computes, so that an engine's small cache loses less."""
    from headwise.conversion.preparation import prepare as write_prepared
    from headwise.serving.programs import serving_commands

    with progress_bar() as progress:
        made = write_prepared(source, output, options, progress=progress)
    if as_json:
        emit(made.to_dict())
        return
    out.print(f"[bold]{escape(source)}[/bold] → {escape(made.output)}, {made.seconds:,.0f} s", soft_wrap=True)
    for cache in made.cache:
        ratios = {layer.layer: layer.loss[cache] for layer in made.layers if cache in layer.loss}
        mean, most = geometric_mean(ratios.values()), max(ratios, key=ratios.__getitem__)
        say(
            f"{cache}: scores lose ×{mean:.3f} of what they lost (geometric mean of {len(ratios)} layers), and"
            f" ×{ratios[most]:.3f} in layer {most}, where least is gained"
        )
    _show_proof(made)
    for note in made.notes:
        say(f"note: {note}")
    say("serve it:")
    for line in dict.fromkeys(line for cache in made.cache for line in serving_commands(made.output, cache)):
        say(f"  {line}")


def _show_proof(made: Preparation) -> None:
    """Print what was found out of the prepared model."""
    proof = made.proof
    shifted = " with shifted biases" if any(layer.off for layer in made.layers) else ""
    how = f"up to {proof.products:.1g} of their size" if proof.products else "exactly"
    say(f"read again from the disk, products of queries and keys are the source's{shifted} {how}")
    for difference in proof.differences:
        say(
            f"on {difference.tokens} tokens, log-probabilities in {difference.dtype} are the source's up to"
            f" {difference.largest:.1g} (mean KL {difference.kl:.1g})"
        )
    if proof.text is None:
        say("what it loses is measured with --evaluate TEXT, or by")
        words = ["headwise", "evaluate", made.output, "--against", made.source, "--cache", made.cache[0]]
        out.print(f"  {shlex.join(words)} --text TEXT", markup=False, soft_wrap=True)
    if not proof.caches:
        return
    place = f"{proof.tokens:,} tokens of {escape(proof.text or '')}, windows of {proof.window}"
    out.print(f"{place}, beside the source with a full cache:", soft_wrap=True)
    table = Table(["perplexity (KL in nats a token)", "as it is", "prepared"])
    for loss in proof.caches:
        where = "simulated" if loss.engine is None else f"in {loss.engine}"
        table.add(f"{loss.cache} {where}", *(_loss(side) for side in (loss.before, loss.after)))
    out.print_table(table)


def _loss(loss: Loss) -> str:
    return f"×{loss.perplexity_ratio:.4f} ({loss.kl:.4f})"
