"""The callback by which long-running functions report their progress, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the number of its steps that are finished, and the number of all its steps."""

_TRUSTED = 0.2
"""The part of the work after which only the measured speed counts, and no longer the one that was expected."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress, the default."""


@runtime_checkable
class ShowsTimeLeft(Protocol):
    """A `Progress` that wants to know in advance how long the stages take."""

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Be told the seconds that each stage is expected to take, in their order."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See `Progress`."""


class TimeLeft:
    """The time that several stages still take, from what they were expected to take and how fast they are.

    For example ``TimeLeft({"measuring sensitivities": 20.0, "converting": 120.0})``.

    Args:
        seconds: the seconds that each stage is expected to take, in their order.
        clock: the current time, in seconds.
    """

    def __init__(self, seconds: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = dict(seconds), clock
        self._parts = dict.fromkeys(self._seconds, 0.0)
        self._start = clock()

    def update(self, stage: str, done: int, total: int) -> None:
        """Note the progress of a stage; stages before it are then finished. Other stages are ignored."""
        if stage not in self._parts:
            return
        for earlier in self._parts:
            if earlier == stage:
                break
            self._parts[earlier] = 1.0
        self._parts[stage] = done / total if total else 1.0

    def seconds(self) -> float:
        """The seconds that are left."""
        total = sum(self._seconds.values())
        finished = sum(seconds * self._parts[stage] for stage, seconds in self._seconds.items())
        if finished <= 0:
            return total
        pace = (self._clock() - self._start) / finished  # 1 where all is as fast as expected
        trust = min(finished / (_TRUSTED * total), 1.0)
        return (total - finished) * (trust * pace + 1 - trust)
