"""A folder is locked by one process at a time, however often several make and remove it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.base.disk import (
    lock_folder,
    refuse_no_file,
    remove_locked,
    storage_errors,
    unlock,
    working_folder,
    write_among_others,
    write_whole,
)
from headwise.errors import ArgumentError, CheckpointError, StorageError

PROGRAM = """
import os, sys
from pathlib import Path
from headwise.base.disk import lock_folder, remove_locked, unlock

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
            unlock(lock)

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
    unlock(lock)
    again = lock_folder(folder)
    assert (folder / "file").read_text() == "kept"
    remove_locked(folder, again)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("")
    with pytest.raises(NotADirectoryError):
        lock_folder(tmp_path / "folder")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    for content in (b"first", b"second, longer", b""):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_among_others_takes_no_name_and_follows_links(tmp_path: Path) -> None:
    (tmp_path / "page.new").write_text("theirs")
    (tmp_path / "page").symlink_to(tmp_path / "real")
    for content in (b"one", b"two"):
        write_among_others(tmp_path / "page", content)
        assert (tmp_path / "real").read_bytes() == content
    assert (tmp_path / "page").is_symlink()
    assert (tmp_path / "page.new").read_text() == "theirs"
    assert {file.name for file in tmp_path.iterdir()} == {"page", "page.new", "real"}
    assert (tmp_path / "real").stat().st_mode & 0o777 == (tmp_path / "page.new").stat().st_mode & 0o777


def test_what_is_no_file_is_refused_before_any_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null"), Path()):
        with pytest.raises(ArgumentError, match="must be a file, or not exist"):
            refuse_no_file("html", path)
    for path in (tmp_path / "no" / "x", tmp_path / "file" / "x", tmp_path / "loop"):
        with pytest.raises(ArgumentError, match=r"html = .*: cannot be written: "):
            refuse_no_file("html", path)
    refuse_no_file("html", tmp_path / "file")
    assert {file.name for file in tmp_path.iterdir()} == {"pipe", "loop", "file"}


def test_what_the_disk_refuses_is_an_error_of_its_own_kind(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    message = f"file = '{missing}': could not be read: No such file"
    with pytest.raises(StorageError, match=message), storage_errors("file", missing, "read"):
        missing.read_bytes()
    assert issubclass(StorageError, CheckpointError)  # as those who wrote `except CheckpointError` expect


def test_a_working_folder_goes_with_its_block_and_stays_after_an_error_that_leaves_something(tmp_path: Path) -> None:
    work, out = tmp_path / "a" / "b" / ".out.work", tmp_path / "out"
    with working_folder(work, out) as folder:
        assert folder == work
        with (
            pytest.raises(ArgumentError, match=r"^output = .*out': is being written by process"),
            working_folder(work, out),
        ):
            pass
    assert not work.exists()
    (tmp_path / "a" / "b").rmdir()
    (tmp_path / "a").rmdir()

    with pytest.raises(ZeroDivisionError), working_folder(work, out):
        _ = 1 / 0
    assert not (tmp_path / "a").exists(), "parents that were made for it go too"

    with pytest.raises(StorageError) as full, working_folder(work, out):
        _write_and_raise(work, OSError(28, "No space left on device"))
    kept = f"what is done is kept in {work}, and the same command continues from there"
    assert full.value.rule == f"could not be written: No space left on device; {kept}"
    with working_folder(work, out):
        assert (work / "done").read_text() == "kept"


def test_a_working_folder_that_somebody_removes_hides_no_error(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with pytest.raises(ZeroDivisionError), working_folder(work, tmp_path / "out"):
        _remove_and_raise(work, ZeroDivisionError())
    with working_folder(work, tmp_path / "out"):
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
    with pytest.raises(KeyboardInterrupt) as stopped, working_folder(outer, outer), working_folder(inner, inner):
        _write_and_raise(inner, KeyboardInterrupt())
    assert stopped.value.__notes__ == [kept]
    with pytest.raises(StorageError) as full, working_folder(outer, outer), working_folder(inner, inner):
        raise StorageError("output", "file", "is full")
    assert full.value.rule == f"is full; {kept}"
