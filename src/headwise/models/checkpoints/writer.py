"""Write a model folder one tensor at a time, whole or not at all, and go on where a killed run stopped.

All tensors are announced in advance, so that the header of each safetensors file is known before its first tensor is
there. Memory then holds one tensor and no file, and the bytes are those of safetensors' own ``save_file``, which
needs all tensors of the file in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from headwise.base.checksums import SUMS, list_folder
from headwise.base.disk import refuse_file, refuse_no_folder, replace, storage_errors, sync
from headwise.base.documents import MEASURED
from headwise.base.jobs import Job, lock_folder, partial_folder, remove_locked
from headwise.errors import ArgumentError, CheckpointError, StorageError
from headwise.models.checkpoints.checkpoint import DTYPES, Checkpoint, TensorInfo, dtype_name, no_numbers
from headwise.models.specs.sources import INDEX, SINGLE, stored_tensors

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = ("F64", "F32", "BF16", "F16")  # safetensors': wide dtypes first, so that all are aligned


@dataclass(frozen=True)
class Shard:
    """The layout of one file.

    Attributes:
        file: the name of the file.
        tensors: shape and dtype of each tensor, in the order in which they are added.
        header: all bytes before the first tensor.
        starts: offset of each tensor's bytes in the file.
        nbytes: size of the file.
    """

    file: str
    tensors: Mapping[str, TensorInfo]
    header: bytes
    starts: Mapping[str, int]
    nbytes: int


def split_into_shards(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[Shard]:
    """Distribute tensors over files, in order.

    Args:
        tensors: every tensor by name.
        shard_bytes: the most bytes of tensors in a file; a larger tensor has a file of its own.
    """
    groups: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if size and size + info.nbytes > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = info
        size += info.nbytes
    if len(groups) == 1:
        return [_shard(SINGLE, groups[0])]
    count = len(groups)
    return [_shard(f"model-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def is_whole(shard: Shard, folder: Path) -> bool:
    """Whether a folder has the file with the right size and the right header.

    Args:
        shard: the file.
        folder: the folder to look in.
    """
    try:
        with (folder / shard.file).open("rb") as file:
            return file.read(len(shard.header)) == shard.header and os.fstat(file.fileno()).st_size == shard.nbytes
    except OSError:
        return False


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in a safetensors file."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def overwrite_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors over those of the same names, shapes and dtypes in a safetensors file; all other bytes stay.

    Args:
        tensors: the tensors by their names in the file.
        file: the file.

    Raises:
        OSError: the file cannot be written.
    """
    places = stored_tensors(file)
    with file.open("r+b") as opened:
        for name, tensor in tensors.items():
            raw = tensor_bytes(tensor)
            assert len(raw) == places[name].nbytes, name
            opened.seek(places[name].start)
            opened.write(raw)


