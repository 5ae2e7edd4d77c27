"""A claim: what a guide says, the checks that test it, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headwise.study.audit.check import Check, Result

Verdict = Literal["holds", "holds only if", "wrong", "cannot be tested here"]

SHOWN = 4
"""The most wrong statements that a verdict names; the evidence has them all."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a guide says.

    Attributes:
        id: such as ``C1``.
        guide: where it is printed.
        says: the claim in a sentence.
        how: how it is tested, in a few words.
        checks: its statements.
    """

    id: str
    guide: str
    says: str
    how: str
    checks: Sequence[Check]

    def run(self) -> Judged:
        """Make all checks."""
        return Judged(claim=self, results=tuple(check.run() for check in self.checks))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim with what its checks found.

    Attributes:
        claim: the claim.
        results: one for each check.
    """

    claim: Claim
    results: tuple[Result, ...]

    @property
    def verdict(self) -> Verdict:
        """It follows from the results alone; checks that could not be made do not count beside those that were."""
        outcomes = [result.holds for result in self.results if result.holds is not None]
        if not outcomes:
            return "cannot be tested here"
        if all(outcomes):
            return "holds"
        return "holds only if" if any(outcomes) else "wrong"

    @property
    def sentence(self) -> str:
        """The verdict, with the conditions under which the claim holds and what is so in its place."""
        right = [result.check.when or result.check.states for result in self.results if result.holds]
        failed = [result for result in self.results if result.holds is False]
        wrong = [one.name if one.shown == "no" else f"{one.name}: it is {one.shown}" for one in failed]
        untested = [f"{result.name}: {result.reason}" for result in self.results if result.holds is None]
        if self.verdict == "cannot be tested here":
            return f"cannot be tested here: {'; '.join(dict.fromkeys(untested))}"
        if self.verdict == "holds":
            return "holds" if not untested else f"holds (not tested: {'; '.join(untested)})"
        parts = [] if self.verdict == "wrong" else [f"holds only for {'; '.join(dict.fromkeys(right))}"]
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        parts.append(f"wrong: {'; '.join(wrong[:SHOWN])}{more}")
        parts += [f"not tested: {'; '.join(untested)}"] if untested else []
        return ". ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The verdict and its evidence as JSON-able values."""
        return {
            "id": self.claim.id,
            "guide": self.claim.guide,
            "says": self.claim.says,
            "how": self.claim.how,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "evidence": [result.to_dict() for result in self.results],
        }
