"""safetensors files written one tensor at a time, so that memory holds no more than one of them.

The bytes are those that safetensors' own ``save_file`` writes, which needs the whole file in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from headwise.checkpoints.checkpoint import DTYPES, TensorInfo
from headwise.checkpoints.disk import replace
from headwise.checkpoints.folder import SINGLE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = ("F64", "F32", "BF16", "F16")  # safetensors': wide dtypes first, so that all are aligned


@dataclass(frozen=True)
class Shard:
    """What a file will hold.

    Attributes:
        file: its name.
        tensors: what is in it, in the order they come.
        header: all bytes before the first tensor's.
        starts: where each tensor's bytes begin in the file.
        nbytes: of the whole file.
    """

    file: str
    tensors: Mapping[str, TensorInfo]
    header: bytes
    starts: Mapping[str, int]
    nbytes: int


def plan_shards(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[Shard]:
    """The files for some tensors, filled in order; a file is closed before its tensors are more than ``shard_bytes``.

    Args:
        tensors: every tensor by name.
        shard_bytes: a larger tensor has a file of its own.
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
        return [_plan(SINGLE, groups[0])]
    count = len(groups)
    return [_plan(f"model-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def is_whole(shard: Shard, folder: Path) -> bool:
    """Whether a folder has the file, of the right size and with the right header."""
    try:
        with (folder / shard.file).open("rb") as file:
            return file.read(len(shard.header)) == shard.header and os.fstat(file.fileno()).st_size == shard.nbytes
    except OSError:
        return False


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's values as they lie in a file."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


class ShardWriter:
    """A shard on its way to the disk, under a name of its own until it is whole.

    Args:
        shard: what it will hold.
        folder: where it is written.

    Raises:
        OSError: it cannot be written, here or in any method.
    """

    def __init__(self, shard: Shard, folder: Path) -> None:
        self.shard = shard
        self.left = set(shard.tensors)
        self._path = folder / shard.file
        self._new = folder / f"{shard.file}.new"
        self._file: BinaryIO = self._new.open("wb")
        self._file.write(shard.header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of its tensors; the last one makes the file appear."""
        self.left.remove(name)
        self._file.seek(self.shard.starts[name])
        self._file.write(tensor_bytes(tensor))
        if not self.left:
            self._file.close()
            replace(self._new, self._path)

    def close(self) -> None:
        """Give up what is not whole, and its room on the disk."""
        try:
            self._file.close()
        finally:
            self._new.unlink(missing_ok=True)


def _plan(file: str, tensors: Mapping[str, TensorInfo]) -> Shard:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (_ORDER.index(_NAMES[tensors[name].dtype]), name)):
        info = tensors[name]
        offsets[name], end = end, end + info.nbytes
        header[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offsets[name], end],
        }
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
