"""One table for the terminal, for Markdown and for web pages, and numbers as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Mark = Literal["", "bold", "faint"]
"""How a row is printed: as it is, standing out, or standing back."""


class Cell(str):
    """A cell of a table, with what only a web page shows of it.

    For example ``Cell("–", hint="not enough memory")``.

    Attributes:
        hint: a text that is shown where the pointer rests on the cell.
        mark: a class of the page's style.
        link: the place within the page that the text leads to.
    """

    hint: str
    mark: str
    link: str

    def __new__(cls, text: str, *, hint: str = "", mark: str = "", link: str = "") -> Cell:
        """A cell of a text; see the class."""
        made = super().__new__(cls, text)
        made.hint, made.mark, made.link = hint, mark, link
        return made


_UNESCAPED_BAR = re.compile(r"(?<!\\)((?:\\\\)*)\|")
"""A bar behind an even number of backslashes, which ends a cell in Markdown."""


@dataclass
class Table:
    """A table of plain texts, for example ``Table(["", "ms"], [("one", "1.5")]).markdown()``.

    Attributes:
        heading: the headings of the columns.
        rows: the cells of each; those that a row lacks at its end are empty.
        title: the heading above the table, on a web page.
        notes: sentences below the table on a web page.
        words: the columns of words, which are left-aligned; the others are of numbers.
        folded: the columns whose cells take several lines where a terminal is narrow.
        marks: the marks of some rows, by the row's index.
        gaps: the indexes of rows that have a gap above them.
    """

    heading: Sequence[str]
    rows: Sequence[tuple[str, ...]] = ()
    title: str = ""
    notes: Sequence[str] = ()
    words: Sequence[int] = (0,)
    folded: Sequence[int] = ()
    marks: dict[int, Mark] = field(default_factory=dict)
    gaps: set[int] = field(default_factory=set)

    def add(self, *cells: str, mark: Mark = "", gap: bool = False) -> None:
        """Add a row, for example ``table.add("one", "1.5", mark="bold")``.

        Args:
            cells: the cells of the row.
            mark: how it is printed.
            gap: whether there is a gap above it.
        """
        if mark:
            self.marks[len(self.rows)] = mark
        if gap:
            self.gaps.add(len(self.rows))
        self.rows = [*self.rows, cells]

    def markdown(self) -> str:
        """The table in Markdown, its cells as they are, but for ``|``."""
        rule = ["---" if index in self.words else "---:" for index in range(len(self.heading))]
        return "\n".join(
            "| " + " | ".join(_UNESCAPED_BAR.sub(r"\1\\|", cell) for cell in row) + " |"
            for row in (self.heading, rule, *self.rows)
        )

    def terminal(self) -> RichTable:
        """The table for a terminal, by rich, which is to escape control characters itself."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table as RichTable

        made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index, name in enumerate(self.heading):
            is_folded = index in self.folded
            made.add_column(
                escape(name),
                justify="left" if index in self.words else "right",
                no_wrap=not is_folded,
                overflow="fold" if is_folded else "ellipsis",
            )
        styles = {"bold": "bold", "faint": "dim"}
        for index, row in enumerate(self.rows):
            if index in self.gaps:
                made.add_section()
            made.add_row(*map(escape, row), style=styles.get(self.marks.get(index, "")))
        return made


def bytes_text(count: float) -> str:
    """Format a number of bytes with a binary unit, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(count) < 1024 or unit == "PiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def count_text(count: float) -> str:
    """Format a large number with a decimal prefix, such as ``134.5 M``; whole below 1000, such as ``450``."""
    if abs(count) < 1000 and count == int(count):
        return f"{count:.0f}"
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if abs(count) < 1000 or prefix == "E":
            return f"{count:.1f} {prefix}".rstrip()
        count /= 1000
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """Format a time in milliseconds, such as ``1.50 ms``, or from a second on in seconds."""
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"
