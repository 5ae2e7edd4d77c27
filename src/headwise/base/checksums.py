"""Checksums of what headwise writes, in the format of ``sha256sum``, and files and folders held to them.

A folder has them in a file ``SHA256SUMS``; a file has its own beside it, in ``FILE.sha256``. Both are read by
``sha256sum --check`` too. A folder gets its list before it is moved to its place: one with a list is complete.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.base.disk import open_regular, replace, storage_errors, write_whole
from headwise.base.documents import as_document
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError

SUMS = "SHA256SUMS"
"""The file of a folder with the checksums of the others."""

SUFFIX = ".sha256"
"""What the name of a file's checksum ends in, after that of the file."""

_CHUNK = 1 << 16
_LONGEST = 1 << 26
"""Bytes of a list that are read: it names its files, so a longer one is none."""
_LINE = re.compile(r"(\\?)([0-9a-f]{64})  ([^\n]+)")


@dataclass(frozen=True)
class Verification:
    """What a folder or a file is now, beside the checksums that were written with it.

    Attributes:
        path: the folder or the file, as it was given.
        files: number of files that have the content that they were written with.
        nbytes: the bytes of these files.
        differing: the files whose content is another, and the lists that are damaged.
        missing: the files that are listed and not there.
        unlisted: the files that no list has; they may have been added later, and nothing is known of them.
    """

    path: str
    files: int
    nbytes: int
    differing: tuple[str, ...]
    missing: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every listed file is there as it was written."""
        return not self.differing and not self.missing

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values, and ``is_whole``."""
        return {**as_document(self), "is_whole": self.is_whole}


@checked_types
def verify(path: str | Path, *, progress: Progress = silent) -> Verification:
    """Read what headwise has written, and compare it with the checksums that it was written with.

    For example ``verify("./half").is_whole``. Folders within a folder are verified by their own lists. Checksums find
    damage; whoever can change a file on purpose can change its checksum too.

    Args:
        path: a folder that headwise wrote, or one that holds such folders or files; or a file, which is listed in its
            folder or has its checksum beside it.
        progress: called with the bytes that have been read.

    Raises:
        ArgumentError: there is nothing at the path, or no list of checksums.
        StorageError: a file cannot be read.
    """
    given = Path(path)
    with storage_errors("path", given, "read"):
        if given.is_dir():
            lists = {file: _read_list(file) for file in _lists_in(given)}
        elif given.is_file():
            lists = _list_of(given)
        else:
            raise ArgumentError("path", str(path), "does not exist, or is neither a folder nor a file")
        if not lists:
            rule = f"has no {SUMS if given.is_dir() else given.name + SUFFIX}: it is not finished, or not headwise's"
            raise ArgumentError("path", str(path), rule)
        base = given if given.is_dir() else given.parent
        return _compared(str(path), base, lists, progress)


