"""Results as JSON, and as web pages."""

from __future__ import annotations

import importlib.util
import json
import math
from contextlib import suppress
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import Any

from headwise.errors import MissingExtraError

MEASURED = "measured.json"
"""The file of a converted folder with what its conversion measured of it."""

FRONTIER = "frontier.json"
"""The file of a frontier's folder with what it measured."""

PREDICTED = "predicted.json"
"""The file of a frontier's folder with what formats of the cache are predicted to lose."""

MIGRATION = "migration.json"
"""The file of a model folder that holds the sizes that `headwise.migrate` tried."""

HEALING = "healing.json"
"""The file of a healed folder that holds the report of its training."""

REPORT_PIP = "pip install 'headwise[report]'"
"""What installs what pages with plots need."""

RECORDS = (MEASURED, MIGRATION, HEALING)
"""What was measured of a model, which a model that is made of it does not inherit."""


def as_document(result: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON-able values, by name; nested results are converted by their ``to_dict``.

    Args:
        result: an instance of a dataclass.
    """
    return {field.name: plain(getattr(result, field.name)) for field in fields(result)}


def read_document(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file or it is not whole."""
    with suppress(OSError, ValueError):
        document = json.loads(file.read_bytes())
        if isinstance(document, dict):
            return document
    return None


def plain(value: Any) -> Any:
    """Convert a field of a result to JSON-able values, by its ``to_dict`` where it has one."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return as_document(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1, h2, p, li { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, li { color: color-mix(in srgb, CanvasText 78%, Canvas); }
ul { margin: 0; padding-left: 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid color-mix(in srgb, CanvasText 35%, Canvas); }
td { border-bottom: 1px solid color-mix(in srgb, CanvasText 12%, Canvas); }
th:first-child, td:first-child { text-align: left; }
"""


def web_page(title: str, body: str, style: str = "") -> str:
    """A self-contained HTML page that follows the reader's light or dark color scheme.

    Args:
        title: plain text, for the window and the heading.
        body: HTML below the heading.
        style: CSS rules besides those that all pages have.
    """
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def refuse_no_plotly(name: str, value: object) -> None:
    """Refuse a page without plotly, before any work.

    For example ``refuse_no_plotly("plot", True)``.

    Args:
        name: the option that asks for the page.
        value: of that option.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise MissingExtraError(name, value, f"needs the plotly package: {REPORT_PIP}; or go without it")
