"""``headwise report``: one web page of a model and of everything that was measured of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.app import DECIDE, Json, app, emit, out
from headwise.cli.pages import Html, first_question, refuse_no_page, write_page


@app.command(epilog="Example: headwise report ./out --html report.html", rich_help_panel=DECIDE)
def report(
    folder: Annotated[
        str,
        typer.Argument(
            help="Of a model, of a frontier, or of results; or a .gguf, a config.json or a catalog name.",
            show_default=False,
        ),
    ],
    html: Html = None,
    source: Annotated[str | None, typer.Option(help="The model that the results are of.")] = None,
    hardware: Annotated[str | None, typer.Option(help="The device that the page begins with.")] = None,
    hardware_file: Annotated[Path | None, typer.Option(help="A TOML file with devices of your own.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of each sequence that it begins with.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences that it begins with.")] = 1,
    as_json: Json = False,
) -> None:
    """Write one web page: what to do with a model's cache, and every result that its folder holds."""
    from headwise import __version__
    from headwise.costs.prediction import device, devices
    from headwise.decide.advice import USUAL_LOSS
    from headwise.decide.report import page, page_data, read_folder

    file = html or (Path(folder) if Path(folder).is_dir() else Path()) / "report.html"
    results = read_folder(folder, source=source)
    refuse_no_page(file)
    data = None
    if results.model is not None:
        question = first_question(results.model, context=context, batch=batch)
        if results.measured:
            question = replace(question, max_quality_loss=USUAL_LOSS, is_usual=True)
        if hardware is not None:
            question = replace(question, hardware=device(hardware, hardware_file))
        data = page_data(
            results.model,
            question,
            results.measured,
            source=results.source,
            hardware=devices(hardware_file),
            steps=results.steps,
            converted=results.converted,
        )
    title = "" if data else Path(results.source).name
    text = page(data, results.sections, title=title, notes=results.notes, version=__version__)
    write_page(file, text, is_silent=as_json)
    titles = [section.table.title for section in results.sections]
    if as_json:
        emit({"html": str(file), "source": results.source, "sections": titles, "notes": list(results.notes)})
        return
    for line in (*titles, *results.notes):
        out.print(f"  {line}", markup=False, soft_wrap=True)
