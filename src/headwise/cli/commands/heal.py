"""``headwise heal``: train a converted model until it behaves like its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.options.heal import HealOptions
from headwise.base.tables import count_text
from headwise.cli.app import CHANGE, Json, app, emit, out, progress_bar
from headwise.cli.options import show_text, takes_options
from headwise.cli.torchrun import as_one_process

if TYPE_CHECKING:
    from headwise.conversion.healing import Healing


@app.command(
    epilog="Example: headwise heal ./half ./healed --teacher smollm2-135m --text text.txt --tokens 200000",
    rich_help_panel=CHANGE,
)
@takes_options(HealOptions)
def heal(
    model: Annotated[
        str, typer.Argument(help="A converted or prepared model: a folder or a .gguf.", show_default=False)
    ],
    output: Annotated[
        str, typer.Argument(metavar="OUT", help="The folder, or the .gguf, to write.", show_default=False)
    ],
    options: HealOptions,
    as_json: Json = False,
) -> None:
    """Train a converted or prepared model until it behaves like its source, and write the result in its format."""
    with as_one_process(), progress_bar() as progress:
        from headwise.conversion.healing import heal as heal_model

        report = heal_model(model, output, options, progress=progress)
    if as_json:
        emit(report.to_dict())
    else:
        _show(report)


def _show(report: Healing) -> None:
    name = escape(report.output)
    taught = report.texts if report.objective == "cross-entropy" else ()
    taught += (report.teacher,) if report.learns_of_teacher else ()
    out.print(f"[bold]{escape(report.model)}[/bold] learnt from {escape(', '.join(taught))}, in {name}")
    speed = "" if report.tokens_per_second is None else f", {report.tokens_per_second:,.0f} tokens/s"
    out.print(f"{report.tokens:,} tokens in {report.steps:,} steps, {report.seconds:,.0f} s{speed}")
    out.print(f"trained        {report.trained}: {count_text(report.trained_parameters)} parameters")
    if report.cache is not None:
        out.print(f"rounded as     {report.cache}", markup=False)
    first, last = report.held_out[0][1], report.held_out[-1][1]
    end = f"; {last:.4f} at the end" if last > report.kept_loss else ""
    kept = f"after step {report.best_step:,}, whose weights are kept"
    out.print(f"held-out loss  {first:.4f} → {report.kept_loss:.4f} nats {kept}{end}", soft_wrap=True)
    if report.stopped:
        out.print("stopped early: the held-out loss fell no more")
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    if report.before is not None and report.after is not None:
        for old, new in zip(report.before.texts, report.after.texts, strict=True):
            ratios = f"{old.perplexity_ratio:.4f} → {new.perplexity_ratio:.4f}"
            out.print(f"{new.text}: perplexity ratio {ratios} · KL {old.kl:.4f} → {new.kl:.4f}", markup=False)
        show_text(report.after, columns=("healed", "teacher"))
