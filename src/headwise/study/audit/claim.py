"""A claim of the guides, the checks that test it, and its verdict.

A check has a printed value and a function that finds the value. The verdict follows from a claim's checks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from headwise.errors import HeadwiseError

Verdict = Literal["holds", "holds only if", "wrong", "cannot be tested here"]

SHOWN = 4
"""The most wrong statements that a verdict names; the page lists them all."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a guide.

    Attributes:
        id: the claim's name, such as ``C1``.
        guide: the guides that print the claim.
        says: the claim in a sentence.
        how: the way in which it is tested, in a few words.
        checks: the checks of its statements.
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
        """The verdict by the results alone; checks that could not be made do not count beside those that were."""
        outcomes = [result.holds for result in self.results if result.holds is not None]
        if not outcomes:
            return "cannot be tested here"
        if all(outcomes):
            return "holds"
        return "holds only if" if any(outcomes) else "wrong"

    @property
    def sentence(self) -> str:
        """The verdict, with the conditions under which the claim holds, or the values that were found instead."""
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


Found = float | str | bool
"""The value that a check finds."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Number:
    """A printed number, and by how much a found one may differ from it: a unit of its last digit.

    So a number passes whether it was rounded or cut off.

    Attributes:
        value: the number, in the unit of the found one.
        tolerance: the largest difference that is allowed.
        text: the text as it is printed.
    """

    value: float
    tolerance: float
    text: str

    def allows(self, found: Found) -> bool:
        """Whether a found number is the printed one."""
        allowed = self.tolerance + _ROUNDING * abs(self.value)
        return isinstance(found, int | float) and abs(found - self.value) <= allowed


@dataclass(frozen=True)
class Range:
    """A printed range.

    Attributes:
        low: the least number in the range.
        high: the greatest number in the range.
        text: the text as it is printed.
    """

    low: float
    high: float
    text: str

    def allows(self, found: Found) -> bool:
        """Whether a found number lies in the range."""
        return isinstance(found, int | float) and self.low <= found <= self.high


Printed = Number | Range | str | bool
"""The value that a guide prints."""


def exact_number(value: int) -> Number:
    """A number that is printed with all its digits. For example ``exact_number(589_824).text`` is ``"589,824"``."""
    return Number(value, 0, f"{value:,}")


def rounded_number(digits: str, unit: float = 1, suffix: str = "", *, slack: float = 0) -> Number:
    """A number that is printed with some digits.

    For example ``rounded_number("2.1", 1e6, "M").tolerance`` is 100,000.

    Args:
        digits: the digits as they are printed, without a unit.
        unit: the factor that the digits are multiplied by.
        suffix: the text that is printed behind the digits.
        slack: a part of the value that is allowed besides, for times, which differ from run to run.
    """
    decimals = len(digits.partition(".")[2])
    value = float(digits) * unit
    return Number(value, max(10**-decimals * abs(unit), slack * abs(value)), digits + suffix)


def printed_range(low: str, high: str, unit: float = 1, suffix: str = "") -> Range:
    """A printed range, whose ends allow for their last digits.

    For example ``printed_range("0.3", "1.0", suffix="×").allows(0.25)`` is True.
    """
    first, last = rounded_number(low, unit), rounded_number(high, unit)
    return Range(first.value - first.tolerance, last.value + last.tolerance, f"{low} – {high}{suffix}")


def at_most(value: float, suffix: str = "") -> Range:
    """Any number up to one. For example ``at_most(0.1).allows(0.11)`` is False."""
    return Range(-math.inf, value, f"at most {value:,g}{suffix}")


def at_least(value: float, suffix: str = "") -> Range:
    """Any number from one on. For example ``at_least(131_072).allows(4096)`` is False."""
    return Range(value, math.inf, f"at least {value:,g}{suffix}")


class UntestableError(Exception):
    """A check cannot be made here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement of a claim, and the function that tests it.

    Attributes:
        states: the quantity that is compared, or a whole statement where ``printed`` is True.
        printed: the value that the claim prints.
        measure: the function that finds the value; it is called with ``inputs``.
        inputs: the arguments of ``measure``, such as sizes.
        when: the condition under which the statement is checked.
        unit: the unit of the found value, for reports.
    """

    states: str
    printed: Printed
    measure: Callable[..., Found]
    inputs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    when: str = ""
    unit: str = ""

    def run(self) -> Result:
        """Make the check. An error that says what is missing makes it untestable; any other error is raised."""
        start = time.perf_counter()
        found, reason = None, ""
        try:
            found = self.measure(**self.inputs)
        except (UntestableError, HeadwiseError) as error:
            reason = str(error)
        return Result(check=self, found=found, reason=reason, seconds=time.perf_counter() - start)

    def allows(self, found: Found) -> bool:
        """Whether the found value agrees with the printed one."""
        if isinstance(self.printed, Number | Range):
            return self.printed.allows(found)
        return found == self.printed


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a check.

    Attributes:
        check: the check.
        found: the value that was found; None where the check could not be made.
        reason: the reason why the check could not be made; empty where it was.
        seconds: the seconds that the check took.
    """

    check: Check
    found: Found | None
    reason: str
    seconds: float

    @property
    def holds(self) -> bool | None:
        """Whether the statement is right; None where that could not be tested."""
        return None if self.found is None else self.check.allows(self.found)

    @property
    def name(self) -> str:
        """The statement with its condition."""
        return f"{self.check.states}, {self.check.when}" if self.check.when else self.check.states

    @property
    def printed(self) -> str:
        """The printed value, as text."""
        return _shown_value(self.check.printed)

    @property
    def shown(self) -> str:
        """The found value, as text with its unit."""
        if self.found is None:
            return "not tested"
        text = _shown_value(self.found)
        return f"{text} {self.check.unit}" if self.check.unit else text

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        return {
            "states": self.check.states,
            "when": self.check.when,
            "inputs": {name: _json_value(value) for name, value in self.check.inputs.items()},
            "printed": self.printed,
            "found": self.found,
            "shown": self.shown,
            "unit": self.check.unit,
            "holds": self.holds,
            "reason": self.reason,
            "seconds": self.seconds,
        }


def _shown_value(value: Printed | Found) -> str:
    if isinstance(value, Number | Range):
        return value.text
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def _json_value(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
