"""The command and its page, and claims that start processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.errors import ArgumentError
from headwise.study.audit import audit
from headwise.study.audit.audit import page
from tests.cli.test_cli import run


def test_json_names_every_claim_with_its_evidence() -> None:
    result = run("audit", "--claim", "C14", "--claim", "C5", "--json")
    document = json.loads(result.stdout)
    assert list(document["claims"]) == ["C5", "C14"]
    claim = document["claims"]["C14"]
    assert claim["verdict"] == "wrong"
    assert claim["evidence"][0]["found"] == "2019"
    assert claim["evidence"][0]["inputs"] == {"paper": "mqa"}


def test_what_is_printed_says_what_is_wrong() -> None:
    result = run("audit", "--claim", "C14")
    assert "it is 2019" in result.stdout
    assert "1 claims: 1 wrong" in result.stdout


def test_a_page_has_every_statement(tmp_path: Path) -> None:
    result = run("audit", "--claim", "C22", "--html", str(tmp_path / "audit.html"))
    assert result.returncode == 0
    text = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert "the factor at h = 32" in text
    assert text.count('<td class="word no">no</td>') == 2
    assert "http" not in text.replace("http-equiv", "")


def test_text_is_escaped_on_the_page() -> None:
    report = audit(["C15"])
    assert "<script" not in page(report, "headwise <script>alert(1)</script>")


def test_an_unknown_claim_is_refused(tmp_path: Path) -> None:
    result = run("audit", "--claim", "C99")
    assert result.returncode == 2
    assert "claim = 'C99': must be one of C1" in result.stderr
    with pytest.raises(ArgumentError, match="trained"):
        audit(["C14"], trained=tmp_path / "nothing.json")


def test_heads_talk_to_each_other_once_behind_attention() -> None:
    judged = audit(["C25"]).claim("C25")
    assert [result.found for result in judged.results] == [0, 1, 0, 1]
