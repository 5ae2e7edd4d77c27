"""Escape the control characters of text from files before it reaches a terminal."""

from __future__ import annotations

import re
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# C0 (except tab and newline), DEL and C1 can move the cursor, recolour or rename a terminal; the others change the
# direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Write the control characters of a text as escapes such as ``\\x1b``."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_json(document: str) -> str:
    """Write the control characters of a JSON document as escapes such as ``\\u009b``, which JSON readers undo."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


class PrintableConsole(Console):
    """A rich console that escapes control characters of the text; rich adds its own for colours afterwards."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape and render a string; rich calls this for every string, in tables too."""
        return super().render_str(printable(text), **options)

    def print_table(self, table: Table, columns: int) -> None:
        """Print a table in up to so many columns, where no terminal limits them."""
        before = self._width
        if not self.is_terminal:
            self._width = max(self.width, columns)
        try:
            self.print(table)
        finally:
            self._width = before

    def lead_to(self, file: IO[str] | None) -> None:
        """Print to a file from now on, or when None to the current standard stream."""
        self._file = file
