"""Claims and their checks: what is found depends on what goes in, and a verdict on what is found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from headwise.errors import HeadwiseError
from headwise.study.audit import Check, Claim, all_claims
from headwise.study.audit.claim import (
    Number,
    Range,
    UntestableError,
    at_least,
    at_most,
    exact_number,
    printed_range,
    rounded_number,
)

BUSY = ("C9", "C10", "C12", "C13", "C17", "C23", "C25")
"""Claims that time, convert or start processes; others are closed forms and small samples."""

OF_A_BENCHMARK = ("MQA for extreme speed", "MHA below 512", "MQA's loss")
"""Statements of other claims that do."""

CHECKS = [
    pytest.param(check, id=f"{claim.id} {index}")
    for claim in all_claims()
    if claim.id not in BUSY
    for index, check in enumerate(claim.checks)
    if not check.states.startswith(OF_A_BENCHMARK)
]

OTHERS: Mapping[str, Any] = {
    "MHA": "MQA",
    "MQA": "MHA",
    "GQA": "MQA",
    "MLA": "MHA",
    "GQA-8": "MQA",
    "GQA-4": "MQA",
    "GQA-2": "MHA",
    "GQA-3": "MHA",
    "latent-256": "MHA",
    "latent-384": "MHA",
    "float32": "int8",
    "int8": "float32",
    "fused": "unfused",
    "unfused": "fused",
    "its own MHA": "llama-3-8b",
    "llama-3-70b": "gpt2",
    "deepseek-v3": "gpt2",
    "mqa": "gqa",
    "scores": "weights",
    "weights": "scores",
    "scores kept": "weights",
    "fused activations": "weights",
    "length": "num_heads",
    "hidden_size": "num_heads",
    "num_heads": "length",
}
"""Another value for each input that is a word."""


def test_every_claim_and_both_sections_are_there() -> None:
    names = [claim.id for claim in all_claims()]
    assert names == [*(f"C{number}" for number in range(1, 27)), "section 2", "section 4"]
    assert all(claim.checks and claim.says and claim.how and claim.guide for claim in all_claims())


@pytest.mark.parametrize("check", CHECKS)
def test_a_statement_is_judged_by_what_is_found(check: Check) -> None:
    """A check whose finding is what is printed passes, and one whose finding is not fails."""
    result = check.run()
    if result.found is None:
        assert result.reason
        return
    right = replace(check, printed=_printed_as(result.found))
    assert right.run().holds is True
    assert replace(check, printed=_printed_as(_other(result.found))).run().holds is False


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_found_depends_on_what_goes_in(check: Check) -> None:
    """At least one input of every check, where it is changed, changes what is found."""
    found = check.run().found
    if found is None:
        return
    others = []
    for name, value in check.inputs.items():
        for other in _changed(value):
            try:
                others.append(check.measure(**{**check.inputs, name: other}))
            except (HeadwiseError, UntestableError, ZeroDivisionError):
                continue
    if isinstance(found, float | int) and not isinstance(found, bool) and found == 1 and "over" in check.states:
        # A formula that is right at every size: there, what must be able to fail is the formula.
        assert all(one == pytest.approx(1) for one in others)
        return
    assert any(one != found for one in others) or _is_identity(check)


@pytest.mark.parametrize("claim", all_claims(), ids=lambda claim: claim.id)
def test_every_statement_can_hold_and_can_fail(claim: Claim) -> None:
    """Those that take long to find out too."""
    for check in claim.checks:
        printed = check.printed
        if isinstance(printed, Number):
            right, wrong = printed.value, printed.value + 3 * printed.tolerance + 1
        elif isinstance(printed, Range):
            right = printed.low if printed.low > -math.inf else printed.high
            wrong = printed.high + 1 if printed.high < math.inf else printed.low - 1
        else:
            right, wrong = printed, _other(printed)
        assert check.allows(right)
        assert not check.allows(wrong)


def _is_identity(check: Check) -> bool:
    """Statements that hold, or fail, at every size."""
    return check.printed is True or check.states.startswith(
        ("growth of", "the softmax's growth", "questions on which")
    )


def _changed(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, 4 * value, max(value // 2, 1)]
    return [OTHERS[value]] if value in OTHERS else ["deepseek-v3", "gpt2"]


def _printed_as(found: Any) -> Any:
    if isinstance(found, bool | str):
        return found
    return Number(found, abs(found) * 1e-6, "as found")


def _other(found: Any) -> Any:
    if isinstance(found, bool):
        return not found
    return 1.5 * found + 1 if isinstance(found, int | float) else f"not {found}"


def test_printed_numbers_allow_a_unit_of_their_last_digit() -> None:
    assert rounded_number("2.1", 1e6).allows(2.2e6)
    assert not rounded_number("2.1", 1e6).allows(2.21e6)
    assert rounded_number(".13", 1e6).allows(131_072)
    assert exact_number(7).allows(7)
    assert not exact_number(7).allows(8)
    assert not exact_number(7).allows("7")
    assert printed_range("0.3", "1.0").allows(0.5)
    assert not printed_range("0.3", "1.0").allows(1.2)
    assert at_most(0.1).allows(0.1)
    assert not at_most(0.1).allows(0.11)
    assert at_least(1).allows(1.0)
    assert not at_least(1).allows(0.99)
    assert isinstance(at_least(1), Range)


def _claim(*found: Any) -> Claim:
    def measure(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    checks = [
        Check(states=f"statement {at}", printed=exact_number(1), measure=measure, inputs={"value": value})
        for at, value in enumerate(found)
    ]
    return Claim(id="C1", guide="G1", says="one", how="looking", checks=checks)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ((1, 1), "holds"),
        ((1, 2), "holds only if"),
        ((2, 3), "wrong"),
        ((UntestableError("no GPU"),), "cannot be tested here"),
        ((1, UntestableError("no GPU")), "holds"),
        ((2, UntestableError("no GPU")), "wrong"),
    ],
)
def test_a_verdict_follows_from_the_findings(found: tuple[Any, ...], verdict: str) -> None:
    judged = _claim(*found).run()
    assert judged.verdict == verdict
    assert judged.sentence.startswith({"holds only if": "holds only for"}.get(verdict, verdict))
    assert ("no GPU" in judged.sentence) is any(isinstance(one, Exception) for one in found)
    document = judged.to_dict()
    assert document["verdict"] == verdict
    assert len(document["evidence"]) == len(found)


def test_a_statement_that_is_not_so_has_no_number() -> None:
    check = Check(states="it runs", printed=True, measure=lambda: False)
    judged = Claim(id="C1", guide="G1", says="one", how="looking", checks=[check]).run()
    assert judged.sentence == "wrong: it runs"


def test_another_error_is_not_taken_for_a_finding() -> None:
    with pytest.raises(ZeroDivisionError):
        _claim(ZeroDivisionError("a defect")).run()
