"""`--plot`: pictures that commands draw."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.cli.conftest import cli, here, refused

__all__ = ["cli", "here", "refused"]

ADVISE = ("advise", "llama-3-8b", "--hardware", "h100", "--context", "8192")


def texts(file: Path) -> set[str]:
    """The texts of an SVG."""
    root = ElementTree.parse(file).getroot()
    return {str(node.text) for node in root.iter("{http://www.w3.org/2000/svg}text")}


def test_the_best_and_what_is_not_dominated_is_named(cli: Any, here: Path) -> None:
    (here / "frontier.json").write_text(
        '{"label": "GQA 32/8 × 128", "points": ['
        '{"target": "mla@0.25", "way": "headwise", "cache_fraction": 0.25, "perplexity_ratio": 1.01, "kl": 0.01},'
        '{"target": "mqa", "way": "headwise", "cache_fraction": 0.125, "perplexity_ratio": null, "kl": null}]}'
    )
    printed = cli(*ADVISE, "--measured", "frontier.json", "--plot", "a.svg")
    assert printed.out.startswith("wrote a.svg")
    found = texts(here / "a.svg")
    assert {"mla@0.25", "as it is", "cache, KiB a token", "measured rise of perplexity, %"} <= found
    assert "mqa" not in found  # it diverged
    assert any("NVIDIA H100" in text and "8,192" in text for text in found)


def test_what_is_predicted_is_hollow(cli: Any, here: Path) -> None:
    (here / "predicted.json").write_text(
        '{"is_predicted": true, "points": [{"target": "int8", "cache_fraction": 0.53, "kl": 0.001}]}'
    )
    cli(*ADVISE, "--measured", "predicted.json", "--plot", "a.svg")
    shown = texts(here / "a.svg")
    assert {"known rise of perplexity, %", "named: what no other option dominates; hollow: predicted"} <= shown
    assert "measured rise of perplexity, %" not in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("compare", "llama-3-8b"), {"GQA 32/8 × 128", "MQA 32/1 × 128", "cache, MiB"}),
        (("predict", "llama-3-8b", "--hardware", "h100"), {"q_proj", "attention", "a prompt of 4,096 tokens, ms"}),
    ],
    ids=["compare", "predict"],
)
def test_bars_are_named(cli: Any, here: Path, arguments: tuple[str, ...], named: set[str]) -> None:
    assert cli(*arguments, "--plot", "a.svg").out.startswith("wrote a.svg")
    assert named <= texts(here / "a.svg")
    assert any("llama-3-8b" in text for text in texts(here / "a.svg"))


def test_equal_answers_make_equal_files(cli: Any, here: Path) -> None:
    for name in ("a.svg", "b.svg"):
        cli(*ADVISE, "--plot", name, "--json")
    assert (here / "a.svg").read_bytes() == (here / "b.svg").read_bytes()


def test_a_png_is_one(cli: Any, here: Path) -> None:
    cli(*ADVISE, "--plot", "a.PNG")
    with Image.open(here / "a.PNG") as image:
        assert image.format == "PNG"
        assert image.width > 1000


def test_bad_files_are_refused_before_any_work(refused: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "plot = 'a.pdf': must end in .png or .svg" in refused(*ADVISE, "--plot", "a.pdf")
    assert "plot = 'no/a.png': cannot be written" in refused(*ADVISE, "--plot", "no/a.png")
    assert "plot = 'a.pdf': must end in .png or .svg" in refused("compare", "llama-3-8b", "--plot", "a.pdf")
    assert "plot = 'a.pdf': must end" in refused("predict", "gpt2", "--hardware", "h100", "--plot", "a.pdf")
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else usual(name, *rest)
    )
    assert "needs the matplotlib package" in refused(*ADVISE, "--plot", "a.png")
