"""One command run by two processes that torchrun starts, or in the tests `warm`, as torchrun starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import headwise
from headwise.conversion.calibration.saved import open_statistics, read_evidence
from headwise.conversion.storage import LayerFiles
from headwise.models.checkpoints import open_checkpoint
from tests.cli.conftest import Result
from tests.closeness import assert_close
from tests.real_models import save_tiny
from tests.warm import run, start

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40
LOST = "headwise: another process of this run was ended; the same command continues from there"


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """torchrun itself, in fresh processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*launch, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "exam.txt").write_text("a lazy fox does not jump over the quick brown dog again. " * 20)
    return save_tiny(tmp_path / "source", "qwen2")


def test_grams_are_those_of_one_process(cli: Callable[..., Result], source: Path, tmp_path: Path) -> None:
    """Seven windows, which do not split evenly."""
    options = ("--calibrate", tmp_path / "text.txt", "--calibration-tokens", 7 * 256, "--calibration-window", 64)
    alone = cli("calibrate", source, tmp_path / "one", *options, "--json")
    assert (alone.status, json.loads(alone.out)["tokens"]) == (0, 7 * 256)
    done = torchrun("-m", "headwise", "calibrate", source, tmp_path / "two", *options, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == 7 * 256  # printed once
    for name in ("one", "two"):
        open_statistics(tmp_path / name, open_checkpoint(source))  # refuses what is not whole
    for index in range(2):
        expected, shared = (read_evidence(LayerFiles(tmp_path / name), index) for name in ("one", "two"))
        for field in ("inputs", "keys", "head_weight", "distances", "queries"):
            assert_close(getattr(shared.statistics, field), getattr(expected.statistics, field), 1e-10)
        assert shared.sensitivity is not None
        assert expected.sensitivity is not None
        assert_close(shared.sensitivity, expected.sensitivity, 1e-6)  # kept in float32


@pytest.mark.parametrize(
    ("form", "without", "tolerance"),
    [("headwise", ("--without", "refine"), 1e-4), ("deepseek", (), 3e-2)],  # Adam makes much of rounding
    ids=["headwise", "deepseek"],
)
def test_a_conversion_is_that_of_one_process(
    cli: Callable[..., Result], source: Path, tmp_path: Path, form: str, without: tuple[str, ...], tolerance: float
) -> None:
    options = ("--to", "mla", "--kv-budget", "0.5", "--calibrate", tmp_path / "text.txt", "--format", form, *without)
    exam = ("--calibration-tokens", 512, "--evaluate", tmp_path / "exam.txt", "--json")
    alone = cli("convert", source, tmp_path / "one", *options, *exam)
    assert alone.status == 0, alone.err
    done = run("-m", "headwise", "convert", source, tmp_path / "two", *options, *exam, ranks=2)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(alone.out), json.loads(done.stdout)]  # printed once
    for name, report in zip(("one", "two"), reports, strict=True):
        assert report["output"] == str(tmp_path / name)
        assert "Not measured" not in (tmp_path / name / "README.md").read_text()
    one, two = (report["evaluation"]["perplexity"] for report in reports)
    assert two == pytest.approx(one, rel=1e-3)
    if form == "deepseek":
        one, two = (report["stock"]["shared_plan_error"] for report in reports)
        assert two == pytest.approx(one, rel=1e-3)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        one, two = (headwise.load(tmp_path / name, dtype="float32")(ids).logits for name in ("one", "two"))
    assert_close(two, one, tolerance)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exam.txt", "one", "source", "text.txt", "two"]


