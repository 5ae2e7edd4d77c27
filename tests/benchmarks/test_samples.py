"""The samples of a text, and the benchmark of them on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import budgets, samples, tables
from tests.real_models import save_tiny

TITLES = [f"Title {number}" for number in range(9)]
WIKITEXT = "".join(
    f" \n = {title} = \n \n {title} is a subject . \n \n = = Part = = \n \n More . \n" for title in TITLES
)


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("articles 2 of 3", ["Title 1", "Title 4", "Title 7"]),
        ("part 1 of 9", ["Title 0"]),
        ("part 2 of 2", ["Title 4", "Title 5", "Title 6", "Title 7", "Title 8"]),
    ],
)
def test_a_sample_has_whole_articles(name: str, titles: list[str]) -> None:
    text = samples.sample(WIKITEXT, name)
    assert [title for title in TITLES if f" = {title} = \n" in text] == titles
    assert text.count("= = Part = =") == text.count("More .") == len(titles)


def test_a_sample_of_code_has_whole_modules() -> None:
    modules = [f"# module: {name}.py\n\n# = not a title =\nx = {name!r}\n\n" for name in "abcde"]
    assert samples.sample("".join(modules), "articles 2 of 3") == modules[1] + modules[4]


def test_the_samples_of_one_kind_share_nothing_and_leave_nothing_out() -> None:
    for kind, count in (("articles", 3), ("part", 4)):
        texts = [samples.sample(WIKITEXT, f"{kind} {number} of {count}") for number in range(1, count + 1)]
        assert sorted(article for text in texts for article in samples.articles(text)) == sorted(
            samples.articles(WIKITEXT)
        )


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Options that are common to both benchmarks: a tiny model, and short texts."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "wikitext-2.train.txt").write_text(WIKITEXT * 20)
    for place, name in enumerate(("wikitext-2.test", "brown", "austen")):
        (cache / f"{name}.txt").write_text(f"Text {place} of another kind, with words of its own. " * 30)
    command = ["--source", save_tiny(tmp_path / "source"), "--cache", cache, "--work", tmp_path / "w"]
    sizes = ["--tokens", "256", "--window", "64", "--windows", "2", "--samples", "articles 1 of 3", "part 2 of 2"]
    return [*map(str, command), *sizes]


def test_each_sample_is_a_row_and_a_killed_run_goes_on(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "samples.json"
    command = [*command, "--json", str(kept)]
    samples.main(command)
    document = json.loads(kept.read_text())
    assert list(document["rows"]) == ["articles 1 of 3", "part 2 of 2"]
    assert not list((tmp_path / "w").glob("*/config.json"))
    shown = tables.samples(document).splitlines()
    assert shown[0].rstrip(" |").split(" | ")[1:4] == ["WikiText-2", "Brown", "Austen"]
    ratios = [row["evaluate"]["texts"][0]["perplexity_ratio"] for row in document["rows"].values()]
    assert f"×{min(ratios):.3f} to ×{max(ratios):.3f}" in shown[-1]
    capsys.readouterr()
    samples.main(command)
    assert capsys.readouterr().out == ""


def test_a_run_killed_while_it_evaluates_converts_no_second_time(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "samples.json"
    command = [*command[:-1], "--json", str(kept)]
    with monkeypatch.context() as killed:
        killed.setattr("headwise.evaluate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            samples.main(command)
    with monkeypatch.context() as patched:
        patched.setattr("headwise.convert", interrupt)
        samples.main(command)
    (row,) = json.loads(kept.read_text())["rows"].values()
    assert row["conversion"]["mechanism"] == "mla"
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["articles-1-of-3.txt"]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_each_budget_and_sample_is_a_row(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "budgets.json"
    command = [*command, "--json", str(kept), "--kv-bytes", "0.3", "0.2", "--items", "0"]
    budgets.main(command)
    document = json.loads(kept.read_text())
    names = ("articles 1 of 3", "part 2 of 2")
    assert list(document["rows"]) == [f"{budget}/{name}" for name in names for budget in (0.3, 0.2)]
    shown = tables.budgets(document).splitlines()
    assert [line.split(" | ")[0] for line in shown[2:]] == ["| 30 %", "| 20 %"]
    ratios = [row["evaluate"]["texts"][0]["perplexity_ratio"] for row in document["rows"].values()][::2]
    assert f"({min(ratios):.3f}–{max(ratios):.3f})" in shown[2]
    capsys.readouterr()
    budgets.main(command)
    assert capsys.readouterr().out == ""
