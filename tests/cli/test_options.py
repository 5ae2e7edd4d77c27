"""Commands whose parameters are made from an options class: one like convert's, and one like frontier's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from headwise.base.options import Options, Rule, at_least, not_empty, option
from headwise.cli.app import Json
from headwise.cli.options import takes_options
from headwise.errors import ArgumentError

_Texts = str | Path | Sequence[str | Path]


class ConvertLike(Options):
    """How a model is converted."""

    to: str = option("``mha``, ``gqa:K``, ``mqa`` or ``mla``")
    kv_budget: float | None = option(
        "fraction to keep", default=None, rule=Rule("must be above 0 and at most 1", lambda share: 0 < share <= 1)
    )
    calibrate: _Texts | None = option("a text that layers are studied on", default=None, metavar="TEXT")
    calibration_tokens: int | None = option("how many of its tokens", default=None, rule=at_least(2))
    statistics: str | Path | None = option("of headwise calibrate", default=None, metavar="FOLDER")
    without: Collection[str] = option("stages to leave out", default=(), metavar="STAGE")
    format: Literal["headwise", "deepseek"] = option("``headwise``, or ``deepseek``", default="headwise")
    evaluate: bool | str | Path | Sequence[str | Path] = option(
        "what to evaluate on", default=True, metavar="TEXT", identity=False
    )
    evaluation_windows: int = option("how many windows of each", default=2, rule=at_least(1), identity=False)
    dry_run: bool = option("only say what it would take", default=False, identity=False)


class FrontierLike(Options):
    """The targets and texts of a frontier."""

    calibrate: _Texts = option("a text to calibrate on", metavar="TEXT", rule=not_empty("must name a text"))
    targets: Sequence[str] = option("mla:F, gqa:K or mqa", default=(), flag="--target")
    depths: Sequence[float] = option("how deep", default=(0.5,))
    plot: bool = option("write the page", default=True, identity=False)


def called(kind: type[Options], *arguments: str) -> dict[str, Any]:
    """The values that the command got, its status and its output."""
    app, got = typer.Typer(), dict[str, Any]()

    @app.command()
    @takes_options(kind)
    def command(
        source: Annotated[str, typer.Argument()],
        output: Annotated[str, typer.Argument()],
        options: Any,
        as_json: Json = False,
    ) -> None:
        got.update(source=source, output=output, options=options, as_json=as_json)

    result = CliRunner().invoke(app, ["source", "out", *arguments])
    if isinstance(result.exception, ArgumentError):
        raise result.exception
    return {**got, "status": result.exit_code, "said": " ".join(result.output.replace("│", " ").split())}


def test_what_is_left_out_has_the_fields_own_default() -> None:
    got = called(ConvertLike, "--to", "mqa", "--json")
    assert (got["source"], got["output"], got["as_json"]) == ("source", "out", True)
    assert got["options"] == ConvertLike(to="mqa")
    assert called(FrontierLike, "--calibrate", "a.txt")["options"] == FrontierLike(calibrate=["a.txt"])


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("--kv-budget", "0.5", "--calibration-tokens", "64"), {"kv_budget": 0.5, "calibration_tokens": 64}),
        (("--calibrate", "a", "--calibrate", "b"), {"calibrate": ["a", "b"]}),
        (("--without", "refit"), {"without": ["refit"]}),
        (("--statistics", "s", "--format", "deepseek"), {"statistics": "s", "format": "deepseek"}),
        (("--evaluate", "a", "--evaluate", "b"), {"evaluate": ["a", "b"]}),
        (("--no-evaluate",), {"evaluate": False}),
        (("--evaluation-windows", "5", "--dry-run"), {"evaluation_windows": 5, "dry_run": True}),
        (("--calibrate", ""), {"calibrate": [""]}),
    ],
)
def test_a_conversions_options(arguments: tuple[str, ...], fields: dict[str, Any]) -> None:
    assert called(ConvertLike, "--to", "mqa", *arguments)["options"] == ConvertLike(to="mqa", **fields)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("--target", "mqa", "--target", "mla:0.5"), {"targets": ["mqa", "mla:0.5"]}),
        (("--no-plot",), {"plot": False}),
        (("--plot",), {"plot": True}),
        (("--depths", "0.25", "--depths", "1"), {"depths": [0.25, 1.0]}),
    ],
)
def test_a_frontiers_options(arguments: tuple[str, ...], fields: dict[str, Any]) -> None:
    got = called(FrontierLike, "--calibrate", "a.txt", *arguments)
    assert got["options"] == FrontierLike(calibrate=["a.txt"], **fields)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--kv-budget", "2"), "kv_budget = 2.0: must be above 0 and at most 1"),
        (("--format", "gguf"), "format = 'gguf': must be headwise or deepseek"),
        (("--evaluate", "a", "--no-evaluate"), "evaluate = 'a': cannot be used with --no-evaluate"),
        (("--calibration-tokens", "1"), "calibration_tokens = 1: must be at least 2"),
    ],
)
def test_rules_of_the_class_are_kept(arguments: tuple[str, ...], line: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{line}$"):
        called(ConvertLike, "--to", "mqa", *arguments)


def test_missing_required_options_are_refused() -> None:
    for kind, name in ((ConvertLike, "--to"), (FrontierLike, "--calibrate")):
        got = called(kind)
        assert got["status"] == 2
        assert f"Missing option '{name}'" in got["said"]


def test_help_is_the_fields() -> None:
    shown = called(ConvertLike, "--help")["said"]
    for line in (
        "--to <str> mha, gqa:K, mqa or mla. [required]",
        "--kv-budget <float> Fraction to keep.",
        "--calibrate TEXT A text that layers are studied on; may be repeated.",
        "--without STAGE Stages to leave out; may be repeated.",
        "--format <str> headwise, or deepseek. [default: headwise]",
        "--no-evaluate <bool> Leave it out; cannot be used with --evaluate.",
        "--evaluation-windows <int> How many windows of each. [default: 2]",
    ):
        assert line in shown
    assert "--plot --no-plot" in called(FrontierLike, "--help")["said"]
