"""A folder is locked by one process at a time, and what a run leaves in it is there for the next one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwise.base.jobs import ANY_RUN, Job, clear_finished, lock_folder, remembered, remove_locked
from headwise.errors import ArgumentError, CheckpointError, HeadwiseError, StorageError

PROGRAM = """
import os, sys
from pathlib import Path
from headwise.base.jobs import lock_folder, remove_locked

folder = Path(sys.argv[1]) / "folder"

def fight(number):
    had, turn = 0, 0
    while had < 100:
        try:
            lock = lock_folder(folder)
        except BlockingIOError as error:
            assert error.strerror.startswith("is being written by process "), error
            continue
        had, turn = had + 1, turn + 1
        mark = folder / "owner"
        mark.write_text(str(number))
        (folder / "inner").mkdir(exist_ok=True)
        os.sched_yield()
        assert mark.read_text() == str(number)
        if turn % 3:
            remove_locked(folder, lock)
        else:
            lock.release()

children = []
for number in range(3):
    child = os.fork()
    if not child:
        try:
            fight(number)
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(repr(error))
            os._exit(1)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks those who fight")
def test_processes_that_fight_over_a_folder(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_lock_that_is_given_up_is_free_and_keeps_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    lock = lock_folder(folder)
    (folder / "file").write_text("kept")
    with pytest.raises(BlockingIOError):
        lock_folder(folder)
    lock.release()
    again = lock_folder(folder)
    assert (folder / "file").read_text() == "kept"
    remove_locked(folder, again)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("")
    with pytest.raises(NotADirectoryError):
        lock_folder(tmp_path / "folder")


def working(folder: Path, output: Path, run: str | None = "run") -> Job:
    return Job(output, folder=folder, run=run)


def test_a_working_folder_goes_with_its_block_and_stays_after_an_error_that_leaves_something(tmp_path: Path) -> None:
    work, out = tmp_path / "a" / "b" / ".out.work", tmp_path / "out"
    with working(work, out) as job:
        assert job.work == work
        with (
            pytest.raises(ArgumentError, match=r"^output = .*out': is being written by process"),
            working(work, out),
        ):
            pass
    assert not (tmp_path / "a").exists(), "parents that were made for it go too"

    with pytest.raises(ZeroDivisionError), working(work, out):
        _ = 1 / 0
    assert not (tmp_path / "a").exists()
    with pytest.raises(StorageError) as full, working(work, out):
        _write_and_raise(work, OSError(28, "No space left on device"))
    kept = f"what is done is kept in {work}, and the same command continues from there"
    assert full.value.rule == f"could not be written: No space left on device; {kept}"
    with working(work, out):
        assert (work / "done").read_text() == "kept"


def test_a_working_folder_that_somebody_removes_hides_no_error(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with pytest.raises(ZeroDivisionError), working(work, tmp_path / "out"):
        _remove_and_raise(work, ZeroDivisionError())
    with working(work, tmp_path / "out"):
        shutil.rmtree(work)


def _remove_and_raise(folder: Path, error: BaseException) -> None:
    shutil.rmtree(folder)
    raise error


def _write_and_raise(folder: Path, error: BaseException) -> None:
    (folder / "done").write_text("kept")
    raise error


def test_of_working_folders_within_each_other_the_outer_one_is_named(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "outer" / "inner"
    kept = f"what is done is kept in {outer}, and the same command continues from there"
    with pytest.raises(KeyboardInterrupt) as stopped, working(outer, outer), working(inner, inner):
        _write_and_raise(inner, KeyboardInterrupt())
    assert stopped.value.__notes__ == [kept]
    with pytest.raises(StorageError) as full, working(outer, outer), working(inner, inner):
        raise StorageError("output", "file", "is full")
    assert full.value.rule == f"is full; {kept}"


def test_a_folder_is_of_one_run_unless_its_results_have_identities(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"

    def stopped(run: str | None, error: BaseException) -> None:
        with pytest.raises(type(error)), working(work, out, run):
            _write_and_raise(work, error)

    for run, error, is_kept in (
        ("one", KeyboardInterrupt(), True),
        ("one", RuntimeError("a bug"), True),
        ("one", ArgumentError("output", "out", "exists"), True),
        ("one", CheckpointError("weights", "a", "are no numbers"), False),  # and would be again
        (ANY_RUN, CheckpointError("weights", "a", "are no numbers"), True),
        (None, KeyboardInterrupt(), False),
    ):
        stopped(run, error)
        assert work.exists() == is_kept, (run, error)
    for first, second, is_found in (("one", "one", True), ("one", "two", False), ("one", None, False)):
        stopped(first, KeyboardInterrupt())
        with working(work, out, second) as job:
            assert (work / "done").exists() == is_found
            assert bool(job.notes) == (not is_found)


def test_what_an_older_version_left_is_begun_anew(tmp_path: Path) -> None:
    """It kept the run's digest alone in the file, or none."""
    work = tmp_path / "work"
    for run in ("run", ANY_RUN):
        work.mkdir()
        (work / "run").write_text(run)
        (work / "done").write_text("in another form")
        with working(work, tmp_path / "out", run):
            assert not (work / "done").exists()


def test_a_folder_that_is_to_stay_is_free_and_stays(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for _ in range(2):
        with working(work, tmp_path / "out") as job:
            job.stays = True
    assert work.is_dir()


def test_what_is_remembered_is_made_once_and_again_where_it_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "new" / "loss.json"
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(0)
        return {"loss": [0.1, 2]}

    for damage, count in ((None, 1), (None, 1), (b"{", 2), (b"[]", 3), (b'{"kl": 1}', 4), (None, 4)):
        if damage is not None:
            file.write_bytes(damage)
        assert remembered(file, ["loss"], make) == {"loss": [0.1, 2]}
        assert len(made) == count
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwiseError, match=r"output = .*loss\.json': could not be written"):
        remembered(tmp_path / "file" / "loss.json", ["loss"], make)


def test_what_a_run_left_is_cleared_where_its_output_is_in_its_place(tmp_path: Path) -> None:
    """Of a run that was killed behind its move nothing is of use; of one that was killed before it everything is."""
    folder, output = tmp_path / ".out.headwise-partial", tmp_path / "out"
    for is_finished in (False, True):
        job = Job(output, run="a run")
        job.__enter__()
        (job.work / "result").write_text("hours of work")
        if is_finished:
            job.finish()
        clear_finished(folder)
        assert folder.exists(), "another process has the lock"
        assert job._lock is not None
        job._lock.release()  # as the end of the process does
        clear_finished(folder)
        assert folder.exists() != is_finished
    with Job(output, run=None):
        pass
    for names in (["lock"], []):  # the folder of a run that was killed while it removed it
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        clear_finished(folder)
        assert not folder.exists()