def test_what_it_would_take(source: Path, tmp_path: Path) -> None:
    options = ("--to", "mla", "--kv-budget", "0.5", "--calibrate", tmp_path / "text.txt", "--dry-run", "--json")
    done = run("-m", "headwise", "convert", source, tmp_path / "out", *options, ranks=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"] > 0  # printed once
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exam.txt", "source", "text.txt"]


def test_bad_input_is_one_line(source: Path, tmp_path: Path) -> None:
    options = ("--to", "mqa", "--calibrate", "nowhere.txt")
    done = run("-m", "headwise", "convert", source, tmp_path / "out", *options, ranks=2)
    assert done.stderr == "headwise: --calibrate = 'nowhere.txt': could not be read: No such file or directory\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["migrate", "sample"])
def test_a_command_of_one_process_refuses_several(command: str, source: Path, tmp_path: Path) -> None:
    texts = ("--max-quality-loss", 1, "--calibrate", tmp_path / "text.txt", "--evaluate", tmp_path / "exam.txt")
    more = texts if command == "migrate" else ()
    done = run("-m", "headwise", command, source, tmp_path / "out", *more, ranks=2)
    (message,) = done.stderr.splitlines()
    assert "processes = 2: must be one" in message
    assert done.returncode == 2
    assert not (tmp_path / "out").exists()


FAILING = """
import os, signal, sys
from pathlib import Path
from headwise.cli import app, main
from headwise.cli.torchrun import as_one_process
from headwise.errors import ArgumentError
import headwise.cli.commands.convert

class StoppedError(ArgumentError):
    def __str__(self):  # torchrun stops this process when it is about to say why it fails
        os.kill(os.getpid(), signal.SIGTERM)
        return super().__str__()

@app.app.command()
def fail(rank: int, how: str):
    with as_one_process():
        from headwise.base.processes import barrier
        barrier()
        if int(os.environ["RANK"]) == rank:
            if how == "killed":
                os.kill(os.getpid(), 9)
            if how == "broken":
                raise RuntimeError("broken")
            raise (StoppedError if how == "stopped" else ArgumentError)("argument", rank, "is wrong")
        barrier()
        print("never")

try:
    main()
except SystemExit as ended:
    Path(__file__).with_name(f"status-{os.environ['RANK']}").write_text(str(ended.code))
    raise
"""


@pytest.mark.parametrize(("rank", "how"), [(0, "error"), (1, "error"), (1, "stopped")])
def test_an_error_of_one_process_ends_all(tmp_path: Path, rank: int, how: str) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    done = run(tmp_path / "failing.py", "fail", rank, how, ranks=2)
    assert done.stderr == f"headwise: argument = {rank}: is wrong\n"
    assert (done.returncode, done.stdout) == (2, "")


def test_torchrun_shows_the_error_and_the_status(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    done = torchrun(tmp_path / "failing.py", "fail", 1, "error")
    assert [line for line in done.stderr.splitlines() if line.startswith("headwise: ")] == [
        "headwise: argument = 1: is wrong"
    ]
    assert "exitcode  : 2" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("how", "status"), [("error", 2), ("broken", 1)])
def test_all_end_with_the_status_of_the_first(tmp_path: Path, how: str, status: int) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    done = run(tmp_path / "failing.py", "fail", 0, how, ranks=2)
    assert done.returncode == status
    assert (tmp_path / "status-1").read_text() == str(status)
    assert done.stderr.count("RuntimeError: broken") == (how == "broken")


def test_a_killed_process_ends_all(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    done = run(tmp_path / "failing.py", "fail", 1, "killed", ranks=2)
    assert done.stderr == f"{LOST}\n"
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


ENDING = """
import os, signal
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit(1)
"""


def test_a_killed_process_is_the_first_also_where_all_have_ended() -> None:
    """What the tests read of several processes: one that a signal ended is not hidden by those that miss it."""
    with start("-c", ENDING, ranks=2) as process:
        process.wait()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


PRINTING = """
import os, warnings
from headwise.cli.app import out, progress_bar
from headwise.cli.torchrun import as_one_process

with as_one_process(), progress_bar():
    warnings.warn("a warning")
    os.write(1, b"native\\n")
os.write(1, b"afterwards\\n")
out.print("a document")
"""


def test_libraries_print_once(tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(PRINTING)
    done = run(tmp_path / "printing.py", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "afterwards\na document\n"
    assert done.stderr.count("UserWarning: a warning") == 1
    assert done.stderr.count("native\n") == 1


STUCK = """
import ctypes, os, signal, time
from headwise.cli import torchrun

torchrun._PATIENCE = 1
with torchrun.as_one_process():
    if os.environ["RANK"] == "1":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)  # never comes back, and no signal's handler runs meanwhile
"""


def test_a_process_that_a_library_holds_ends_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    done = run(tmp_path / "stuck.py", ranks=2)
    assert done.stderr == f"{LOST}\n"
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
