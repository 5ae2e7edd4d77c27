"""Read a GGUF file's header: metadata, the tensor table, and the `ModelSpec` they describe.

The gguf package's reader makes a string of every vocabulary entry, which takes seconds. A model's attention is
described by a few dozen numbers, so this reader steps over long arrays.
Source: the GGUF specification, version 3 (ggml).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError, SpecError, StorageError
from headwise.specs.huggingface import read_config
from headwise.specs.model import ModelSpec

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_ARRAY = 1024
"""Items up to which an array is read; longer ones are stepped over."""
_MAX_DIMS = 8
"""The most dimensions of a tensor; more of them mean a damaged file."""
_LARGEST_FLOAT32 = 3.4028234e38

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF's ``general.architecture`` → transformers' ``model_type``, for architectures whose metadata are understood."""


@dataclass(frozen=True)
class GgufTensor:
    """The place of one tensor; ``shape`` is in torch's order, and ``offset`` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """The part of a GGUF file before the weights."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        return str(self.metadata.get("general.architecture"))


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header of a GGUF file.

    For example ``read_gguf_header(Path("model.gguf")).architecture``.

    An array of more than 1024 items (the vocabulary) is stepped over, and its value is its length.

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
                return _parse(data)
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


def _parse(data: mmap.mmap) -> GgufHeader:
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
    tensors = {name: GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in table}
    return GgufHeader(metadata, tensors)


def _read_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Read a row of the tensor table: name, shape, type, and offset behind the header."""
    name = reader.string()
    dims = reader.number("I")
    if dims > _MAX_DIMS:
        raise IndexError
    shape = tuple(reversed([reader.number("Q") for _ in range(dims)]))
    return name, shape, reader.number("I"), reader.number("Q")


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The fields of the ``config.json`` that a GGUF header is equivalent to.

    For example ``gguf_config(read_gguf_header(Path("model.gguf")))["hidden_size"]``.

    Raises:
        SpecError: the architecture's metadata are not understood, or a needed number is missing.
    """
    metadata, architecture = header.metadata, header.architecture
    if architecture not in ARCHITECTURES:
        names = ", ".join(sorted(ARCHITECTURES))
        raise SpecError("general.architecture", architecture, f"is not understood in GGUF; known: {names}")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    for key in ("rope.scaling.type", "expert_count"):
        if get(key) not in (None, 0, "none"):
            raise SpecError(f"{architecture}.{key}", get(key), "is not understood in GGUF")
    if "rope_freqs.weight" in header.tensors:
        raise SpecError("rope_freqs.weight", "present", "scaled RoPE is not understood in GGUF; use the safetensors")
    for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon"):
        if not isinstance(get(key, 1.0), int | float):
            raise SpecError(f"{architecture}.{key}", get(key), "must be a number")
    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length")
    if head_dim is None and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0:
        head_dim = None if hidden_size % num_heads else hidden_size // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if head_dim is not None and get(key, head_dim) != head_dim:
            raise SpecError(f"{architecture}.{key}", get(key), f"must equal the head dim, {head_dim}")
    embedding = header.tensors.get("token_embd.weight")
    config = {
        "model_type": ARCHITECTURES[architecture],
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(get("rope.freq_base", 10000.0))},
        "vocab_size": embedding.shape[0] if embedding and embedding.shape else get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32",
    }
    if config["rms_norm_eps"] is not None:
        # The file holds a float32; the shortest decimal that rounds to it is the number its author wrote.
        config["rms_norm_eps"] = _shortest_float32(config["rms_norm_eps"])
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = token
    return config


def read_gguf_spec(path: Path) -> ModelSpec:
    """Read the spec of the model in a GGUF file."""
    return read_config(gguf_config(read_gguf_header(path)))


def _shortest_float32(value: float) -> float:
    """The shortest decimal that rounds to a float32."""
    if abs(value) > _LARGEST_FLOAT32:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
