"""How long-running functions tell their caller how far they are."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are finished, and how many there are."""


def silent(stage: str, done: int, total: int) -> None:
    """The default: nobody is watching."""
