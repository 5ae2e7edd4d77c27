"""`audit`: check the guides' claims one by one, with little or much work, and make a page of the verdicts.

The amount of work and the file of trained decoders are settings that all checks of an audit read (`Effort`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.base.pages import Part, Text, web_page
from headwise.base.progress import Progress, silent
from headwise.base.tables import Cell, Table
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError
from headwise.measure.timing.machine import describe_machine, installed_versions
from headwise.study.audit.claim import Claim, Judged
from headwise.study.audit.claims import all_claims


@dataclass(frozen=True)
class Effort:
    """The work of one audit.

    Attributes:
        calibration_tokens: the number of tokens that conversions are calibrated on.
        windows: the number of windows that perplexity is measured on.
        trained: the file with the losses of decoders that were trained from scratch; None where none were.
    """

    calibration_tokens: int = 16_384
    windows: int = 12
    trained: Path | None = None


QUICK = Effort(calibration_tokens=2048, windows=4)
"""The work of an audit that takes ten minutes on two cores."""

_CURRENT: ContextVar[Effort] = ContextVar("effort", default=QUICK)


def current_effort() -> Effort:
    """The work of the audit that is running. For example ``current_effort().windows``."""
    return _CURRENT.get()


@contextmanager
def with_effort(value: Effort) -> Iterator[None]:
    """A context in which checks do the work of ``value``."""
    token = _CURRENT.set(value)
    try:
        yield
    finally:
        _CURRENT.reset(token)


AUDITING = "auditing"
"""The name of the stage, for progress."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Every claim with its verdict.

    Attributes:
        claims: the claims with their verdicts, in the order of their names.
        quick: whether conversions were calibrated and measured on little text.
        seconds: the seconds that the audit took.
    """

    claims: tuple[Judged, ...]
    quick: bool
    seconds: float

    def claim(self, name: str) -> Judged:
        """One claim by its name, such as ``C5``."""
        return next(judged for judged in self.claims if judged.claim.id == name)

    def to_dict(self) -> dict[str, Any]:
        """The audit as JSON-able values: claims by their names, the machine and the versions."""
        return {
            "quick": self.quick,
            "seconds": self.seconds,
            "claims": {judged.claim.id: judged.to_dict() for judged in self.claims},
            "machine": describe_machine(),
            "versions": installed_versions(),
        }


@checked_types
def audit(
    only: Sequence[str] | None = None,
    *,
    quick: bool = False,
    trained: str | Path | None = None,
    progress: Progress = silent,
) -> Audit:
    """Test the claims of the five guides that headwise began with, and give each its verdict.

    For example ``audit(["C5", "C14"]).claim("C14").verdict`` is ``"wrong"``.

    Claims about time are measured on this machine. Those about quality convert SmolLM2-135M, and cannot be tested
    where its package is not installed.

    Args:
        only: the names of claims to test, such as ``C5`` or ``section 2``; all when None.
        quick: whether to calibrate and evaluate on little text, to be done within ten minutes.
        trained: the file that `headwise.study.audit.training` wrote of decoders trained from scratch.
        progress: the callback that reports each claim.

    Raises:
        ArgumentError: there is no such claim, or no such file.
    """
    start, claims = time.perf_counter(), select_claims(only)
    if trained is not None and not Path(trained).is_file():
        raise ArgumentError("trained", str(trained), "must be a file that headwise audit --train wrote")
    work = replace(QUICK if quick else Effort(), trained=None if trained is None else Path(trained))
    judged = []
    with with_effort(work):
        for index, claim in enumerate(claims):
            progress(AUDITING, index, len(claims))
            judged.append(claim.run())
    progress(AUDITING, len(claims), len(claims))
    return Audit(claims=tuple(judged), quick=quick, seconds=time.perf_counter() - start)


def select_claims(only: Sequence[str] | None) -> tuple[Claim, ...]:
    """The claims with the given names, in the order of all claims; all of them when None.

    Raises:
        ArgumentError: there is no such claim.
    """
    claims = all_claims()
    known = {claim.id for claim in claims}
    for name in only or ():
        if name not in known:
            raise ArgumentError("claim", name, f"must be one of {', '.join(claim.id for claim in claims)}")
    return claims if only is None else tuple(claim for claim in claims if claim.id in only)


def page(audit: Audit, command: str) -> str:
    """Make the page: a row for each claim with its verdict, and below every statement with what was found.

    For example ``page(audit(["C14"]), "headwise audit --claim C14")``.

    Args:
        audit: the audit.
        command: the command that made the audit.
    """
    verdicts = Table(["claim", "printed", "verdict"], words=(0, 1, 2))
    for judged in audit.claims:
        link = Cell(judged.claim.id, link=f"#{_anchor(judged)}")
        verdicts.add(link, judged.claim.says, Cell(judged.verdict, mark="verdict"))
    machine = {**describe_machine(), **installed_versions()}
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    lead = (
        "What five guides to attention mechanisms print, and what is so. A verdict follows from its statements: a "
        "number passes if it differs by no more than a unit of the last digit that is printed."
    )
    parts = [Text(lead), verdicts, *(part for judged in audit.claims for part in _evidence(judged))]
    return web_page("headwise audit", [*parts, Text(f"{facts}; {audit.seconds:.0f} s"), Text(command, "code")])


def _anchor(judged: Judged) -> str:
    return judged.claim.id.replace(" ", "-")


def _evidence(judged: Judged) -> list[Part]:
    claim = judged.claim
    table = Table(["statement", "printed", "found", "holds"], words=(0, 1, 2, 3))
    for result in judged.results:
        holds = {True: Cell("yes"), False: Cell("no", mark="no"), None: Cell(result.reason)}[result.holds]
        table.add(result.name, result.printed, result.shown, holds)
    title = Text(f"{claim.id}, {claim.guide}: {claim.says}", "heading", anchor=_anchor(judged))
    return [title, Text(f"{claim.how}."), Text(f"{judged.sentence}.", "strong"), table]
