"""Write a model as one GGUF file, a tensor in memory at a time.

Shapes: H heads, D head dim, N unrotated dims, V value dim, R latent rank, E hidden.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import CheckpointError, SpecError
from headwise.models.checkpoints.checkpoint import TensorInfo
from headwise.models.checkpoints.gguf_reader import INTERLEAVED, GgufLayout, gguf_layout, interleaved
from headwise.models.checkpoints.gguf_tokenizer import TokenizerField
from headwise.models.specs import GgufModel, gguf_model

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
"""The types that matrices are written in; vectors are always ``f32``."""

_LARGEST = {"f32": math.inf, "f16": 65504.0, "bf16": 3.3895e38, "q8_0": 127 * 65504.0}
"""The largest number of each type; a block of ``q8_0`` has a scale in float16."""

ROPE_FREQS = "rope_freqs.weight"

Split = Callable[[Tensor], Tensor]
"""A tensor of GGUF out of one of transformers."""


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file.

    Attributes:
        name: GGUF's.
        shape: the shape of the tensor in torch's order.
        kind: the tensor's type, one of `GGUF_TYPES`.
        made: the tensor out of transformers'.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    made: Split

    @property
    def type(self) -> GGMLQuantizationType:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType[self.kind.upper()]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        from gguf import GGML_QUANT_SIZES

        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // int(block) * int(block_bytes)

    def encode(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The bytes of the tensor, out of transformers' tensor.

        Raises:
            CheckpointError: a number is too large for the type.
        """
        from gguf.quants import quantize

        values = self.made(tensor).to(torch.float32).contiguous().numpy()
        if not float(np.abs(values).max(initial=0.0)) <= _LARGEST[self.kind]:  # also of NaN
            raise CheckpointError("tensor", self.name, f"does not fit in {self.kind}; choose a wider type")
        encoded: np.ndarray[Any, Any] = quantize(values, self.type)
        assert encoded.nbytes == self.nbytes, (self.name, encoded.nbytes, self.nbytes)
        return encoded


