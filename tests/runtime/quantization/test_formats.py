"""How a user spells the format of a cache."""

from __future__ import annotations

from typing import Any

import pytest

from headwise.errors import ArgumentError
from headwise.runtime.quantization.formats import SPELLINGS, TokenFormat, parse_format
from headwise.runtime.quantization.groups import Float8Code, GroupCode
from headwise.runtime.quantization.kivi import KiviCode


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("int8", TokenFormat(GroupCode(8, 64), GroupCode(8, 64))),
        ("int3", TokenFormat(GroupCode(3, 64), GroupCode(3, 64))),
        ("int2:16", TokenFormat(GroupCode(2, 16), GroupCode(2, 16))),
        ("int4:128+hadamard", TokenFormat(GroupCode(4, 128, True), GroupCode(4, 128, True))),
        ("int8/int4", TokenFormat(GroupCode(8), GroupCode(4))),
        ("int4:32+hadamard/int3", TokenFormat(GroupCode(4, 32, True), GroupCode(3))),
        ("fp8", TokenFormat(Float8Code(), Float8Code())),
        ("fp8/int4", TokenFormat(Float8Code(), GroupCode(4))),
        ("kivi4", KiviCode(4)),
        ("kivi3:32", KiviCode(3, 32)),
        ("kivi2:32:128", KiviCode(2, 32, 128)),
    ],
)
def test_every_spelling(spelling: str, expected: Any) -> None:
    assert parse_format(spelling) == expected
    assert str(expected) == spelling


@pytest.mark.parametrize(
    "spelling",
    [
        *("", "int", "int5", "int16", "int4:", "int4:0", "int4:48", "int4:64:64", "INT4", " int4", "int4 ", "int4\n"),
        *("fp16", "fp8:32", "fp8+hadamard", "int4/", "/int4", "int8/int4/int2", "kivi8", "kivi4/int4", "kivi2:32:"),
        *("kivi2:32:-1", "kivi2+hadamard", "kivi2:32:1234567", "int4+hadamard:32", "int٤", "kivi2:32:٣"),
        *(8, None, True, ["int4"]),
    ],
)
def test_other_spellings_are_refused_with_all_there_are(spelling: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_format(spelling, name="cache")
    assert (refused.value.field, refused.value.value) == ("cache", spelling)
    assert refused.value.rule == f"must be {SPELLINGS}"