def list_folder(folder: Path) -> None:
    """Write the list of all files of a finished folder. For example ``list_folder(Path("half"))``.

    Raises:
        OSError: a file cannot be read, or the list cannot be written.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SUMS)
    _write_list(folder, {path.relative_to(folder).as_posix(): digest(path) for path in files})


@contextmanager
def relisted(file: Path, folder: Path) -> Iterator[None]:
    """Let the block write one file of a folder whose files are written one after another, and list the file.

    The file has no checksum while it is written, so that a kill leaves none that is wrong. For example
    ``with relisted(Path("out/a.json"), Path("out")): …``.

    Args:
        file: the file, which the block writes.
        folder: the folder of the list; it holds the file, or folders with it.

    Raises:
        OSError: the list cannot be read or written.
    """
    name = file.relative_to(folder).as_posix()
    listed = _read_list(folder / SUMS).digests if (folder / SUMS).is_file() else {}
    if listed.pop(name, None) is not None:
        _write_list(folder, listed)
    yield
    _write_list(folder, {**listed, name: digest(file)})


def replace_listed(source: Path, destination: Path) -> None:
    """Rename a finished file over another one, and its checksum beside it.

    The checksum is made where the file is made, and comes first: what has its name has its checksum. A kill leaves at
    most a checksum alone, which the next run replaces.

    Raises:
        OSError: one of the two files cannot be written.
    """
    sums = source.with_name(source.name + SUFFIX)
    sums.write_bytes(os.fsencode(_line(destination.name, digest(source))))
    replace(sums, destination.with_name(destination.name + SUFFIX))
    replace(source, destination)


def remove_listed(file: Path) -> None:
    """Remove a file, and its checksum. For example ``remove_listed(Path("half.gguf"))``."""
    file.with_name(file.name + SUFFIX).unlink(missing_ok=True)
    file.unlink()


def write_among_others(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, and its checksum, in a folder that may hold other people's files.

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
        replace_listed(Path(new), path)
    finally:
        for left in (new, new + SUFFIX):
            Path(left).unlink(missing_ok=True)


def digest(file: Path, on_read: Callable[[int], None] = lambda _: None) -> str:
    """The SHA-256 of a file, as 64 digits of base 16.

    Args:
        file: the file.
        on_read: called with the number of bytes of each chunk that has been read.

    Raises:
        OSError: the file cannot be read.
    """
    read, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as opened:
        while nbytes := opened.readinto(chunk):
            read.update(chunk[:nbytes])
            on_read(nbytes)
    return read.hexdigest()


@dataclass
class _List:
    """A list of checksums that was read: digests by the path of the file; whether a line is none, or a second one."""

    digests: dict[str, str] = field(default_factory=dict)
    is_damaged: bool = False


def _write_list(folder: Path, digests: Mapping[str, str]) -> None:
    lines = "".join(_line(name, digests[name]) for name in sorted(digests))
    write_whole(folder / SUMS, os.fsencode(lines))


def _line(name: str, sha256: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{sha256}  {escaped}\n"


def _read_list(file: Path) -> _List:
    with open_regular(file) as opened:
        content = os.fsdecode(opened.read(_LONGEST))
    found = _List(is_damaged=not content.endswith("\n"))
    for line in content.removesuffix("\n").split("\n") if content else ():
        match = _LINE.fullmatch(line)
        if match is None:
            found.is_damaged = True
            continue
        is_escaped, sha256, name = match.groups()
        if is_escaped:
            name = re.sub(r"\\(.)", lambda pair: {"n": "\n", "r": "\r"}.get(pair[1], pair[1]), name)
        parts = Path(name).parts
        if name in found.digests or ".." in parts or Path(name).is_absolute() or "\0" in name:
            found.is_damaged = True
            continue
        found.digests[name] = sha256
    return found


def _lists_in(folder: Path) -> Iterator[Path]:
    """The lists in a folder and those within it, hidden ones left out: those are of runs, and of other programs."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place) / name for name in sorted(files) if name == SUMS or _is_sum(Path(place) / name))


def _is_sum(file: Path) -> bool:
    """Whether a file has the name of the checksum of a file."""
    return file.suffix == SUFFIX and not file.name.startswith(".")


def _list_of(file: Path) -> dict[Path, _List]:
    """The list that a file is on, with its line alone; empty where there is none."""
    for path in (file, file.resolve()):
        beside = path.with_name(path.name + SUFFIX)
        for sums in (beside, path.parent / SUMS):
            if sums.is_file():
                found = _read_list(sums)
                if sums == beside or path.name in found.digests:
                    digests = {name: sha256 for name, sha256 in found.digests.items() if name == path.name}
                    return {sums: _List(digests, found.is_damaged or not digests)}
    return {}


def _compared(path: str, base: Path, lists: Mapping[Path, _List], progress: Progress) -> Verification:
    """Read every listed file."""
    listed, differing, missing, whole = set(lists), [], [], list[Path]()
    total = sum(_size(sums.parent / name) for sums, found in lists.items() for name in found.digests)
    done = nbytes = 0

    def on_read(more: int) -> None:
        nonlocal done
        done += more
        progress("reading", min(done, total), total)

    for sums, found in lists.items():
        names = {sums.name.removesuffix(SUFFIX)} if sums.name != SUMS else found.digests.keys()
        if found.is_damaged or names != found.digests.keys():
            differing.append(sums)
        for name, sha256 in found.digests.items():
            file = sums.parent / name
            listed.add(file)
            if not file.exists():
                missing.append(file)
                continue
            if file.is_file() and digest(file, on_read) == sha256:  # a pipe would never end
                whole.append(file)
                nbytes += file.stat().st_size
            else:
                differing.append(file)
    return Verification(
        path=path,
        files=len(whole),
        nbytes=nbytes,
        differing=_shown(differing, base),
        missing=_shown(missing, base),
        unlisted=_shown(sorted(_files_in(base) - listed), base) if Path(path).is_dir() else (),
    )


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _files_in(folder: Path) -> set[Path]:
    """All files in a folder, hidden ones left out."""
    found = set()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found |= {Path(place) / name for name in files if not name.startswith(".")}
    return found


def _shown(files: list[Path], base: Path) -> tuple[str, ...]:
    return tuple(file.relative_to(base).as_posix() if file.is_relative_to(base) else str(file) for file in files)