class ShardWriter:
    """Writes one file under a temporary name, and renames it once it is whole.

    Args:
        shard: the layout of the file.
        folder: the folder to write the file in.

    Attributes:
        left: names of the tensors that are still to be written.

    Raises:
        OSError: the file cannot be written, here or in any method.
    """

    def __init__(self, shard: Shard, folder: Path) -> None:
        self.shard = shard
        self.left = set(shard.tensors)
        self._path = folder / shard.file
        self._new = folder / f"{shard.file}.new"
        self._file: BinaryIO = self._new.open("wb")
        self._file.write(shard.header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors; after the last one the file has its name."""
        self.left.remove(name)
        self._file.seek(self.shard.starts[name])
        self._file.write(tensor_bytes(tensor))
        if not self.left:
            self._file.close()
            replace(self._new, self._path)

    def close(self) -> None:
        """Remove the unfinished file."""
        try:
            self._file.close()
        finally:
            self._new.unlink(missing_ok=True)


def _shard(file: str, tensors: Mapping[str, TensorInfo]) -> Shard:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (_ORDER.index(_NAMES[tensors[name].dtype]), name)):
        info = tensors[name]
        offsets[name], end = end, end + info.nbytes
        header[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return Shard(
        file=file,
        tensors=dict(tensors),
        header=len(text).to_bytes(8, "little") + text,
        starts={name: start + offset for name, offset in offsets.items()},
        nbytes=start + end,
    )


MODEL = "config.json"
"""The file that every model folder has."""
SHARD_BYTES = 2 * 1024**3
_HEADROOM = 64 * 1024**2
"""Bytes of disk that must be free beside the tensors: for everything else that is written."""


class FolderWriter(Job):
    """A job whose output is a model folder, which is written beside its destination and moved there at the end.

    All tensors are announced in advance, so the header of every shard is known, each tensor is written to its place,
    and a shard has its name once it is whole. A run that ends early, even by a kill, leaves its whole shards and
    `work`; the next run with the same ``run`` resumes from them, and any other run discards them. In a process that
    has not entered the context nothing is missing, and nothing is written.

    Args:
        output: the destination; must not exist, or be empty, unless ``overwrite``.
        tensors: shape and dtype of every tensor that will be added, in the order of the shards.
        run: digest of everything that the output depends on beside ``tensors`` and ``shard_bytes``; None for a run
            that is not resumed and leaves nothing.
        overwrite: replace a folder of the same kind.
        provisional: `announce` will replace ``tensors`` before the first one is added.
        shard_bytes: the most bytes of tensors in a shard.
        work_bytes: bytes of disk that `work` will take and that must be free on entering, beside the tensors.
        mark: the file that every folder of this kind has; ``config.json`` for model folders.

    Attributes:
        folder: the folder that becomes the destination. It has an index once every tensor is added, and with its
            ``config.json`` it can be read like any model folder.
        work: a folder for intermediate results that a later run can use; removed at the end.
        write_seconds: the seconds spent on writing tensors.

    Raises:
        ArgumentError: the destination is taken, or another process is writing it.
        StorageError: the disk has too little space, or fills up.
    """

    def __init__(
        self,
        output: Path,
        tensors: Mapping[str, TensorInfo],
        *,
        run: str | None = None,
        overwrite: bool = False,
        provisional: bool = False,
        shard_bytes: int = SHARD_BYTES,
        work_bytes: int = 0,
        mark: str = MODEL,
    ) -> None:
        check_output(output, overwrite=overwrite, mark=mark)
        super().__init__(output, run=None if run is None else _digest(run, tensors, shard_bytes))
        self.folder, self.work = self.partial / "model", self.partial / "work"
        self.write_seconds = 0.0
        self._overwrite, self._provisional, self._shard_bytes = overwrite, provisional, shard_bytes
        self._work_bytes, self._mark = work_bytes, mark
        self._lay_out(tensors)
        self._open: dict[str, ShardWriter] = {}

    def _lay_out(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = dict(tensors)
        self._shards = split_into_shards(tensors, self._shard_bytes)
        self._shard_of = {name: shard for shard in self._shards for name in shard.tensors}
        self._missing = dict.fromkeys(tensors if self.is_entered else ())

    @property
    def missing(self) -> list[str]:
        """The tensors that are still to be added, in order."""
        return list(self._missing)

    def has(self, name: str) -> bool:
        """Whether an announced tensor has been written, by this run or an earlier one."""
        assert name in self._tensors, name
        return name not in self._missing

    def announce(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Replace the provisional tensors by those that will be added.

        Args:
            tensors: shape and dtype of every tensor, in the order of the shards.

        Raises:
            StorageError: the folder cannot be used.
        """
        self._lay_out(tensors)
        if self.is_entered:
            with self._clearly():
                self._find_whole()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors that are `missing`.

        Args:
            name: the name of the tensor.
            tensor: a tensor that has the announced shape and dtype.

        Raises:
            CheckpointError: it has NaN or infinite values, as of a number that does not fit in the dtype.
            StorageError: the disk is full, or the file cannot be written.
        """
        start = time.perf_counter()
        info, shard = self._tensors[name], self._shard_of[name]
        assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype), (name, tensor.shape, info)
        if kind := no_numbers(tensor):
            rule = f"came out with {kind} in {dtype_name(info.dtype)}, and is not written; choose a wider dtype"
            raise CheckpointError("tensor", name, rule)
        del self._missing[name]
        with self._clearly():
            if shard.file not in self._open:
                self._open[shard.file] = ShardWriter(shard, self.folder)
            self._open[shard.file].write(name, tensor)
            if not self._open[shard.file].left:
                del self._open[shard.file]
            if not self._missing:
                self._write_index()
        self.write_seconds += time.perf_counter() - start

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file into the folder.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        # In ASCII: half a surrogate pair can be escaped in JSON, and cannot be written as UTF-8.
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file into the folder.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file into the folder.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        self.write_file(name, lambda path: path.write_bytes(content))

    def write_file(self, name: str, write: Callable[[Path], object]) -> None:
        """Let a function write a file of the folder, such as one that is too large for memory.

        Args:
            name: the name of the file.
            write: writes the file at the path that it is given.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        start = time.perf_counter()
        if self.is_entered:
            with self._clearly():
                write(self.folder / name)
        self.write_seconds += time.perf_counter() - start
        if name.endswith(".safetensors") and not self._missing:
            self._write_index()

    def add_companions(self, checkpoint: Checkpoint) -> None:
        """Copy the source's tokenizer and settings into the folder, and note what is left out.

        Args:
            checkpoint: the source.

        Raises:
            CheckpointError: the source's tokenizer is damaged.
            StorageError: a file cannot be read or written.
        """
        if self.is_entered:
            with self._clearly():
                checkpoint.copy_companions(self.folder)
            self.note_left_out(checkpoint)

    def note_left_out(self, checkpoint: Checkpoint) -> None:
        """Add a note with the files of the source that are not copied.

        Args:
            checkpoint: the source.
        """
        if names := checkpoint.left_out:
            listed = ", ".join(map(repr, names))
            note = f"not copied, as links out of the source folder or no regular files: {listed}"
            self.notes = (*self.notes, note)

    def _take_up(self) -> None:
        check_output(self.output, overwrite=self._overwrite, mark=self._mark)  # a process may just have finished
        super()._take_up()
        self.folder.mkdir(exist_ok=True)
        self.work.mkdir(exist_ok=True)
        self._missing = dict.fromkeys(self._tensors)
        if not self._provisional:
            self._find_whole()
        needed = sum(self._tensors[name].nbytes for name in self._missing) + _HEADROOM
        if self._provisional:  # of a run that is resumed, most may be there
            needed -= _size(self.folder)
        needed += max(self._work_bytes - _size(self.work), 0)
        if (free := shutil.disk_usage(self.partial).free) < needed:
            rule = f"needs {needed / 1e9:.2f} GB of disk and {free / 1e9:.2f} GB are free"
            raise StorageError("output", str(self.output), rule)

    def _finish(self) -> None:
        assert not self._missing, f"never added: {self.missing[:3]}"
        self._move_into_place()

    def _find_whole(self) -> None:
        """Keep the whole shards of an earlier run, and remove everything else from its model folder."""
        whole = {shard.file: shard for shard in self._shards if is_whole(shard, self.folder)}
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in whole:
                path.unlink()
        for shard in whole.values():
            for name in shard.tensors:
                del self._missing[name]
        if not self._missing:
            self._write_index()

    def _holds_something(self) -> bool:
        shards = {shard.file for shard in self._shards}
        with suppress(OSError):  # the folder has been moved into its place
            return any(path.name in shards for path in self.folder.iterdir()) or any(self.work.iterdir())
        return False

    def _write_index(self) -> None:
        """Write the index that says which files hold weights, where it is not one file alone."""
        files = {path.name for path in self.folder.glob("*.safetensors")} | {shard.file for shard in self._shards}
        if self._tensors and files != {SINGLE}:
            weight_map = {name: shard.file for name, shard in self._shard_of.items()}
            total = sum(info.nbytes for info in self._tensors.values())
            self.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _move_into_place(self) -> None:
        move_into_place(self.folder, self.output, overwrite=self._overwrite, mark=self._mark)

    def _clearly(self) -> AbstractContextManager[None]:
        return storage_errors("output", self.output)

    def _leave(self, *, stays: bool) -> None:
        for shard in self._open.values():
            with suppress(OSError):
                shard.close()
        self._open.clear()
        super()._leave(stays=stays)


def move_into_place(folder: Path, output: Path, *, overwrite: bool, mark: str = MODEL) -> None:
    """Write the checksums of a finished folder, and move it to its destination beside it, whole or not at all.

    For example ``move_into_place(Path("./.half.work/model"), Path("./half"), overwrite=False)``.

    Args:
        folder: the folder, on the destination's file system.
        output: the destination.
        overwrite: replace what is there, by `check_output`'s rules: it is asked again, as files may have appeared.
        mark: the file by which `check_output` knows a folder of the kind.

    Raises:
        ArgumentError: the destination is taken.
    """
    list_folder(folder)
    for path in (*folder.rglob("*"), folder):
        sync(path)
    check_output(output, overwrite=overwrite, mark=mark)
    replaced = output.with_name(f".{output.name}.headwise-replaced")
    if output.exists() and not any(output.iterdir()):
        output.rmdir()
    if not output.exists():
        os.replace(folder, output)
    else:
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            os.replace(output, replaced)
            os.replace(folder, output)
        finally:
            if not output.exists():  # interrupted between the two
                os.replace(replaced, output)
    sync(output.parent)
    if overwrite:  # otherwise it may be the only copy, left by a run killed between its two moves
        shutil.rmtree(replaced, ignore_errors=True)


def check_output(output: Path, *, overwrite: bool, mark: str = MODEL) -> None:
    """Refuse a destination that is not empty, unless it may be replaced.

    For example ``check_output(Path("./half"), overwrite=False)``.

    Args:
        output: the destination.
        overwrite: a folder with the file ``mark`` may be replaced.
        mark: the file that every folder of this kind has.

    Raises:
        ArgumentError: the destination is not empty, is no folder, or cannot be used.
    """
    if output.name in ("", ".."):
        raise ArgumentError("output", str(output), "must name a folder")
    if "\0" in str(output):
        raise ArgumentError("output", str(output), "must have no null byte")
    refuse_file(output)
    refuse_no_folder("output", output)
    try:
        holds_something = output.is_dir() and any(output.iterdir())
    except OSError as error:
        raise ArgumentError("output", str(output), f"cannot be used: {error.strerror}") from None
    if holds_something:
        if not overwrite:
            _clear_finished(partial_folder(output))
            raise ArgumentError("output", str(output), "exists and is not empty; say --overwrite to replace it")
        if not (output / mark).is_file():
            kind = "is not a model folder" if mark == MODEL else f"has no {mark}"
            raise ArgumentError("output", str(output), f"{kind}, so --overwrite will not replace it")
        others = sorted({path.name for path in output.iterdir()} - {mark, "README.md", MEASURED, SUMS})
        if mark.endswith(".gguf") and others:  # many people keep several of these files in a folder
            rule = f"holds {others[0]} too, so --overwrite will not replace it"
            raise ArgumentError("output", str(output), rule)


def _size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _clear_finished(partial: Path) -> None:
    """Remove the working folder of a process that was killed just after it had moved its model into place."""
    with suppress(OSError):
        if partial.is_dir() and not (partial / "model").exists():
            remove_locked(partial, lock_folder(partial))


def _digest(run: str, tensors: Mapping[str, TensorInfo], shard_bytes: int) -> str:
    announced = [[name, list(info.shape), dtype_name(info.dtype)] for name, info in tensors.items()]
    return hashlib.sha256(json.dumps([run, announced, shard_bytes]).encode()).hexdigest()
