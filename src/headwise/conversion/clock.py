"""Where a conversion's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds spent on each of several kinds of work.

    Attributes:
        seconds: by kind, in the order they were met.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """Add the time that a block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - start)

    def add(self, kind: str, seconds: float) -> None:
        """Add what was measured elsewhere."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
