"""Headers of GGUF files, of one file or of a model that lies in several; GGML's types, and the bytes of tensors.

A header is metadata and the table of tensors. The gguf package's reader makes a string of every vocabulary entry,
which takes seconds. A model's attention is described by a few dozen numbers, so this reader steps over long arrays.

llama.cpp's ``gguf-split`` gives every part of a model the metadata ``split.count``, ``split.no`` (from 0) and
``split.tensors.count`` (of all parts), and all other metadata to the first part alone. The parts lie in one folder,
and their names end in ``-00001-of-00003.gguf`` and so on.

Sources: the GGUF specification, version 3, and type_traits (ggml); llama.cpp's ``tools/gguf-split`` and
``src/llama-model-loader.cpp``; the gguf package's ``GGML_QUANT_SIZES``, to which a test holds the table of types.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from headwise.base.disk import open_regular, storage_errors
from headwise.errors import CheckpointError
from headwise.models.specs.model import MatrixFormat, StoredWeights

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_ARRAY = 1024
"""Items up to which an array is read; longer ones are stepped over."""
_MAX_DIMS = 8
"""The most dimensions of a tensor; more of them mean a damaged file."""

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
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
        metadata: the values of the header's keys; of a long array the number of its items.
        tensors: the places of the model's tensors, without those in ``factors``.
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
    with storage_errors("file", path, "read"):
        file = open_regular(path)
    with file:
        if file.read(4) != _MAGIC:
            raise CheckpointError(str(path), "not GGUF", "the file must begin with the bytes GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse_header(data, path)
            except (struct.error, IndexError, UnicodeDecodeError, OverflowError, RecursionError):
                rule = "the GGUF header is cut short or damaged"
                raise CheckpointError(str(path), f"{len(data)} bytes", rule) from None


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


def _parse_header(data: mmap.mmap, path: Path) -> GgufHeader:
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
    factors = {name: _read_floats(data, tensors.pop(name)) for name in FACTORS if name in tensors}
    return GgufHeader(metadata, tensors, factors, (path,))


def _read_floats(data: mmap.mmap, tensor: GgufTensor) -> tuple[float, ...]:
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


_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def first_part(path: Path) -> Path:
    """The first part of the model that a file is a part of, by the file's name, where that lies beside it.

    For example ``first_part(Path("model-00002-of-00003.gguf"))`` is ``Path("model-00001-of-00003.gguf")`` where that
    exists. Every other path is returned as it is.
    """
    match = _NAME.fullmatch(path.name)
    first = path if match is None else path.with_name(_part_name(match["stem"], 1, int(match["count"])))
    return first if first.is_file() else path


def renamed_parts(path: Path, count: int) -> list[Path]:
    """The paths of the files of a model that is written in ``count`` parts; with one part, the path itself.

    For example ``renamed_parts(Path("out.gguf"), 2)[0]`` is ``Path("out-00001-of-00002.gguf")``.

    Args:
        path: a ``.gguf``, with or without the number of a part.
        count: the number of parts.
    """
    if count == 1:
        return [path]
    match = _NAME.fullmatch(path.name)
    stem = path.stem if match is None else match["stem"]
    return [path.with_name(_part_name(stem, number, count)) for number in range(1, count + 1)]


def are_of_one_model(files: Sequence[Path]) -> bool:
    """Whether files are parts of one model by their names, which leave open whether parts are missing.

    For example ``are_of_one_model([Path("a-00001-of-00002.gguf"), Path("b-00002-of-00002.gguf")])`` is False.
    """
    matches = [_NAME.fullmatch(file.name) for file in files]
    return None not in matches and len({(match["stem"], match["count"]) for match in matches if match}) == 1


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header of a GGUF model; of one that is split over several files, the headers of all of them.

    For example ``read_gguf_header(Path("model-00001-of-00003.gguf")).files``.

    An array of more than 1024 items (the vocabulary) is stepped over, and its value is its length.

    Args:
        path: the file, or any part of a model.

    Raises:
        CheckpointError: a file is not GGUF, is of an unknown version, or ends before its header does; a part is
            missing, or is none of this model.
        StorageError: a file cannot be opened.
    """
    named = read_part_header(path)
    count = named.metadata.get("split.count", 0)
    if count in (0, 1):  # 0 is what ``gguf-split --merge`` leaves
        return named
    return _join_headers([named if file == path else read_part_header(file) for file in _part_files(path, count)])


def _part_files(path: Path, count: object) -> list[Path]:
    """The files of all parts of a model, by the name of one of them.

    Raises:
        CheckpointError: the name does not say where the others are, or one of them is missing.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        rule = f"is a part of a model in {count} files, so that its name must end in -00001-of-{count!s:0>5}.gguf"
        raise CheckpointError("file", str(path), rule)
    files = renamed_parts(path, int(match["count"]))
    for file in files:
        if not file.is_file():
            rule = f"is missing from {path.parent}: a part of the model of {path.name}"
            raise CheckpointError("file", file.name, rule)
    return files


def _part_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def _join_headers(parts: Sequence[GgufHeader]) -> GgufHeader:
    """The header of the whole model, of the headers of its parts in the order of their names.

    Raises:
        CheckpointError: a part is none of this model.
    """
    expected = parts[0].metadata.get("split.tensors.count")
    tensors: dict[str, GgufTensor] = {}
    factors: dict[str, tuple[float, ...]] = {}
    for number, part in enumerate(parts):
        (file,) = part.files
        wanted = {"split.no": number, "split.count": len(parts), "split.tensors.count": expected}
        for key, value in wanted.items():
            if part.metadata.get(key) != value:
                rule = f"must be {value} in part {number + 1} of {len(parts)}: {file.name} is none of this model"
                raise CheckpointError(key, part.metadata.get(key), rule)
        for name in (*part.tensors, *part.factors):
            if name in tensors or name in factors:
                raise CheckpointError("GGUF tensor", name, f"is in {file.name} and in a part before it")
        tensors |= part.tensors
        factors |= part.factors
    if len(tensors) + len(factors) != expected:
        rule = f"must be the number of tensors of all parts, which have {len(tensors) + len(factors)}"
        raise CheckpointError("split.tensors.count", expected, rule)
    return GgufHeader(parts[0].metadata, tensors, factors, tuple(file for part in parts for file in part.files))


TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""The name of each type, the values of a block, and its bytes."""

