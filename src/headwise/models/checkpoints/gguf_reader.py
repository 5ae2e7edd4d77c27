"""GGUF files, dequantised one tensor at a time; where they keep tensors, and what llama.cpp's converters do to them.

Shapes: n experts, I width of an expert, H query heads, R latent rank, N unrotated dims of a head, V value dim,
D head dim, E hidden.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.errors import CheckpointError, StorageError
from headwise.models.checkpoints.checkpoint import DTYPES, Checkpoint, TensorInfo, no_numbers
from headwise.models.checkpoints.gguf_in_place import Rows, has_scales
from headwise.models.families import llama
from headwise.models.families.base import family_of
from headwise.models.specs import gguf_config, read_gguf_header
from headwise.models.specs.gguf_header import GgufTensor, read_exactly

Join = Callable[[Mapping[str, Tensor]], Tensor]
"""A tensor of transformers out of several of GGUF, by their names within a layer."""


@dataclass(frozen=True)
class GgufLayout:
    """The names and the form of a model's tensors in GGUF files.

    Attributes:
        names: GGUF name → transformers name, both with ``{layer}`` for the number of a layer; without ``.weight`` or
            ``.bias`` at the end, or with it where the two names end differently.
        is_interleaved: rows of queries and keys are stored as neighbouring pairs, transformers' as halves.
        norm_offset: the weights of norms are stored with this added.
        joined: endings of the transformers names that several tensors make up, and how.
    """

    names: Mapping[str, str]
    is_interleaved: bool = False
    norm_offset: float = 0.0
    joined: Mapping[str, Join] = field(default_factory=dict)


def gguf_layout(model_type: str) -> GgufLayout:
    """The layout of a model's tensors.

    For example ``gguf_layout("gemma3_text").norm_offset`` is 1.0.

    Args:
        model_type: transformers' name of the architecture.

    Raises:
        SpecError: `families` has no file for the model type.
    """
    if model_type in ("deepseek_v2", "deepseek_v3"):
        return _DEEPSEEK
    family = family_of(model_type)
    return GgufLayout(family.gguf_tensors, family.gguf_interleaved, family.gguf_norm_offset)


def _decoder(parts: Mapping[str, Tensor]) -> Tensor:
    """``kv_b_proj`` ``[H · (N + V), R]`` of its two parts, ``[H, R, N]`` and ``[H, V, R]``."""
    return torch.cat((parts["attn_k_b"].transpose(1, 2), parts["attn_v_b"]), 1).flatten(0, 1)


def _experts(parts: Mapping[str, Tensor]) -> Tensor:
    """``[n, 2 · I, E]`` of the gates and the others, ``[n, I, E]`` each."""
    return torch.cat((parts["ffn_gate_exps"], parts["ffn_up_exps"]), 1)


_DEEPSEEK = GgufLayout(
    {
        **{name: own for name, own in llama.FAMILY.gguf_tensors.items() if not name.endswith((".attn_k", ".attn_v"))},
        **{
            f"blk.{{layer}}.{name}": f"model.layers.{{layer}}.{target}"
            for name, target in {
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
                "attn_k_b": "self_attn.kv_b_proj",
                "attn_v_b": "self_attn.kv_b_proj",
                "ffn_gate_inp": "mlp.gate",
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
                "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_down_exps.weight": "mlp.experts.down_proj",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
            }.items()
        },
    },
    joined={"self_attn.kv_b_proj.weight": _decoder, "mlp.experts.gate_up_proj": _experts},
)
"""DeepSeek-V2 and V3. Older files have ``attn_kv_b`` as a whole, newer ones in two parts, or both."""


class _Stored(NamedTuple):
    """A tensor in the file.

    Attributes:
        place: the tensor's name, shape and offset in the file.
        kind: the tensor's GGML type.
        nbytes: the tensor's size in bytes.
    """

    place: GgufTensor
    kind: Any
    nbytes: int


class GgufCheckpoint(Checkpoint):
    """A ``.gguf`` model, its tensors under transformers' names. Quantised tensors are read as float32.

    Args:
        path: the file, or any part of a model that is split over several.

    Attributes:
        quantization: the GGML type that most quantised values have, such as ``Q4_1``; None where none are quantised.

    Raises:
        CheckpointError: a file is missing or cut short, or holds a tensor that has no place in the model.
        SpecError: the file's architecture is not understood.
        StorageError: a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        header = read_gguf_header(path)
        self.path, self._files = header.files[0], header.files
        self.config = gguf_config(header)
        self._layout = gguf_layout(self.config["model_type"])
        self._stored: dict[str, dict[str, _Stored]] = {}
        self._has_tokenizer = "tokenizer.ggml.model" in header.metadata
        sizes = {file: file.stat().st_size for file in header.files}
        for stored in header.tensors.values():
            try:
                kind = GGMLQuantizationType(stored.ggml_type)
            except ValueError:
                rule = "is a GGML type this gguf package does not know"
                raise CheckpointError(f"{stored.name} type", stored.ggml_type, rule) from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not _is_readable(kind):
                rule = "must be a floating or quantised type that the gguf package can dequantise"
                raise CheckpointError(f"{stored.name} type", kind.name, rule)
            if not stored.shape or stored.shape[-1] % block:
                rule = f"rows must be a multiple of {block}, as {kind.name} packs that many numbers together"
                raise CheckpointError(f"{stored.name} shape", stored.shape, rule)
            nbytes = math.prod(stored.shape) // block * block_bytes
            if stored.offset + nbytes > sizes[stored.file]:
                raise CheckpointError("file", str(stored.file), f"ends before tensor {stored.name}: it is cut short")
            name = self._transformers_name(stored.name)
            self._stored.setdefault(name, {})[stored.name.split(".")[-2]] = _Stored(stored, kind, nbytes)
        self.tensors = {name: self._info(name, parts) for name, parts in self._stored.items()}
        if not self.tensors:
            raise CheckpointError("file", str(path), "has no tensors")
        self.quantization = self._commonest_quantization()
        self._take_as_transformers()

    @property
    def files(self) -> tuple[Path, ...]:
        """See `Checkpoint.files`."""
        return self._files

    @property
    def writable(self) -> frozenset[str]:
        """See `Checkpoint.writable`: tensors that are stored as one, and in a floating type."""

        def is_floating(parts: Mapping[str, _Stored]) -> bool:
            return [own.kind.name in DTYPES for own in parts.values()] == [True]

        stored = self._stored.items()
        return frozenset(name for name, parts in stored if is_floating(parts) and self._join(name, parts) is None)

    def write(self, tensors: Mapping[str, Tensor], files: Mapping[Path, Path]) -> None:
        """Write other numbers into copies of the model's files, in the type and order that the files have.

        Args:
            tensors: the new tensors by transformers' name, which has to be among `writable`.
            files: the copy of each of the model's files.

        Raises:
            OSError: a copy cannot be written.
        """
        for name, tensor in tensors.items():
            ((stored, kind, nbytes),) = self._stored[name].values()
            is_norm = name.endswith("norm.weight")
            held = tensor + self._layout.norm_offset if is_norm and self._layout.norm_offset else tensor
            if heads := self._heads(name):
                held = interleaved(held, heads)
            content = held.to(DTYPES[kind.name]).contiguous().view(torch.uint8).numpy().tobytes()
            assert len(content) == nbytes, name
            with files[stored.file].open("r+b") as file:
                file.seek(stored.offset)
                file.write(content)

    def _commonest_quantization(self) -> str | None:
        """The quantised type of most of the model's values; None where none are quantised."""
        values: Counter[str] = Counter()
        for parts in self._stored.values():
            for stored, kind, _ in parts.values():
                if kind.name not in DTYPES:
                    values[kind.name] += math.prod(stored.shape)
        return max(values, key=lambda name: values[name], default=None)

    def _transformers_name(self, stored: str) -> str:
        stem, _, kind = stored.rpartition(".")
        layer = re.match(r"blk\.(\d+)\.", stem)
        template = re.sub(r"^blk\.\d+\.", "blk.{layer}.", stem)
        names, number = self._layout.names, layer[1] if layer else None
        if (whole := names.get(f"{template}.{kind}")) is not None:
            return whole.format(layer=number)
        if template not in names or kind not in ("weight", "bias"):
            rule = f"has no place in a {self.config['model_type']} model"
            raise CheckpointError("GGUF tensor", stored, rule)
        return f"{names[template].format(layer=number)}.{kind}"

    def _join(self, name: str, parts: Mapping[str, _Stored]) -> Join | None:
        """How a tensor is made of its parts; None where one of them is the whole.

        Raises:
            CheckpointError: parts are missing, or there is more than one whole.
        """
        join = next((join for ending, join in self._layout.joined.items() if name.endswith(ending)), None)
        if join is None or "attn_kv_b" in parts:
            return None
        try:
            join({part: torch.empty(stored.shape, device="meta") for part, (stored, _, _) in parts.items()})
        except (KeyError, RuntimeError, IndexError):
            shapes = ", ".join(f"{part} {stored.shape}" for part, (stored, _, _) in parts.items())
            raise CheckpointError("tensor", name, f"cannot be made of {shapes}") from None
        return join

    def _info(self, name: str, parts: Mapping[str, _Stored]) -> TensorInfo:
        """The shape and the dtype of a tensor."""
        empty = {
            part: torch.empty(own.shape, dtype=DTYPES.get(kind.name, torch.float32), device="meta")
            for part, (own, kind, _) in parts.items()
        }
        join = self._join(name, parts)
        made = empty[_whole(empty)] if join is None else join(empty)
        return TensorInfo(tuple(made.shape), made.dtype)

    def _read(self, name: str) -> Tensor:
        parts = self._stored[name]
        if (join := self._join(name, parts)) is not None:
            return join({part: self._read_stored(stored) for part, stored in parts.items()})
        tensor = self._read_stored(parts[_whole(parts)])
        if heads := self._heads(name):
            if len(tensor) % (2 * heads):
                raise CheckpointError(
                    f"{name} shape", tuple(tensor.shape), f"must have pairs of rows of {heads} heads"
                )
            pairs = torch.unflatten(tensor, 0, (heads, -1, 2))  # [H, D/2, 2, E]
            tensor = pairs.transpose(1, 2).reshape(tensor.shape).contiguous()  # [H·D, E]
        if self._layout.norm_offset and name.endswith("norm.weight"):
            tensor = tensor - self._layout.norm_offset
        return tensor

    def check_numbers(self, name: str) -> None:
        """See `Checkpoint.check_numbers`; of blocks the scales alone are read: their numbers are finite with them."""
        parts = self._stored[name].values()
        if not all(has_scales(stored.ggml_type) for stored, _, _ in parts):
            super().check_numbers(name)
            return
        for stored, _, nbytes in parts:
            with self._reading(name):
                raw = np.fromfile(stored.file, np.uint8, nbytes, offset=stored.offset)
            if kind := no_numbers(torch.from_numpy(Rows(raw, stored.ggml_type, stored.shape).scales())):
                raise CheckpointError("tensor", name, f"holds {kind}")

    def _read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        parts = self._stored[name]
        if len(parts) > 1 or self._heads(name):
            return super()._read_rows(name, rows)  # made of parts, or of rows in another order
        ((stored, kind, nbytes),) = parts.values()
        size = nbytes // stored.shape[0]
        with stored.file.open("rb") as file:
            raw = bytearray()
            for row in rows:
                file.seek(stored.offset + row * size)
                raw += read_exactly(file, size, stored.file)
        return _decoded(raw, kind, (len(rows), *stored.shape[1:]))

    def _read_stored(self, entry: _Stored) -> Tensor:
        stored, kind, nbytes = entry
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            return _decoded(read_exactly(file, nbytes, stored.file), kind, stored.shape)

    def _heads(self, name: str) -> int:
        """The heads of a tensor whose rows are stored as neighbouring pairs; 0 for other tensors."""
        field = INTERLEAVED.get(name.split(".")[-2]) if self._layout.is_interleaved else None
        return 0 if field is None else int(self.config[field])

    def copy_companions(self, destination: Path) -> None:
        """Rebuild the tokenizer from the file's metadata, where it has one, and save it into a folder.

        Args:
            destination: the folder, which must exist.

        Raises:
            CheckpointError: the metadata are damaged.
            StorageError: the tokenizer cannot be written.
        """
        from headwise.models.checkpoints.tokenizer import load_gguf_tokenizer

        if not self._has_tokenizer:
            return
        tokenizer = load_gguf_tokenizer(self.path)
        try:
            tokenizer.save_pretrained(destination)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # tokenizers' Rust code raises no OSError, and a panic is no Exception
            reason = " ".join(str(error).split())
            raise StorageError("tokenizer", str(destination), f"could not be written: {reason}") from None


