"""Write files that survive a kill or a power cut whole, and lock a folder for one process."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwise.errors import ArgumentError, StorageError

_LOCK = "lock"
_KEPT = "what is done is kept in "


@contextmanager
def storage_errors(field: str, path: str | Path, done: str = "written") -> Iterator[None]:
    """Turn an OSError of the block into an error that names the file and what could not be done with it.

    Args:
        field: what the file is to the user, such as ``output``.
        path: the file or folder.
        done: what could not be done, such as ``read``.

    Raises:
        StorageError: in the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(field, str(path), f"could not be {done}: {error.strerror or error}") from None


def refuse_file(output: Path) -> None:
    """Refuse a destination that is a file or a link, or whose parent is a file.

    Args:
        output: the folder that is to be made.

    Raises:
        ArgumentError: it is one of these, or cannot be inspected.
    """
    try:
        nearest = next(parent for parent in output.absolute().parents if parent.exists())
        if not nearest.is_dir():
            raise ArgumentError("output", str(output), f"cannot be made: {nearest} is a file")
        if output.is_symlink() or (output.exists() and not output.is_dir()):
            raise ArgumentError("output", str(output), "is a file or a link; it must be a folder or not exist")
    except OSError as error:
        raise ArgumentError("output", str(output), f"cannot be used: {error.strerror}") from None


def refuse_input_within(output: Path, path: Path, kind: str) -> None:
    """Refuse a destination whose replacement would remove an input of the run.

    Args:
        output: the folder that may be replaced.
        path: the input, a file or a folder.
        kind: what the input is to the user, such as ``the source``.

    Raises:
        ArgumentError: the destination is the input, or holds it; links are followed.
    """
    kept = Path(os.path.realpath(path))
    if Path(os.path.realpath(output)) in (kept, *kept.parents):
        raise ArgumentError("output", str(output), f"must not be {kind}, or a folder that holds it")


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk.

    Raises:
        OSError: the path cannot be opened, or the disk refuses.
    """
    if sys.platform == "win32":  # Windows cannot open folders, and writes names through without being asked
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def replace(source: Path, destination: Path) -> None:
    """Rename a file over another one and wait until the disk has both its content and its name.

    The content is waited for before the rename: otherwise a power cut may keep the name and lose the content.

    Raises:
        OSError: the file cannot be renamed.
    """
    sync(source)
    os.replace(source, destination)
    sync(destination.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that after a kill has either all of the new content or all of the old one.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    replace(new, path)


def refuse_no_file(field: str, path: Path) -> None:
    """Refuse, before any work, a path at which no file could be written.

    Args:
        field: the argument or option that holds the path.
        path: of the file to write.

    Raises:
        ArgumentError: there is something else than a file at the path, or its folder does not exist or is read-only.
    """
    with _refused(field, path):
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise ArgumentError(field, str(path), "must be a file, or not exist")
        tempfile.TemporaryFile(dir=target.parent).close()


def refuse_no_folder(field: str, path: Path) -> None:
    """Refuse, before any work, a path at which no folder could be made.

    Args:
        field: the argument or option that holds the path.
        path: of the folder, which is made with those above it.

    Raises:
        ArgumentError: the nearest folder above it that exists is read-only.
    """
    with _refused(field, path):
        above = next(folder for folder in path.resolve().parents if folder.exists())
        tempfile.TemporaryFile(dir=above).close()


@contextmanager
def _refused(field: str, path: Path) -> Iterator[None]:
    """Say of a path what keeps it from being written."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        rule = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, FileNotFoundError):
            rule += f": there is no folder {path.parent}"
        raise ArgumentError(field, str(path), rule) from None


