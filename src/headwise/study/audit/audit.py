"""`audit`: test every claim of the guides that headwise began with, and say which hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.base.progress import Progress, silent
from headwise.base.type_checks import typed
from headwise.errors import ArgumentError
from headwise.measure.timing.machine import machine, versions
from headwise.study.audit.claim import Claim, Judged
from headwise.study.audit.claims import all_claims
from headwise.study.audit.effort import QUICK, Effort, working

AUDITING = "auditing"
"""The name of the stage, for progress."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Every claim with its verdict.

    Attributes:
        claims: in the order of their names.
        quick: whether conversions were calibrated and measured on little text.
        seconds: it took.
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
            "machine": machine("cpu"),
            "versions": versions(),
        }


@typed
def audit(
    only: Sequence[str] | None = None,
    *,
    quick: bool = False,
    trained: str | Path | None = None,
    progress: Progress = silent,
) -> Audit:
    """Test the claims of the five guides that headwise began with, and judge them by what is found.

    For example ``audit(["C5", "C14"]).claim("C14").verdict`` is ``"wrong"``.

    Claims about time are measured on this machine. Those about quality convert SmolLM2-135M, and cannot be tested
    where its package is not installed.

    Args:
        only: names of claims, such as ``C5`` or ``section 2``; all when None.
        quick: calibrate and evaluate on little text, to be done within ten minutes.
        trained: the file that `headwise.study.audit.training` wrote of decoders trained from scratch.
        progress: told of each claim.

    Raises:
        ArgumentError: there is no such claim, or no such file.
    """
    start, claims = time.perf_counter(), chosen(only)
    if trained is not None and not Path(trained).is_file():
        raise ArgumentError("trained", str(trained), "must be a file that headwise audit --train wrote")
    work = replace(QUICK if quick else Effort(), trained=None if trained is None else Path(trained))
    judged = []
    with working(work):
        for index, claim in enumerate(claims):
            progress(AUDITING, index, len(claims))
            judged.append(claim.run())
    progress(AUDITING, len(claims), len(claims))
    return Audit(claims=tuple(judged), quick=quick, seconds=time.perf_counter() - start)


def chosen(only: Sequence[str] | None) -> tuple[Claim, ...]:
    """The claims of these names, in their own order; all when None.

    Raises:
        ArgumentError: there is no such claim.
    """
    claims = all_claims()
    known = {claim.id for claim in claims}
    for name in only or ():
        if name not in known:
            raise ArgumentError("claim", name, f"must be one of {', '.join(claim.id for claim in claims)}")
    return claims if only is None else tuple(claim for claim in claims if claim.id in only)
