"""``headwise frontier`` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result

SMALL = ("--calibration-tokens", "256", "--window", "32", "--windows", "2", "--no-plot")
FRONTIER = ("frontier", "tiny", "--calibrate", "text.txt", "--output", "out", *SMALL)

QUICK = ("frontier", "tiny", "--quick", "--calibrate", "text.txt", "--calibration-tokens", "512")


@pytest.fixture
def model(here: Path, tiny_llama: Path) -> Path:
    (here / "exam.txt").write_text("pack my box with five dozen jugs. " * 10)
    return tiny_llama


def test_a_ladder(cli: Callable[..., Result], model: Path, here: Path) -> None:
    arguments = (*FRONTIER, "--evaluate", "exam.txt", "--target", "mla:0.5", "--target", "mqa")
    result = cli(*arguments)
    assert result.status == 0, result.err
    for shown in ("tiny: quality against cache", "original", "mla:0.5", "mqa", "× exam.txt", "up by at most 5%"):
        assert shown in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert "out: frontier.json, frontier.md\n" in result.out
    document = json.loads((here / "out/frontier.json").read_text())
    assert json.loads(cli(*arguments, "--json").out) == document
    assert [point["target"] for point in document["points"]] == ["mla:0.5", "mqa"]
    names = ["SHA256SUMS", "frontier.json", "frontier.md", "results"]
    assert sorted(path.name for path in (here / "out").iterdir()) == names


def test_formats_and_a_verdict(cli: Callable[..., Result], model: Path, here: Path) -> None:
    result = cli(*FRONTIER, "--evaluate", "exam.txt", "--target", "int8/int8", "--target", "mla@0.3")
    assert result.status == 0, result.err
    for shown in ("\nint8 ", "\nmla@0.3 ", "of a bfloat16 cache: down to ", "convert and quantise"):
        assert shown in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    document = json.loads((here / "out/frontier.json").read_text())
    assert [point["kind"] for point in document["points"]] == ["quantised", "both"]
    assert document["verdict"][0]["most"] == 1


def test_methods(cli: Callable[..., Result], model: Path, here: Path) -> None:
    result = cli(*FRONTIER, "--methods", "--target", "mqa")
    assert result.status == 0, result.err
    for shown in ("ways to convert to mqa", "headwise", "without refit", "without any stage", "mean pooling"):
        assert shown in result.out
    assert "out: methods.json, methods.md\n" in result.out


def test_a_page(cli: Callable[..., Result], model: Path, here: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = [argument for argument in FRONTIER if argument != "--no-plot"]
    result = cli(*arguments, "--target", "mqa")
    assert result.status == 0, result.err
    assert "<h2>What to do</h2>" in (here / "out/frontier.html").read_text()


def test_predictions(cli: Callable[..., Result], model: Path, here: Path) -> None:
    arguments = (*QUICK, "--target", "int2", "--target", "int8/int8")
    result = cli(*arguments)
    assert result.status == 0, result.err
    assert result.out.index("\nint8 ") < result.out.index("\nint2 ")
    assert "predicted from 512 tokens" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    document = json.loads(cli(*arguments, "--json").out)
    assert [point["target"] for point in document["points"]] == ["int8", "int2"]
    assert sorted(path.name for path in here.iterdir()) == ["exam.txt", "text.txt", "tiny"]  # nothing is written


def test_predictions_that_are_kept_are_read_by_other_commands(
    cli: Callable[..., Result], refused: Callable[..., str], model: Path, here: Path
) -> None:
    result = cli(*QUICK, "--target", "int2", "--target", "int8", "--output", "new/out")
    assert result.status == 0, result.err
    assert "new/out: predicted.json\n" in result.out
    kept = json.loads((here / "new/out/predicted.json").read_text())
    assert [point["target"] for point in kept["points"]] == ["int8", "int2"]
    assert kept["is_predicted"] is True
    assert {path.name for path in (here / "new/out").iterdir()} == {"predicted.json", "SHA256SUMS"}
    words = ("advise", "tiny", "--hardware", "h100", "--context", "100", "--measured", "new/out", "--json")
    options = {option["target"]: option for option in json.loads(cli(*words).out)["options"]}
    assert {name for name, option in options.items() if option["is_predicted"]} == {"int8", "int2"}
    # Measurements go into the same folder, and predictions into a frontier's.
    measured = cli("frontier", "tiny", *FRONTIER[2:4], "--output", "new/out", *SMALL, "--target", "int8")
    assert measured.status == 0, measured.err
    again = cli(*QUICK, "--target", "int2", "--output", "new/out", "--json")
    assert json.loads(again.out) == json.loads((here / "new/out/predicted.json").read_text())
    # What was predicted of other formats stays, and is never replaced by what is of another text.
    assert [point["target"] for point in json.loads(again.out)["points"]] == ["int8", "int2"]
    (here / "other.txt").write_text((here / "text.txt").read_text()[1:])
    others = tuple("other.txt" if word == "text.txt" else word for word in QUICK)
    line = "predicted.json': keeps predictions of another model, text or windows"
    assert line in refused(*others, "--target", "int4", "--output", "new/out")
    options = {option["target"]: option for option in json.loads(cli(*words).out)["options"]}
    assert {name: options[name]["is_predicted"] for name in ("int8", "int2")} == {"int8": False, "int2": True}
    (here / "new/out/predicted.json").write_text("{}")
    assert line in refused(*QUICK, "--target", "int4", "--output", "new/out")


@pytest.mark.parametrize(
    "target", ["foo", "int4:48", "vllm:foo", "llama.cpp:q9", "mla:7", "mla", "gqa:x", "mla@7", "same"]
)
def test_what_is_no_target_is_refused_in_a_short_line(refused: Callable[..., str], model: Path, target: str) -> None:
    for words in (QUICK, FRONTIER):
        line = refused(*words, "--target", target)
        assert f"--target = '{target}': " in line
        assert len(line) <= 200
    assert "must be vllm: with fp8, int8_per_token_head" in refused(*QUICK, "--target", "vllm:foo")
    assert "must be a conversion, such as mla:0.5, gqa:2" in refused(*QUICK, "--target", "foo")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((*QUICK, "--target", "mqa"), "target = 'mqa': is no format of a cache"),
        ((*QUICK, "--calibration-tokens", "100"), "must be at least 256 tokens"),
        ((*QUICK, "--evaluate", "exam.txt"), "--evaluate = ['exam.txt']: does not go with --quick"),
        ((*QUICK, "--output", "tiny"), "output = 'tiny': holds something else"),
        ((*QUICK, "--output", "text.txt"), "is a file or a link"),
        ((*QUICK, "--output", "."), "output = '.': holds something else"),
        ((*QUICK, "--html", "page.html"), "does not go with --quick"),
        ((*QUICK, "--methods"), "--methods = True: does not go with --quick"),
        (("frontier", "tiny", "--quick"), "Missing option '--calibrate'"),
        (("frontier", "tiny", "--output", "out", "--no-plot"), "Missing option '--calibrate'"),
        (("frontier", "tiny", "--calibrate", "text.txt", "--no-plot"), "--output"),
        (
            (*FRONTIER, "--target", "mqa", "--calibration-window", "129"),
            "--calibration-window = 129: must be at most 128",
        ),
        ((*FRONTIER, "--target", "mla"), "target = 'mla': must be a conversion, such as mla:0.5"),
        ((*FRONTIER, "--target", "gqa:3"), "num_kv_heads = 3: must divide"),
        ((*FRONTIER, "--evaluate", "text.txt"), "evaluate = 'text.txt': is calibrated or trained on"),
        (("frontier", "nowhere", "--calibrate", "text.txt", "--output", "out", *SMALL), "nowhere"),
        (("frontier", "tiny", "--calibrate", "text.txt", "--output", "text.txt", *SMALL), "is a file or a link"),
        (("frontier", "tiny", "--calibrate", "text.txt", "--output", "text.txt/out", *SMALL), "text.txt is a file"),
        (("frontier", "tiny", "--calibrate", "text.txt", "--output", "tiny", *SMALL), "holds something else"),
    ],
    ids=str,
)
def test_bad_input(refused: Callable[..., str], model: Path, options: tuple[str, ...], line: str) -> None:
    assert line in refused(*options)
