"""How a user spells the format of a cache."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.base.options import CACHE, PrepareOptions
from headwise.costs.formulas.target import GROUPS
from headwise.errors import ArgumentError
from headwise.runtime.hf import HeadwiseCache
from headwise.runtime.quantization.formats import ENGINE_FORMATS, INTEGERS, KIVI, SPELLINGS, TokenFormat, parse_format
from headwise.runtime.quantization.groups import BITS, KIVI_BITS, Float8Code, GroupCode, KiviCode

DOCS = Path(__file__).parents[3] / "docs"


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
        *("", "int", "int9", "int16", "int4:", "int4:0", "int4:48", "int4:64:64", "INT4", " int4", "int4 ", "int4\n"),
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


@pytest.mark.parametrize(
    "spelling", ["int4", "fp8", *(f"{engine}:{name}" for engine in ENGINE_FORMATS for name in ENGINE_FORMATS[engine])]
)
def test_no_tokens_have_no_bytes(spelling: str) -> None:
    rows = parse_format(spelling).encode(*(torch.zeros(1, 2, 0, 64) for _ in range(2)))
    assert all(row.numel() == 0 and row.shape[:3] == (1, 2, 0) for row in rows)


@pytest.mark.parametrize("name", [*INTEGERS, str(Float8Code()), *KIVI])
def test_a_format_of_headwise_is_named_where_users_look(name: str) -> None:
    """One that is added to the lists of bits is not forgotten in a help text, a docstring or a page."""
    for text in (SPELLINGS, CACHE, str(HeadwiseCache.__doc__), (DOCS / "speed.md").read_text(encoding="utf-8")):
        assert re.search(rf"\b{name}\b", text), text[:80]


def test_kernels_read_all_that_can_be_spelled() -> None:
    """Codes of 1 to 8 bits; and groups that a kernel of a GPU can take apart, of 2^n channels and at least 16."""
    assert all(1 <= bits <= 8 for bits in (*BITS, *KIVI_BITS))
    assert all(group >= 16 and group & (group - 1) == 0 for group in GROUPS)


@pytest.mark.parametrize(
    "name", [f"{engine}:{name}" for engine, formats in ENGINE_FORMATS.items() for name in formats]
)
def test_a_format_of_an_engine_is_named_where_users_look(name: str) -> None:
    engine, _, short = name.partition(":")
    pages = [(DOCS / page).read_text(encoding="utf-8") for page in ("speed.md", "prepare.md")]
    is_wide = short in ("f16", "bf16", "f32")
    for page in pages[: 1 if is_wide else 2]:  # a model is prepared for what rounds
        assert f"`{name}`" in page or f"`{short}`" in page
    said = {one.name: one.metadata["option"]["help"] for one in fields(PrepareOptions)}["cache"]
    assert engine in said
    assert short in said or engine == "llama.cpp" or short.startswith("turboquant_")
