"""Write files that survive a kill or a power cut whole, and refuse paths before any work."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headwise.errors import ArgumentError, StorageError


@contextmanager
def storage_errors(field: str, path: str | Path, done: str = "written") -> Iterator[None]:
    """Turn an OSError of the block into an error that names the file and what could not be done with it.

    Args:
        field: what the file is to the user, such as ``output``.
        path: the file or folder.
        done: what could not be done, such as ``read``.

    Raises:
        StorageError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(field, str(path), f"could not be {done}: {error.strerror or error}") from None


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read, which must be a regular one: a pipe may never begin, and a device may never end.

    For example ``with open_regular(Path("./model/config.json")) as file: …``.

    Raises:
        OSError: the file is none, or cannot be opened.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # which the system refuses, and says so
        raise OSError(errno.EINVAL, "must be a regular file", str(path))
    return path.open("rb")


def refuse_file(output: Path) -> None:
    """Refuse a destination that is a file or a link, or whose parent is a file.

    Args:
        output: the folder that is to be made.

    Raises:
        ArgumentError: the destination is one of these, or cannot be inspected.
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
        path: the path of the file to write.

    Raises:
        ArgumentError: the path holds something else than a file, or its folder does not exist or is read-only.
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
        path: the path of the folder, which is made with those above it.

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
