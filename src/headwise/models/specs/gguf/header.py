"""Read a GGUF file's header: metadata and the tensor table.

The gguf package's reader makes a string of every vocabulary entry, which takes seconds. A model's attention is
described by a few dozen numbers, so this reader steps over long arrays.
Source: the GGUF specification, version 3 (ggml).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError, StorageError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_ARRAY = 1024
"""Items up to which an array is read; longer ones are stepped over."""
_MAX_DIMS = 8
"""The most dimensions of a tensor; more of them mean a damaged file."""

_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of what a config says: a factor for each rotary frequency."""


@dataclass(frozen=True)
class GgufTensor:
    """The place of one tensor; ``shape`` is in torch's order, and ``offset`` in bytes from the start of ``file``."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    file: Path


@dataclass(frozen=True)
class GgufHeader:
    """The part of a GGUF file, or of all files of a split model, before the weights.

    Attributes:
        metadata: the values of its keys.
        tensors: the places of its tensors, without those in ``factors``.
        factors: factors of rotary frequencies, by the tensor's name.
        files: the file, or the parts of the model in order.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    factors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        return str(self.metadata.get("general.architecture"))


def read_part_header(path: Path) -> GgufHeader:
    """Parse the header of one GGUF file, which may be a part of a model; see `read_gguf_header`.

    For example ``read_part_header(Path("model-00002-of-00003.gguf")).metadata["split.no"]`` is 1.

    Raises:
        CheckpointError: the file is not GGUF, is of an unknown version, or ends before its header does.
        StorageError: it cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise StorageError("file", str(path), f"could not be read: {error.strerror}") from None
    with file:
        if file.read(4) != _MAGIC:
            raise CheckpointError(str(path), "not GGUF", "the file must begin with the bytes GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(data, path)
            except (struct.error, IndexError, UnicodeDecodeError, OverflowError, RecursionError):
                raise CheckpointError(
                    str(path), f"{len(data)} bytes", "the GGUF header is cut short or damaged"
                ) from None


class _Reader:
    """Reads a GGUF header's values one after the other.

    Args:
        data: the file; reading starts behind its first four bytes.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = len(_MAGIC)

    def number(self, code: str) -> Any:
        """Read a number of the type that a `struct` format character names."""
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        """Read a string, which stands behind its length."""
        length = self.number("Q")
        if length > len(self._data) - self.position:
            raise IndexError
        self.position += length
        return self._data[self.position - length : self.position].decode()

    def value(self, kind: int) -> Any:
        """Read a value of one of GGUF's types; a long array is stepped over, and its length returned."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError("GGUF value type", kind, "is not in the GGUF specification")
        item, count = self.number("I"), self.number("Q")
        if count > len(self._data):
            raise IndexError
        if count <= _LONGEST_ARRAY:
            return [self.value(item) for _ in range(count)]
        self._skip(item, count)
        return count

    def _skip(self, item: int, count: int) -> None:
        if item in _SCALARS:
            self.position += count * struct.calcsize("<" + _SCALARS[item])
            return
        unpack: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if item == _STRING:
                self.position += 8 + unpack(self._data, self.position)[0]
            else:
                self.value(item)


def _parse(data: mmap.mmap, path: Path) -> GgufHeader:
    reader = _Reader(data)
    version, tensor_count, entry_count = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version not in (2, 3):
        raise CheckpointError("GGUF version", version, "must be 2 or 3")
    metadata = {}
    for _ in range(entry_count):
        key = reader.string()
        metadata[key] = reader.value(reader.number("I"))
    table = [_read_entry(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    # Stepping over a long array can lead past the end, and nothing has been read there to notice it.
    if reader.position > len(data) or not isinstance(alignment, int) or alignment < 1:
        raise IndexError
    start = -(-reader.position // alignment) * alignment
    tensors = {name: GgufTensor(name, shape, kind, start + offset, path) for name, shape, kind, offset in table}
    factors = {name: _floats(data, tensors.pop(name)) for name in _FACTORS if name in tensors}
    return GgufHeader(metadata, tensors, factors, (path,))


def _floats(data: mmap.mmap, tensor: GgufTensor) -> tuple[float, ...]:
    """Read a vector of float32.

    Raises:
        CheckpointError: it is none, or longer than a vector of factors.
    """
    if tensor.ggml_type != 0 or len(tensor.shape) != 1 or tensor.shape[0] > _LONGEST_ARRAY:
        rule = f"must be a vector of at most {_LONGEST_ARRAY} float32"
        raise CheckpointError(tensor.name, f"type {tensor.ggml_type} {tensor.shape}", rule)
    return struct.unpack_from(f"<{tensor.shape[0]}f", data, tensor.offset)


def _read_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Read a row of the tensor table: name, shape, type, and offset behind the header."""
    name = reader.string()
    dims = reader.number("I")
    if dims > _MAX_DIMS:
        raise IndexError
    shape = tuple(reversed([reader.number("Q") for _ in range(dims)]))
    return name, shape, reader.number("I"), reader.number("Q")
