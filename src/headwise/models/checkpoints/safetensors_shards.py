"""Write safetensors files one tensor at a time, so that memory holds only one of them.

The bytes are those of safetensors' own ``save_file``, which needs all tensors of the file in memory.
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

from headwise.base.disk import replace
from headwise.models.checkpoints.checkpoint import DTYPES, TensorInfo
from headwise.models.specs.stored_head import SINGLE, stored_tensors

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = ("F64", "F32", "BF16", "F16")  # safetensors': wide dtypes first, so that all are aligned


@dataclass(frozen=True)
class Shard:
    """The layout of one file.

    Attributes:
        file: its name.
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
        folder: to look in.
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
        tensors: by their names there.
        file: the file.

    Raises:
        OSError: it cannot be written.
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
        folder: to write it in.

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
