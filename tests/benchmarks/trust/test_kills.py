"""The campaigns of kills and of faults, each on one command: what they count, and that they find what is wrong."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from benchmarks.trust.cases import content
from benchmarks.trust.ground import Ground
from benchmarks.trust.kills import Kill, killed
from benchmarks.trust.runs import Ended, Fault

from benchmarks.trust import cases, faults, kills

CASE = "export"


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text; of the inputs only the model is made, which is all that the case needs."""
    monkeypatch.setattr(cases, "export_gguf", lambda *_: None)
    monkeypatch.setattr(cases.headwise, "convert", lambda *_, **__: None)
    (tmp_path / "text.txt").write_text("".join(f"{index} bottles stand on the wall. " for index in range(99)))
    return tmp_path / "text.txt"


def test_every_output_is_the_undisturbed_one(text: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--folder", str(tmp_path), "--text", str(text), "--case", CASE, "--seed", "1"]
    kills.main([*options, "--json", str(results), "--kills", "2"])
    row = json.loads(results.read_text())["rows"][CASE]
    assert len(row["kills"]) == sum(row["signals"].values()) == sum(row["left"].values()) == 2
    assert row["outputs"] >= 1
    assert row["findings"] == []
    results.unlink()
    faults.main([*options, "--json", str(results), "--times", "1", "--fault", "error of the system"])
    row = json.loads(results.read_text())["rows"][CASE]
    assert row["faults"]["error of the system"]["times"] == row["outputs"] == 1
    assert not (tmp_path / "headwise-kills").exists()
    assert not (tmp_path / "headwise-faults").exists()


def test_what_is_wrong_is_found(text: Path, tmp_path: Path) -> None:
    cases.make_inputs(tmp_path / "work" / "inputs", text, real=False)
    ground = Ground(cases.CASES[CASE], tmp_path / "work")
    assert ground.findings == []
    ended = killed(ground, Kill(signal.SIGKILL, "operation", len(ground.operations)))
    assert ended.status == -signal.SIGKILL
    assert len(ended.operations) == len(ground.operations)
    ground.clear()
    assert ground.run(Fault("error", 1, 28)).complaint is None  # one line that says that the disk is full
    (ground.folder / "inputs" / "exam.txt").write_text("changed")
    ground.output.write_text("half")
    (ground.folder / "litter").touch()
    ground.check("a run")
    ground.go_on("a run")
    named_wrong, left = "the output has its name and is wrong in ['.']", "left behind: ['litter']"
    whats = "inputs changed", named_wrong, "the output differs", "inputs changed", left
    assert [what in finding for what, finding in zip(whats, ground.findings, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    ("status", "err", "is_wrong"),
    [
        (0, "a bar\nof progress", False),
        (2, "headwise: output = 'a': exists\n", False),
        (2, "Traceback (most recent call last):\nValueError: no\n", True),
        (None, "", True),
        (-signal.SIGSEGV, "", True),
        (-signal.SIGKILL, "", False),
    ],
)
def test_how_a_run_may_end(status: int | None, err: str, is_wrong: bool) -> None:
    assert (Ended(status, err, (), 1.0).complaint is not None) == is_wrong


def test_times_are_no_part_of_what_is_equal(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"seconds": 1.5, "kept": [{"peak_rss_bytes": 7, "loss": 0.5}]}')
    (tmp_path / "b.md").write_text("it took 1.5 s")
    (tmp_path / "c").write_bytes(b"1.5")
    assert content(tmp_path) == {
        "a.json": b'{"kept": [{"loss": 0.5}]}',
        "b.md": b"it took # s",
        "c": b"1.5",
    }
