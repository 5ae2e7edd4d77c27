"""Web pages: one file each that needs no other, by one template and in one style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from headwise.base.tables import Table

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Text:
    """A paragraph, for example ``Text("What to do", "heading")``.

    Attributes:
        text: plain.
        kind: how it is set.
        anchor: what a cell's link leads to.
    """

    text: str
    kind: Literal["plain", "small", "heading", "strong", "code"] = "plain"
    anchor: str = ""


@dataclass(frozen=True)
class Picture:
    """A plot within a page.

    Attributes:
        svg: the drawing, as `headwise.base.plots.as_svg` makes it.
        caption: what the plot shows, in words, for a reader who hears the page.
        name: the name of the element in the page.
        is_wide: whether it keeps its size, and is scrolled on a narrow screen, as many names in it ask for.
    """

    svg: str
    caption: str
    name: str = ""
    is_wide: bool = False


Part = Text | Table | Picture | Sequence[str]
"""What a page consists of; a sequence of texts is a list of points."""


def web_page(title: str, parts: Sequence[Part], template: str = "base/page.html", **values: Any) -> str:
    """A self-contained HTML page that follows the reader's light or dark colour scheme; all texts are escaped.

    For example ``web_page("Results", [Text("What was measured."), Table(["", "ms"], [("one", "1.5")])])``.

    Args:
        title: the title of the window and of the heading.
        parts: below the heading, in their order.
        template: the Jinja template within the package; another one than the default extends it.
        values: the values that such a template takes.
    """
    return _environment().get_template(template).render(title=title, parts=parts, **values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("headwise", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