INTERLEAVED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""The projections whose rows llama.cpp's converters reorder, and the field with the number of their heads."""


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Reorder rows ``[H·D, …]`` of queries or keys as llama.cpp does, from halves to neighbouring pairs."""
    halves = torch.unflatten(tensor, 0, (heads, 2, -1))  # [H, 2, D/2, …]
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()  # [H·D, …]


def _whole(parts: Mapping[str, object]) -> str:
    """The name of the part that is the whole tensor, where the parts are not joined."""
    return "attn_kv_b" if "attn_kv_b" in parts else next(iter(parts))


@cache
def _is_readable(kind: Any) -> bool:
    """Whether a GGML type is a floating one, or one of which the gguf package can dequantise a block."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    if kind.name in DTYPES:
        return True
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], dtype=np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


def _decoded(content: bytearray, kind: Any, shape: tuple[int, ...]) -> Tensor:
    """The numbers that the bytes of a tensor, or of some of its rows, stand for."""
    from gguf.quants import dequantize

    if not content:  # of a shape with a 0, which the gguf package cannot decode
        return torch.empty(shape)
    raw = np.frombuffer(content, dtype=np.uint8)
    if kind.name in DTYPES:
        return torch.from_numpy(raw).view(DTYPES[kind.name]).reshape(shape)
    with np.errstate(all="ignore"):  # `read` refuses a tensor with a scale that is NaN by name
        values = dequantize(raw.reshape(*shape[:-1], -1), kind)
    return torch.from_numpy(values).reshape(shape)
