"""Text out of files, as a terminal may have it."""

from __future__ import annotations

import re
from typing import IO, Any

from rich.console import Console
from rich.text import Text

# Tab and newline stay. C0, DEL and C1 move the cursor, recolour or rename a terminal; the others turn text around.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with its control characters written as ``\\x1b``."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PrintableConsole(Console):
    """A console that lets no control character of a text through; its own colours it adds later."""

    def render_str(self, text: str, **options: Any) -> Text:
        """As `rich.console.Console`, through which every string goes, those in tables too."""
        return super().render_str(printable(text), **options)

    def lead_to(self, file: IO[str] | None) -> None:
        """Print to a file from now on; to the standard stream of the moment when None."""
        self._file = file
