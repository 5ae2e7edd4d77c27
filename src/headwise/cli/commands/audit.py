"""``headwise audit``: test the claims of the guides that headwise began with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.base.tables import Table
from headwise.cli.app import STUDY, Json, app, emit, out, progress_bar
from headwise.cli.pages import Html, refuse_no_page, write_page

if TYPE_CHECKING:
    from headwise.study.audit import Audit
    from headwise.study.audit.training import FromScratch

TRAINED = Path("headwise-trained.json")
"""The file of losses where the user names no other."""


@app.command(epilog="Example: headwise audit --quick --html audit.html", rich_help_panel=STUDY)
def audit(
    claim: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this claim, such as C5; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less text for conversions: done in ten minutes.")] = False,
    train: Annotated[
        bool, typer.Option("--train", help="First train small decoders of every mechanism from scratch: hours.")
    ] = False,
    trained: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Losses of those decoders; {TRAINED} when left out.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="TEXT", help="What to train on; Python's reference when left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Bytes of text that each decoder is trained on.", min=1)] = 500_000,
    seeds: Annotated[int, typer.Option(help="Decoders of each mechanism.")] = 3,
    device: Annotated[str | None, typer.Option(help="Device to train on, such as cuda.")] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Test every claim of the guides that headwise began with, and say which hold, with the evidence."""
    refuse_no_page(html, has_plots=False)
    from headwise.study.audit.audit import audit as run_audit
    from headwise.study.audit.audit import select_claims

    select_claims(claim)
    losses = trained or (TRAINED if train or TRAINED.is_file() else None)
    scratch: FromScratch | None = None
    with progress_bar() as progress:
        if train:
            from headwise.study.audit.training import train as train_decoders

            assert losses is not None
            scratch = train_decoders(losses, text=text, tokens=tokens, seeds=seeds, device=device, progress=progress)
        report = run_audit(claim, quick=quick, trained=losses, progress=progress)
    if as_json:
        emit(report.to_dict())
    else:
        if scratch is not None:
            _print_losses(scratch)
        _print(report)
    if html is not None:
        from headwise.study.audit.audit import page

        write_page(html, page(report, shlex.join(["headwise", *sys.argv[1:]])), is_silent=as_json)


def _print(report: Audit) -> None:
    table = Table(["claim", "what is printed, and what was found"], words=(0, 1), folded=(1,))
    for judged in report.claims:
        table.add(judged.claim.id, judged.claim.says)
        table.add("", judged.sentence, mark="bold")
    out.print_table(table)
    verdicts = [judged.verdict for judged in report.claims]
    said = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    out.print(f"{len(verdicts)} claims: {said}; {report.seconds:.0f} s. --json and --html have every statement.")


def _print_losses(scratch: FromScratch) -> None:
    table = Table(["trained from scratch", "cache", "nats a byte", "less MHA's", "± (95 %)"])
    for row in scratch.rows:
        difference, half = scratch.beside_mha(row.mechanism)
        cells = (f"{row.cache_values}", f"{row.loss:.4f}", f"{difference:+.4f}", f"{half:.4f}")
        table.add(row.mechanism, *cells)
    out.print_table(table)
    out.print(f"{scratch.tokens:,} bytes of {escape(scratch.text)} each; cache: numbers a layer and token")
