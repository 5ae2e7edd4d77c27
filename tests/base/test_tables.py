"""One table in the terminal, in Markdown and on a page, and names that are never markup in any of them."""

from __future__ import annotations

import re

import pytest
from matplotlib.figure import Figure

from headwise.base.pages import Picture, Text, as_file, as_svg, new_figure, web_page
from headwise.base.tables import Cell, Table, bytes_text, count_text, seconds_text
from headwise.cli.app import out

EVIL = '[bold]<b>|"$x$'


def test_three_renderings(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(["", "ms"], [("one", "1.5")], title="Times", notes=["Medians."])
    table.add("two", "10.0", mark="bold", gap=True)
    assert table.markdown().splitlines() == ["|  | ms |", "| --- | ---: |", "| one | 1.5 |", "| two | 10.0 |"]
    out.print_table(table)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "       ms",
        "─────────",
        "one   1.5",
        "",
        "two  10.0",
    ]
    page = web_page("a", [table])
    assert "<h2>Times</h2>" in page
    assert '<tr class="bold"><td class="word">two</td><td>10.0</td></tr>' in page
    assert '<p class="small">Medians.</p>' in page


def test_names_are_never_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table([EVIL], [(Cell(EVIL, hint=EVIL, mark="best"),)], title=EVIL, notes=[EVIL])
    assert table.markdown().count("\\|") == 2
    for cell, escaped in ((r"a\|b", r"a\|b"), (r"a\\|b", r"a\\\|b")):  # a bar that is escaped, and one that is not
        assert Table([""], [(cell,)]).markdown().splitlines()[-1] == f"| {escaped} |"
    out.print_table(table)
    assert capsys.readouterr().out.count("[bold]<b>") == 2

    def draw() -> Figure:
        figure, (axes,) = new_figure(4, 3)
        axes.set_title(EVIL)
        return figure

    parts = [table, Text(EVIL, "heading"), Text(EVIL, "code"), [EVIL], Picture(as_svg(draw), EVIL)]
    page = web_page(EVIL, parts)
    assert "<b>" not in page
    assert page.count("[bold]&lt;b&gt;") == 12
    assert re.findall(r"\{\{|\{%", page) == []


def test_a_picture_has_the_colour_of_the_page_and_a_file_is_always_the_same() -> None:
    def draw() -> Figure:
        figure, (axes,) = new_figure(4, 3)
        axes.plot([1, 2], label="a")
        axes.legend()
        return figure

    svg = as_svg(draw)
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "#000000" not in svg
    assert as_file(draw, "svg") == as_file(draw, "svg")
    assert as_file(draw, "png").startswith(b"\x89PNG")


def test_numbers_as_people_read_them() -> None:
    assert (bytes_text(1536), count_text(134.5e6)) == ("1.5 KiB", "134.5 M")
    assert (seconds_text(0.0015), seconds_text(2)) == ("1.50 ms", "2.00 s")
