"""One run of a command: a locked working folder, what is kept in it, and how a later run goes on from there."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import BaseFileLock, FileLock, Timeout

from headwise.base.checksums import relisted
from headwise.base.disk import storage_errors, write_whole
from headwise.base.documents import read_document
from headwise.base.processes import barrier, on_main_process
from headwise.errors import ArgumentError, HeadwiseError, StorageError

ANY_RUN = "any"
"""The run of a `Job` whose results each have an identity of their own, so that other runs use them too."""

_LAYOUT = 2
"""Rises when files of working folders change, so that what an older version left is begun anew, and never misread."""

_NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What the system says of a disk that is full or read-only."""

_LOCK, _RUN, _DONE = "lock", "run", ".finished"
_KEPT = "what is done is kept in "


class Job:
    """A run of a command, in a working folder that it locks and that a later run of the same command goes on from.

    A context. Of several processes on one run only the first enters it (`headwise.base.processes.entered_first`), and
    the others may use `work` from then on. The folder is removed in the end. After a kill, Ctrl-C, a full disk or a
    taken output it stays if it holds anything, and errors say so. After any other refusal it goes, since the same run
    would be refused again.

    Args:
        output: what the user asked for, which errors name.
        folder: the working folder; ``.OUT.headwise-partial`` beside the output when None.
        run: a digest of all that the output depends on (`headwise.models.checkpoints.run_identity`), so that what
            another run left is removed; `ANY_RUN`, so that nothing is, also after a refusal; or None for a run that
            no other goes on from, and that leaves nothing.

    Attributes:
        output: the argument of this name.
        partial: the working folder.
        work: the folder in it for results.
        notes: what a user should know of this run.
        stays: set it where the folder is to stay after the end.

    Raises:
        ArgumentError: another process has locked the folder.
        StorageError: the working folder cannot be made.
    """

    def __init__(self, output: Path, *, folder: Path | None = None, run: str | None) -> None:
        self.output = output
        self.partial = partial_folder(output) if folder is None else folder
        self.work = self.partial
        self.notes: tuple[str, ...] = ()
        self.stays = False
        self._run = run
        self._lock: BaseFileLock | None = None
        self._new_parents: list[Path] = []

    def __enter__(self) -> Self:
        self._new_parents = [parent for parent in self.partial.parents if not parent.exists()]
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.partial)
            self._take_up()
        except BlockingIOError as error:
            raise ArgumentError("output", str(self.output), str(error.strerror)) from None
        except OSError as error:
            refusal = StorageError("output", str(self.output), f"cannot be written: {error.strerror}")
            self._end(refusal)
            raise refusal from None
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, OSError) and error.errno in _NO_DISK:
                raise StorageError("output", str(self.output), f"could not be written: {error.strerror}") from error
            if error is None:
                with storage_errors("output", self.output):
                    self._finish()
        except BaseException as failure:
            self._end(failure)
            raise
        self._end(error)

    @property
    def is_entered(self) -> bool:
        """Whether this process has entered the context, and so is the one that writes."""
        return self._lock is not None

    def finish(self) -> None:
        """Note that the output is moved into its place next, for `clear_finished`.

        Raises:
            StorageError: the note cannot be written.
        """
        with storage_errors("output", self.output):
            (self.partial / _DONE).touch()

    def _take_up(self) -> None:
        """Take over what an earlier run left, and remove what another run did."""
        file, run = self.partial / _RUN, f"{_LAYOUT} {self._run}"
        (self.partial / _DONE).unlink(missing_ok=True)
        if self._run is None or not file.is_file() or file.read_text(encoding="utf-8") != run:
            if self._holds_something():
                self.notes = ("discarded what another conversion to this folder had left unfinished",)
            file.unlink(missing_ok=True)  # first, so that no run takes over a folder that is half removed
            _empty(self.partial)
            if self._run is not None:
                write_whole(file, run.encode())

    def _finish(self) -> None:
        """Bring what is done into its place."""

    def _holds_something(self) -> bool:
        """Whether there is anything that a later run could go on from."""
        with suppress(OSError):  # somebody has removed the folder
            return any(path.name not in (_LOCK, _RUN, _DONE) for path in self.partial.iterdir())
        return False

    def _end(self, error: BaseException | None) -> None:
        """Leave the folder, which is removed unless a later run can use it; an error then says so."""
        is_refused = (
            isinstance(error, HeadwiseError) and not isinstance(error, StorageError) and error.field != "output"
        )
        if error is None:
            stays = self.stays
        elif self._lock is None or self._run is None or (is_refused and self._run != ANY_RUN):
            stays = False
        else:
            stays = self._holds_something()
        self._leave(stays=stays)
        if not stays:
            return
        kept = f"{_KEPT}{self.partial}, and the same command continues from there"
        if isinstance(error, StorageError):
            rule, _, _ = error.rule.partition(f"; {_KEPT}")  # of a folder within this one
            raise StorageError(error.field, error.value, f"{rule}; {kept}") from error
        if isinstance(error, KeyboardInterrupt):
            notes = getattr(error, "__notes__", [])
            is_within = any(note.startswith(_KEPT) for note in notes)
            error.__notes__ = [kept] if is_within else [*notes, kept]

    def _leave(self, *, stays: bool) -> None:
        lock, self._lock = self._lock, None
        if lock is not None and stays:
            lock.release()
        elif lock is not None:
            with suppress(OSError):
                remove_locked(self.partial, lock)
        for parent in self._new_parents:  # innermost first; one that holds something stays
            with suppress(OSError):
                parent.rmdir()


