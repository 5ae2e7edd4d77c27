"""How much work an audit does, and what it trained: settings that all its checks read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Effort:
    """The work of one audit.

    Attributes:
        calibration_tokens: of a text that conversions are calibrated on.
        windows: of text that perplexity is measured on.
        trained: the file with the losses of decoders that were trained from scratch; None where none were.
    """

    calibration_tokens: int = 16_384
    windows: int = 12
    trained: Path | None = None


QUICK = Effort(calibration_tokens=2048, windows=4)
"""For an answer within ten minutes on two cores."""

_CURRENT: ContextVar[Effort] = ContextVar("effort", default=QUICK)


def effort() -> Effort:
    """The work of the audit that is running. For example ``effort().windows``."""
    return _CURRENT.get()


@contextmanager
def working(value: Effort) -> Iterator[None]:
    """A block whose checks do so much work."""
    token = _CURRENT.set(value)
    try:
        yield
    finally:
        _CURRENT.reset(token)