_PARTS = {"": "feed_forward", "_exps": "experts", "_shexp": "shared_experts"}
_STAGES = {
    **{f"attn_{name}": (f"{name}_proj",) for name in ("q", "k", "v", "q_a", "q_b", "kv_b")},
    "attn_qkv": ("q_proj", "k_proj", "v_proj"),
    "attn_output": ("o_proj",),
    "attn_kv_a_mqa": ("kv_a_proj_with_mqa",),
    **dict.fromkeys(("attn_k_b", "attn_v_b"), ("kv_b_proj",)),
    "ffn_gate_inp": ("router router",),
    **{
        f"ffn_{name}{suffix}": (f"{part} {name}_proj",)
        for suffix, part in _PARTS.items()
        for name in ("gate", "up", "down")
    },
}
"""The stages of `headwise.cost` that a tensor of a layer holds."""


CUT_SHORT = "is cut short: it has changed since its header was read"


def read_exactly(file: BinaryIO, nbytes: int, path: Path) -> bytearray:
    """Read so many bytes of a file, which may have been cut since its header was read.

    For example ``read_exactly(file, tensor_bytes(tensor), tensor.file)`` behind ``file.seek(tensor.offset)``.

    Raises:
        CheckpointError: the file ends before.
    """
    raw = bytearray(file.read(nbytes))
    if len(raw) != nbytes:
        raise CheckpointError("file", str(path), CUT_SHORT)
    return raw


def tensor_bytes(tensor: GgufTensor) -> int | None:
    """Bytes of a tensor; None where its type is not known.

    For example ``tensor_bytes(GgufTensor("output.weight", (2, 32), 8, 0))`` is 68.
    """
    if tensor.ggml_type not in TYPES:
        return None
    _, values, size = TYPES[tensor.ggml_type]
    return math.prod(tensor.shape) // values * size


def gguf_weights(header: GgufHeader, num_layers: int) -> StoredWeights:
    """The formats of all weights in a GGUF file, by the types of its tensors.

    For example ``gguf_weights(header, 30).scheme`` is ``"GGUF Q4_1, Q8_0, F32"``, the type of most bytes first.

    Args:
        header: the header of the file.
        num_layers: the number of the model's layers.
    """
    layers: list[dict[str, list[GgufTensor]]] = [defaultdict(list) for _ in range(num_layers)]
    vectors = []
    for name, tensor in header.tensors.items():
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if len(tensor.shape) == 1:
            vectors.append(tensor)
        elif found and int(found[1]) < num_layers:
            for stage in _STAGES.get(found[2], ()):
                layers[int(found[1])][stage].append(tensor)
    for layer in layers:  # a fused tensor that holds the gate as well
        if "feed_forward up_proj" in layer:
            layer.setdefault("feed_forward gate_proj", layer["feed_forward up_proj"])
    outside = {"embedding": header.tensors.get("token_embd.weight"), "head": header.tensors.get("output.weight")}
    unknown = sorted({each.ggml_type for each in header.tensors.values()} - TYPES.keys())
    bytes_of_vectors = sum(tensor_bytes(each) or 0 for each in vectors)
    stored = StoredWeights.of_layers(
        f"GGUF {', '.join(_names(list(header.tensors.values())))}",
        [{stage: form for stage, found in layer.items() if (form := _format(found))} for layer in layers],
        {name: form for name, tensor in outside.items() if tensor and (form := _format([tensor]))},
    )
    return replace(
        stored,
        vector_bytes=bytes_of_vectors / sum(math.prod(each.shape) for each in vectors) if vectors else 4,
        is_bound=bool(unknown),
        notes=tuple(f"ggml type {number} is not known" for number in unknown),
    )


def _names(tensors: Sequence[GgufTensor]) -> list[str]:
    """The types of tensors, that of most bytes first."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        if (size := tensor_bytes(tensor)) is not None:
            sizes[TYPES[tensor.ggml_type][0]] += size
    return sorted(sizes, key=lambda name: -sizes[name])


def _format(tensors: Sequence[GgufTensor]) -> MatrixFormat | None:
    """The format of a matrix that some tensors hold together; None where a type is not known."""
    sizes = [tensor_bytes(each) for each in tensors]
    values = sum(math.prod(each.shape) for each in tensors)
    if not values or any(size is None for size in sizes):
        return None
    return MatrixFormat(name="+".join(_names(tensors)), bits=8 * sum(size or 0 for size in sizes) / values)
