"""Text from files without control characters, for terminals, pages, pictures and logs."""

from __future__ import annotations

import re

# C0 (except tab and newline), DEL and C1 can move the cursor, recolour or rename a terminal; the others change the
# direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Write the control characters of a text as escapes such as ``\x1b``.

    For example ``printable("\x1b[31mred")`` is ``"\\x1b[31mred"``.

    Args:
        text: any; tabs, newlines and letters of all languages stay as they are.
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_json(document: str) -> str:
    r"""Write the control characters of a JSON document as escapes such as ``\u009b``, which JSON readers undo.

    For example ``printable_json('"\x9b"')`` is ``'"\\u009b"'``.

    Args:
        document: JSON.
    """
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", document)