def partial_folder(output: Path) -> Path:
    """The working folder of what is being written.

    For example ``partial_folder(Path("out"))`` is ``Path(".out.headwise-partial")``.
    """
    return output.with_name(f".{output.name}.headwise-partial")


def remembered(
    file: Path, keys: Collection[str], make: Callable[[], Mapping[str, Any]], *, listed_in: Path | None = None
) -> dict[str, Any]:
    """The record that a file keeps as a JSON object; made and kept there where it keeps none, or none that is whole.

    All processes of a run call it, make the object together, and get what the first one has written.

    For example ``remembered(Path("loss.json"), ["loss"], lambda: {"loss": measure()})["loss"]``.

    Args:
        file: the path of the JSON file.
        keys: the keys of the record; an object with others is none.
        make: called where there is none.
        listed_in: as for `write_file`.

    Raises:
        StorageError: the file cannot be written.
    """
    known = read_document(file)
    barrier()  # every process has looked for the file before the first one writes it
    if known is None or known.keys() != set(keys):
        write_file(file, json.dumps(make(), indent=2), listed_in=listed_in)
        known = read_document(file)
        assert known is not None
    return known


def write_file(file: Path, content: str, *, listed_in: Path | None = None) -> None:
    """Let the first process write a file, whole or not at all; its folder is made if it is missing.

    For example ``write_file(Path("out/frontier.md"), "# The frontier\\n")``.

    Args:
        file: the file.
        content: the text.
        listed_in: the folder, whose runs write one file after another, that keeps checksums of them.

    Raises:
        StorageError: the file cannot be written.
    """

    def write() -> None:
        with storage_errors("output", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with nullcontext() if listed_in is None else relisted(file, listed_in):
                write_whole(file, content.encode(errors="backslashreplace"))

    on_main_process(write)


def lock_folder(folder: Path) -> BaseFileLock:
    """Make a folder where there is none, and lock it until `remove_locked`, a release or the end of this process.

    The operating system releases the lock with the process, so one that was killed blocks nobody.

    Args:
        folder: made with the parents that it needs.

    Raises:
        BlockingIOError: another process has the lock; ``strerror`` says which.
        OSError: the folder cannot be made.
    """
    file = folder / _LOCK
    lock = FileLock(file, blocking=False, thread_local=False, fallback_to_soft=False)
    while not lock.is_locked:
        if folder.is_symlink() or folder.is_file():
            kind = "link" if folder.is_symlink() else "file"
            raise NotADirectoryError(errno.ENOTDIR, f"{folder.name} is a {kind}", str(folder))
        try:
            lock.acquire()
        except Timeout:
            if file.exists():  # otherwise the process that had the lock has just removed the folder
                raise BlockingIOError(errno.EAGAIN, f"is being written by process {_holder(file)}") from None
        except (FileNotFoundError, FileExistsError):  # it did so while filelock made the folder or opened the file
            continue
    with suppress(OSError):  # Windows may let nobody write in a locked file
        file.write_text(str(os.getpid()))
    return lock


def clear_finished(folder: Path) -> None:
    """Remove the working folder of a run that was killed after its output had been moved into its place.

    Call it where an output that is there is refused. A folder of a run that had not come so far stays.

    For example ``clear_finished(partial_folder(Path("own.txt")))``.

    Args:
        folder: the working folder.
    """
    with suppress(OSError):  # another process has the lock
        if (folder / _DONE).is_file() or {path.name for path in folder.iterdir()} <= {_LOCK}:
            remove_locked(folder, lock_folder(folder))


def _holder(lock: Path) -> str:
    with suppress(OSError):
        return lock.read_text(errors="replace") or "another"
    return "another"


def remove_locked(folder: Path, lock: BaseFileLock) -> None:
    """Remove a locked folder, its lock last, so that no other process takes a folder that is half removed.

    Args:
        folder: the folder to remove.
        lock: the lock that `lock_folder` gave.
    """
    try:
        _empty(folder)
        (folder / _DONE).unlink(missing_ok=True)
        (folder / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # another process has just locked it
            folder.rmdir()
    finally:
        lock.release()


def _empty(folder: Path) -> None:
    """Remove everything in a folder except its lock, and the note that what is there is of no more use."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (_LOCK, _DONE):
            path.unlink()
