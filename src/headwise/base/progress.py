"""The callback by which long-running functions report their progress, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the number of its steps that are finished, and the number of all its steps."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress, the default."""


def untimed(progress: Progress) -> Progress:
    """The same progress, which is told nothing in advance: for one part of a larger work."""

    def report(stage: str, done: int, total: int) -> None:
        progress(stage, done, total)

    return report


@runtime_checkable
class TimedProgress(Protocol):
    """Progress that is told in advance how long each stage should take."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See `Progress`."""

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Take the seconds that each stage should take, in the order of the stages."""


@runtime_checkable
class TrainingProgress(Protocol):
    """Progress that is also told how a training goes."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See `Progress`."""

    def report_training(self, stage: str, *, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """Take the mean loss of the last steps, the pace, and the seconds that the steps after them should take."""


class TimeLeft:
    """The time that is left of stages that follow each other.

    It starts at what is expected; the pace of what is done corrects it. Steps that are finished when their stage
    begins, as in a run that goes on after a kill, say nothing about the pace.

    Args:
        seconds: what each stage should take, in their order.
        clock: the time in seconds.
    """

    TRUST = 0.05
    """The share of all the expected time after which the measured pace counts as much as the expected one."""

    def __init__(self, seconds: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._expected, self._clock = dict(seconds), clock
        self._finished = dict.fromkeys(seconds, 0.0)  # the part of each stage
        self._begun = dict.fromkeys(seconds, 0.0)  # that part when the stage began
        self._stage: str | None = None
        self._start = self._last = clock()
        self._left = sum(seconds.values())

    def report(self, stage: str, done: int, total: int) -> None:
        """Take notice of progress; stages of which nothing is expected are ignored."""
        if stage not in self._expected:
            return
        part = done / total if total else 1.0
        if stage != self._stage:
            if self._stage is None:
                self._start = self._clock()
            self._stage, self._begun[stage] = stage, part
            for earlier in self._expected:  # what a stage before this one did not do, it will not do any more
                if earlier == stage:
                    break
                if self._finished[earlier] < 1:
                    self._begun[earlier] += 1 - self._finished[earlier]
                    self._finished[earlier] = 1.0
        self._finished[stage] = part
        self._last = self._clock()
        trusted = self.TRUST * sum(self._expected.values())
        worked = sum(self._expected[name] * (self._finished[name] - self._begun[name]) for name in self._expected)
        pace = (self._last - self._start + trusted) / (worked + trusted) if worked + trusted > 0 else 1.0
        self._left = pace * sum(self._expected[name] * (1 - self._finished[name]) for name in self._expected)

    @property
    def seconds(self) -> float:
        """The seconds that are left."""
        return max(self._left - (self._clock() - self._last), 0.0)
