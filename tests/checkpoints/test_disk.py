"""A folder has one owner at a time, however often it is made, removed and fought over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.checkpoints.disk import lock_folder, remove_locked, unlock, write_whole

PROGRAM = """
import os, sys
from pathlib import Path
from headwise.checkpoints.disk import lock_folder, remove_locked, unlock

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
