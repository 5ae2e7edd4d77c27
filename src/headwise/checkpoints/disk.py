"""Files that are whole after a kill or a power cut, and a folder that one process has to itself."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwise.errors import ArgumentError, StorageError

_LOCK = "lock"


@contextmanager
def clearly(field: str, path: str | Path, done: str = "written") -> Iterator[None]:
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
    """Refuse a destination that is a file or a link, or could only be made within a file.

    Raises:
        ArgumentError: it is one, or cannot be looked at.
    """
    try:
        nearest = next(parent for parent in output.absolute().parents if parent.exists())
        if not nearest.is_dir():
            raise ArgumentError("output", str(output), f"cannot be made: {nearest} is a file")
        if output.is_symlink() or (output.exists() and not output.is_dir()):
            raise ArgumentError("output", str(output), "is a file or a link; it must be a folder or not exist")
    except OSError as error:
        raise ArgumentError("output", str(output), f"cannot be used: {error.strerror}") from None


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk itself."""
    if sys.platform == "win32":  # which opens no folder, and writes names through by itself
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def replace(source: Path, destination: Path) -> None:
    """Rename a file over another, both contents on disk before the name, and the name before it returns.

    Without the first wait a power cut may keep the name and lose the content.
    """
    sync(source)
    os.replace(source, destination)
    sync(destination.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there with all of its content, or as it was before."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    replace(new, path)


def refuse_no_file(field: str, path: Path) -> None:
    """Refuse, before any work, a file that could not be written: no folder for it, or what is there is no plain file.

    Raises:
        ArgumentError: so it is.
    """
    try:
        found = path.resolve()
        if found.exists() and not found.is_file():
            raise ArgumentError(field, str(path), "must be a file, or not exist")
        with tempfile.TemporaryFile(dir=found.parent):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ArgumentError(
            field, str(path), f"cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None


def write_among_others(path: Path, content: bytes) -> None:
    """As `write_whole`, in a folder that is not ours: under a new name until then, and where a link leads."""
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


def lock_folder(folder: Path) -> int:
    """Make a folder, if need be, and have it until `remove_locked`, `unlock` or the end of this process.

    The operating system forgets the lock with the process, so one that was killed blocks nobody.

    Returns:
        The lock.

    Raises:
        BlockingIOError: another process has it; ``strerror`` says which.
        OSError: the folder cannot be made.
    """
    while True:
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{folder.name} is a link", str(folder))
        with suppress(FileExistsError):  # `exist_ok` would look whether it is a folder, when it may be gone again
            folder.mkdir()
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the one who had it has just removed the folder
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
    """Let others have the folder."""
    os.close(lock)


def remove_locked(folder: Path, lock: int) -> None:
    """Remove a folder that is locked, the lock last: whoever takes it meanwhile finds nothing half-removed."""
    try:
        empty_folder(folder)
        (folder / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # another process has just made it its own
            folder.rmdir()
    finally:
        unlock(lock)


def empty_folder(folder: Path) -> None:
    """Remove all that a folder holds, but the lock on it."""
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
    """Whether the file that was locked is still the one of that name."""
    try:
        return os.path.samestat(os.stat(folder / _LOCK), os.fstat(lock))
    except FileNotFoundError:
        return False
