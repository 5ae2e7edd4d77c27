"""Write a model folder one tensor at a time, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headwise.checkpoints.checkpoint import Checkpoint, TensorInfo
from headwise.checkpoints.folder import INDEX, SINGLE
from headwise.errors import ArgumentError, CheckpointError

SHARD_BYTES = 2 * 1024**3
_HEADROOM = 64 * 1024**2


class FolderWriter:
    """A context in which a model folder is written beside its destination and moved there at the end.

    What is to come is told in advance, so that shards have their final names and are written as they fill up;
    an exception, Ctrl-C included, leaves nothing behind.

    Args:
        output: the destination; must not exist, or be empty, unless ``overwrite``.
        tensors: every tensor that will be added, in the order of the shards.
        overwrite: replace a model folder (one with a ``config.json``) that is there.
        shard_bytes: a shard is closed before it grows beyond this.

    Raises:
        ArgumentError: the destination is taken.
        CheckpointError: there is no room on the disk, or it fills up.
    """

    def __init__(
        self,
        output: Path,
        tensors: Mapping[str, TensorInfo],
        *,
        overwrite: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        check_output(output, overwrite=overwrite)
        self.output = output
        self._partial = output.with_name(f".{output.name}.headwise-partial")
        self._new_parents: list[Path] = []
        self._tensors = dict(tensors)
        self._shard_of = _assign(tensors, shard_bytes)
        self._pending: dict[str, dict[str, Tensor]] = {}
        self._left = {
            shard: sum(1 for s in self._shard_of.values() if s == shard) for shard in self._shard_of.values()
        }

    def __enter__(self) -> Self:
        try:
            self._new_parents = [parent for parent in self.output.parents if not parent.exists()]
            self.output.parent.mkdir(parents=True, exist_ok=True)
            if self._partial.exists():
                shutil.rmtree(self._partial)
            self._partial.mkdir()
        except OSError as error:
            self._discard()
            raise CheckpointError("output", str(self.output), f"cannot be written: {error.strerror}") from None
        needed = sum(info.nbytes for info in self._tensors.values()) + _HEADROOM
        if (free := shutil.disk_usage(self._partial).free) < needed:
            self._discard()
            rule = f"needs {needed / 1e9:.2f} GB of disk and {free / 1e9:.2f} GB are free"
            raise CheckpointError("output", str(self.output), rule)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                assert not self._tensors, f"never added: {sorted(self._tensors)[:3]}"
                self._move_into_place()
        except OSError as failure:
            raise self._failed(failure) from failure
        finally:
            self._discard()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one of the announced tensors."""
        info = self._tensors.pop(name)
        assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype), (name, tensor.shape, info)
        shard = self._shard_of[name]
        self._pending.setdefault(shard, {})[name] = tensor.contiguous()
        self._left[shard] -= 1
        if self._left[shard] == 0:
            try:
                save_file(self._pending.pop(shard), self._partial / shard, metadata={"format": "pt"})
            except SafetensorError as error:
                reason = " ".join(str(error).split())
                raise CheckpointError("output", str(self.output), f"could not be written: {reason}") from None

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file into the folder."""
        # In ASCII: JSON can escape what UTF-8 cannot write, half a surrogate pair.
        try:
            (self._partial / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error

    def add_companions(self, checkpoint: Checkpoint) -> None:
        """Let the source write its tokenizer and settings into the folder."""
        try:
            checkpoint.copy_companions(self._partial)
        except OSError as error:
            raise self._failed(error) from error

    def _move_into_place(self) -> None:
        if set(self._shard_of.values()) != {SINGLE}:
            total = sum((self._partial / shard).stat().st_size for shard in set(self._shard_of.values()))
            self.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": self._shard_of})
        replaced = self.output.with_name(f".{self.output.name}.headwise-replaced")
        if not self.output.exists():
            os.replace(self._partial, self.output)
            return
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            os.replace(self.output, replaced)
            os.replace(self._partial, self.output)
        finally:
            if not self.output.exists():  # interrupted between the two
                os.replace(replaced, self.output)
        shutil.rmtree(replaced, ignore_errors=True)

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError("output", str(self.output), f"could not be written: {error.strerror or error}")

    def _discard(self) -> None:
        self._pending.clear()
        shutil.rmtree(self._partial, ignore_errors=True)
        for parent in self._new_parents:  # innermost first; one that holds something stays
            with suppress(OSError):
                parent.rmdir()


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse a destination that holds something, unless it is a model folder and ``overwrite`` is said.

    Raises:
        ArgumentError: it is taken.
    """
    if output.name in ("", ".."):
        raise ArgumentError("output", str(output), "must name a folder")
    try:
        is_taken = output.is_symlink() or (output.exists() and not output.is_dir())
        holds_something = output.is_dir() and any(output.iterdir())
    except OSError as error:
        raise ArgumentError("output", str(output), f"cannot be used: {error.strerror}") from None
    if is_taken:
        raise ArgumentError("output", str(output), "is a file or a link; it must be a folder or not exist")
    if holds_something:
        if not overwrite:
            raise ArgumentError("output", str(output), "exists and is not empty; say --overwrite to replace it")
        if not (output / "config.json").is_file():
            raise ArgumentError("output", str(output), "is not a model folder, so --overwrite will not replace it")


def _assign(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> dict[str, str]:
    """Tensor name → shard file name, filled in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        if size and size + info.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    if len(shards) == 1:
        return dict.fromkeys(shards[0], SINGLE)
    count = len(shards)
    return {name: f"model-{i:05d}-of-{count:05d}.safetensors" for i, names in enumerate(shards, 1) for name in names}
