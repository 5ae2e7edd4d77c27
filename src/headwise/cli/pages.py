"""Web pages that commands write beside what they print: refused before any work, written after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headwise.cli.app import out
from headwise.errors import HeadwiseError, naming

if TYPE_CHECKING:
    from headwise.costs.prediction import Device
    from headwise.decide.advice import Measured, Question
    from headwise.decide.report import Section
    from headwise.models.specs import ModelSpec

Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a web page.")]


def refuse_no_page(html: Path | None, *, has_plots: bool = True) -> None:
    """Refuse a page that cannot be made or written, before any work; nothing where none is asked for."""
    from headwise.base.disk import refuse_no_file
    from headwise.base.pages import refuse_no_matplotlib

    if html is not None:
        if has_plots:
            refuse_no_matplotlib("html", str(html))
        refuse_no_file("html", html)


def write_page(html: Path, text: str, *, is_silent: bool = False) -> None:
    """Write a page in one step, so that no half of it is left, and say so."""
    from headwise.base.disk import storage_errors, write_among_others

    with storage_errors("html", html):
        write_among_others(html, text.encode())
    if not is_silent:
        out.print(f"wrote {escape(str(html))}", soft_wrap=True)


def first_question(model: ModelSpec, *, context: int = 4096, batch: int = 1, dtype: str = "bfloat16") -> Question:
    """What a page begins with where a command names no device; its reader may choose another."""
    from headwise.costs.prediction import Pass, device
    from headwise.decide.advice import Question
    from headwise.decide.report import DEFAULT_HARDWARE

    most = model.body.positions if model.body is not None and model.body.positions else context
    with naming(total="context"):
        step = Pass(batch=batch, total=min(context, most), dtype=dtype)
    return Question(hardware=device(DEFAULT_HARDWARE), step=step)


def model_page(
    source: str,
    model: ModelSpec,
    question: Question,
    *,
    measured: Mapping[str, Measured] | None = None,
    documents: Sequence[Mapping[str, Any]] = (),
    hardware: Mapping[str, Device] | None = None,
) -> str:
    """The page of a model with the results of a command below it; of results alone where its body is not known."""
    from headwise import __version__
    from headwise.decide.report import measured_steps, page, page_data, sections

    results: list[Section] = [section for document in documents for section in sections(document)]
    notes: list[str] = []
    try:
        found = page_data(
            model, question, measured or {}, source=source, hardware=hardware, steps=measured_steps(documents, source)
        )
    except HeadwiseError as error:
        if not results:
            raise
        notes, found = [f"the model is not shown: {error}"], None
    return page(found, results, title="" if found else Path(source).name, notes=notes, version=__version__)