class GgufFile:
    """A model's GGUF file before it is written.

    Args:
        config: the model's ``config.json``, of a type in `headwise.models.specs.GGUF_ARCHITECTURES`.
        tensors: the shape of each of its tensors by transformers' name, in the order in which they will be given.
        kind: the type of matrices, one of `GGUF_TYPES`. Rows that ``q8_0`` cannot hold are ``f16``.
        tokenizer: the fields of the tokenizer.

    Raises:
        SpecError: llama.cpp has no such model, or a tensor has no place in it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        kind: str,
        tokenizer: Iterable[TokenizerField] = (),
    ) -> None:
        self._config, self._kind, self._tokenizer = config, kind, tuple(tokenizer)
        self._model: GgufModel = gguf_model(config)
        self._layout = gguf_layout(str(config["model_type"]))
        self._templates = _templates(self._layout)
        self._entries = {name: self._entries_of(name, info.shape) for name, info in tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(entry.nbytes for entries in self._entries.values() for entry in entries)

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the file.

        Args:
            path: the file; replaced if it exists.
            tensors: each tensor by transformers' name, in the announced order; float.

        Raises:
            CheckpointError: a number does not fit in its type.
            OSError: the file cannot be written.
        """
        from gguf import GGUFWriter

        writer = GGUFWriter(path, self._model.architecture)
        try:
            self._add_metadata(writer)
            factors = np.array(self._model.rope_factors, dtype=np.float32)
            if factors.size:
                writer.add_tensor_info(ROPE_FREQS, factors.shape, factors.dtype, factors.nbytes)
            for entries in self._entries.values():
                for entry in entries:
                    shape, dtype = _stored_shape(entry)
                    writer.add_tensor_info(entry.name, shape, dtype, entry.nbytes, raw_dtype=entry.type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors.size:
                writer.write_tensor_data(factors)
            expected = iter(self._entries)
            for name, tensor in tensors:
                assert name == next(expected), name
                for entry in self._entries[name]:
                    writer.write_tensor_data(entry.encode(tensor))
            assert next(expected, None) is None
        finally:
            writer.close()

    def _add_metadata(self, writer: GGUFWriter) -> None:
        from gguf import GGUFValueType, LlamaFileType

        file_type = {"f32": "ALL_F32", "q8_0": "MOSTLY_Q8_0"}.get(self._kind, f"MOSTLY_{self._kind.upper()}")
        writer.add_file_type(LlamaFileType[file_type])
        if self._kind == "q8_0":
            writer.add_quantization_version(2)
        for key, value in self._model.metadata.items():
            kind = next(kind for cls, kind in _VALUE_TYPES.items() if isinstance(value, cls))
            writer.add_key_value(key, value, GGUFValueType[kind])
        for field in self._tokenizer:
            item = None if field.item is None else GGUFValueType[field.item]
            writer.add_key_value(field.key, field.value, GGUFValueType[field.type], item)

    def _entries_of(self, name: str, shape: tuple[int, ...]) -> list[_Entry]:
        """The tensors of the file that a tensor of transformers becomes.

        Raises:
            SpecError: the tensor has no place in a GGUF file.
        """
        if name == "lm_head.weight" and self._config.get("tie_word_embeddings"):
            return []
        stem, _, kind = name.rpartition(".")
        layer = re.search(r"\.layers\.(\d+)\.", stem)
        template = re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", stem)
        targets = self._templates.get(template)
        if not targets or kind not in ("weight", "bias"):
            raise SpecError("tensor", name, f"has no place in llama.cpp's {self._model.architecture}")
        number = layer[1] if layer else None
        made = self._parts(stem.rpartition(".")[2])
        return [
            self._entry(f"{target.format(layer=number)}.{kind}", shape, made.get(_last(target))) for target in targets
        ]

    def _entry(self, name: str, shape: tuple[int, ...], made: Split | None) -> _Entry:
        made = made or _same
        own = tuple(made(torch.empty(shape, device="meta")).shape)
        kind = "f32" if len(own) == 1 else self._kind
        if kind == "q8_0" and own[-1] % 32:  # as llama.cpp's own tools do
            kind = "f16"
        return _Entry(name, own, kind, made)

    def _parts(self, module: str) -> dict[str, Split]:
        """How the tensors of a module are made, by their names within a layer; the others stay as they are."""
        config = self._config
        if module == "kv_b_proj":
            H, N, V = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))

            def by_head(tensor: Tensor) -> Tensor:
                return torch.unflatten(tensor, 0, (H, N + V))  # [H, N + V, R]

            return {
                "attn_k_b": lambda tensor: by_head(tensor)[:, :N].transpose(1, 2),  # [H, R, N]
                "attn_v_b": lambda tensor: by_head(tensor)[:, N:],  # [H, V, R]
            }
        heads = INTERLEAVED.get(module)
        if heads is None or not self._layout.is_interleaved:
            return {}
        paired = partial(interleaved, heads=config.get(heads) or config["num_attention_heads"])
        return {"attn_q": paired, "attn_k": paired}


_VALUE_TYPES = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}


def _templates(layout: GgufLayout) -> dict[str, list[str]]:
    """GGUF's names by transformers', both without ``.weight`` or ``.bias``."""
    templates: dict[str, list[str]] = {}
    for name, target in layout.names.items():
        if not name.endswith((".weight", ".bias")) and _last(name) != "attn_kv_b":
            templates.setdefault(target, []).append(name)
    return templates


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _stored_shape(entry: _Entry) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the dtype of a tensor as the gguf package takes them: bytes, for all but two types."""
    from gguf.quants import quant_shape_to_byte_shape

    if entry.kind in ("f32", "f16"):
        return entry.shape, np.dtype(np.float32 if entry.kind == "f32" else np.float16)
    return tuple(quant_shape_to_byte_shape(entry.shape, entry.type)), np.dtype(np.uint8)