def write_among_others(path: Path, content: bytes) -> None:
    """Write a file as `write_whole` does, in a folder that may hold other people's files.

    The temporary name is one that no file has; a link is followed, and permissions of an existing file are kept.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    path = path.resolve()
    handle, new = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(new, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~mask)
        replace(Path(new), path)
    finally:
        Path(new).unlink(missing_ok=True)


@contextmanager
def working_folder(folder: Path, output: Path, *, keep: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Make and lock a folder for results that a later run of the same command can use.

    The folder is removed with the block, unless it is to be kept. After an error it stays if it holds anything, and
    the error says so where the same command can succeed: after Ctrl-C and a full disk.

    Args:
        folder: to make, with the parents that it needs.
        output: what the user asked for, which errors name.
        keep: asked at the end of the block, whether the folder stays.

    Raises:
        ArgumentError: another process has locked the folder.
        StorageError: it cannot be made; or in the place of an OSError of the block.
    """
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    with storage_errors("output", output):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_folder(folder)
        except BlockingIOError as error:
            raise ArgumentError("output", str(output), str(error.strerror)) from None
    try:
        with storage_errors("output", output):
            yield folder
    except BaseException as error:
        if not _holds_anything(folder):
            _remove_with_parents(folder, lock, new_parents)
            raise
        unlock(lock)
        kept = continues_from(folder)
        if isinstance(error, StorageError):
            rule, _, _ = error.rule.partition(f"; {_KEPT}")  # of a folder within this one
            raise StorageError(error.field, error.value, f"{rule}; {kept}") from error
        if isinstance(error, KeyboardInterrupt):
            error.__notes__ = [kept]
        raise
    if keep():
        unlock(lock)
        return
    with suppress(OSError):  # all is done
        remove_locked(folder, lock)


def _holds_anything(folder: Path) -> bool:
    """Whether a locked folder has more than its lock; not if somebody has removed it."""
    with suppress(OSError):
        return any(path.name != _LOCK for path in folder.iterdir())
    return False


def _remove_with_parents(folder: Path, lock: int, new_parents: list[Path]) -> None:
    with suppress(OSError):
        remove_locked(folder, lock)
    for parent in new_parents:  # innermost first; one that holds something stays
        with suppress(OSError):
            parent.rmdir()


def continues_from(folder: Path) -> str:
    """What a user who stopped a run, or whose disk is full, should know of a working folder that stays."""
    return f"{_KEPT}{folder}, and the same command continues from there"


def lock_folder(folder: Path) -> int:
    """Make a folder where there is none, and lock it until `remove_locked`, `unlock` or the end of this process.

    The operating system releases the lock with the process, so one that was killed blocks nobody.

    Args:
        folder: its parent must exist.

    Returns:
        The lock, an open file descriptor.

    Raises:
        BlockingIOError: another process has the lock; ``strerror`` says which.
        OSError: the folder cannot be made.
    """
    while True:
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{folder.name} is a link", str(folder))
        with suppress(FileExistsError):  # `exist_ok` would then check for a folder that may be gone again
            folder.mkdir()
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the process that had the lock has just removed the folder
            continue
        try:
            _hold(lock)
            if _is_there(folder, lock):
                os.truncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode(errors="replace") or "another"
            os.close(lock)
            raise BlockingIOError(errno.EAGAIN, f"is being written by process {holder}") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def unlock(lock: int) -> None:
    """Release a lock of `lock_folder`."""
    os.close(lock)


def remove_locked(folder: Path, lock: int) -> None:
    """Remove a locked folder, its lock last, so that no other process takes a folder that is half removed.

    Args:
        folder: to remove.
        lock: of `lock_folder`.
    """
    try:
        empty_folder(folder)
        (folder / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # another process has just locked it
            folder.rmdir()
    finally:
        unlock(lock)


def empty_folder(folder: Path) -> None:
    """Remove everything in a folder except its lock.

    Raises:
        OSError: something cannot be removed.
    """
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def _hold(lock: int) -> None:
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_there(folder: Path, lock: int) -> bool:
    """Whether the locked file is still the one in the folder, which another process may have removed."""
    try:
        return os.path.samestat(os.stat(folder / _LOCK), os.fstat(lock))
    except FileNotFoundError:
        return False
