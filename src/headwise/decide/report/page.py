"""The page of a model: one HTML file that needs nothing else, with controls that compute it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from headwise.base.documents import refuse_no_plotly, web_page
from headwise.decide.report.sections import Section, html

DEFAULT_HARDWARE = "h100"
"""The device that a page begins with where a command names none; the reader may choose another."""


def page(
    data: Mapping[str, Any] | None,
    results: Sequence[Section] = (),
    *,
    title: str = "",
    notes: Sequence[str] = (),
    version: str = "",
) -> str:
    """The page of a model, of results, or of both.

    For example ``page(page_data(read_spec("llama-3-8b"), question, {}))``.

    Args:
        data: of `page_data`; None for results alone.
        results: sections below the model.
        title: of the page; the model's name when empty.
        notes: above all else.
        version: of headwise.

    Raises:
        MissingExtraError: plotly, whose script the page carries, is not installed.
    """
    refuse_no_plotly("html", True)
    from plotly.offline import get_plotlyjs

    model, parts = "", [get_plotlyjs()]
    carried: dict[str, Any] = {"figures": [section.figure for section in results]}
    if data is not None:
        shares = data["efficiency"]
        model = _part("model.html").format(
            compute=shares["compute"],
            memory=shares["memory"],
            microseconds=1e6 * shares["seconds"],
        )
        parts += [_part("arithmetic.js")]
        carried |= data
    figures = (
        f'<div class="plot" id="figure-{index}"></div>' if each.figure else "" for index, each in enumerate(results)
    )
    body = "".join(
        [
            *(f"<p>{escape(note)}</p>\n" for note in notes),
            model,
            *(f"{html(section)}\n{figure}\n" for section, figure in zip(results, figures, strict=True)),
            f'<p class="small">headwise {escape(version)}</p>\n' if version else "",
            f'<script type="application/json" id="data">{_embedded(carried)}</script>\n',
            *(
                f"<script>{text}</script>\n"
                for text in [*parts, _part("plots.js"), *([_part("page.js")] if data else [])]
            ),
        ]
    )
    name = title or f"{PurePath(carried.get('source', '')).name}: what to do with its cache"
    return web_page(name, body, _part("page.css"))


def _part(name: str) -> str:
    return (files("headwise.decide.report") / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element that it stands in, nor begin a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
