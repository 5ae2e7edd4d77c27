"""The callback by which long-running functions report their progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the number of its steps that are finished, and the number of all its steps."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress, the default."""
