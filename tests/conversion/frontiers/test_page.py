"""The page is self-contained, and escapes names and texts."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.conversion.frontiers.candidate import Candidate
from headwise.conversion.frontiers.page import markdown, page
from tests.conversion.frontiers.test_points import found, result

EVIL = "<img src=x onerror=alert('x')>|"


def a_ladder(*, text: str = "a/one.txt", source: str = "my/model") -> headwise.Frontier:
    candidates = [
        (Candidate("mla:0.5"), result((500.0, 1.1), (text,))),
        (Candidate("gqa:2"), result((500.0, 1.9), (text,), "gqa")),
        (Candidate("mqa"), result((250.0, 2.5), (text,), "mqa")),
    ]
    return found(candidates, source=source)


def ways() -> headwise.Frontier:
    candidates = [Candidate("mla:0.5"), Candidate("mla:0.5", without=("refit",)), Candidate("mla:0.5", "transmla:2")]
    losses = {True: {"held_out_loss": 3.0}, False: {}}
    return found(
        [(candidate, {**result((500.0, 1.5)), **losses[candidate.is_variant]}) for candidate in candidates],
        methods=True,
    )


@pytest.mark.parametrize("shown", [a_ladder(), ways()], ids=["ladder", "ways"])
def test_the_page_stands_alone(shown: headwise.Frontier) -> None:
    pytest.importorskip("matplotlib")
    text = page(shown)
    assert text.startswith("<!doctype html>")
    assert text.count("<svg") == 1
    assert not re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)
    assert "http" not in re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", text)
    assert "@import" not in text
    for row in re.findall(r"\| ([^|]+) \|", markdown(shown)):
        assert row in text or row.startswith("-")


def test_dominated_rows_are_faint() -> None:
    pytest.importorskip("matplotlib")
    faint = re.findall(r'<tr class="faint"><td class="word">([^<]*)</td>', page(a_ladder()))
    assert faint == ["gqa:2"]


def test_names_are_text_and_no_markup() -> None:
    pytest.importorskip("matplotlib")
    evil = a_ladder(text=EVIL, source=EVIL)
    assert EVIL not in page(evil)
    assert "&lt;img src=x" in page(evil)
    document = markdown(a_ladder(text=f"{EVIL}\x1b", source=f"{EVIL}\x1b"))
    assert not re.search(r"(?<!\\)<|\x1b", document)
    table = [line for line in document.splitlines() if line.startswith("|")]
    assert {len(re.split(r"(?<!\\)\|", line)) for line in table} == {len(re.split(r"(?<!\\)\|", table[1]))}


def test_folders_are_nobody_elses_business() -> None:
    secret = a_ladder(text="/home/me/one.txt", source="/home/me/model")
    assert "/home/me" not in markdown(secret)
    if importlib.util.find_spec("matplotlib") is not None:
        assert "/home/me" not in page(secret)


def test_without_matplotlib_the_plot_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str, *args: Any) -> None:
        assert name == "matplotlib"

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(
        headwise.MissingExtraError, match=r"needs the matplotlib package: pip install 'headwise\[plot\]'"
    ):
        headwise.frontier(tmp_path / "no-source-was-looked-for", tmp_path / "out", calibrate="text.txt")
    assert not (tmp_path / "out").exists()
