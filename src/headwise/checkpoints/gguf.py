"""GGUF files, dequantised one tensor at a time."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.checkpoints.checkpoint import DTYPES, Checkpoint, TensorInfo
from headwise.errors import CheckpointError, StorageError
from headwise.specs import gguf_config, read_gguf_header


class GgufCheckpoint(Checkpoint):
    """A ``.gguf`` file, its tensors under transformers' names. Quantised tensors are read as float32.

    Args:
        path: the file.

    Attributes:
        quantization: the GGML type that most quantised values have, such as ``Q4_1``; None where none are quantised.

    Raises:
        CheckpointError: the file is cut short, or holds a tensor that has no place in the model.
        SpecError: its architecture is not understood.
        StorageError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self.path = path
        header = read_gguf_header(path)
        self.config = gguf_config(header)
        self._stored, self.tensors = {}, {}
        self._has_tokenizer = "tokenizer.ggml.model" in header.metadata
        size = path.stat().st_size
        for stored in header.tensors.values():
            name = self._transformers_name(stored.name)
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
            if stored.offset + nbytes > size:
                raise CheckpointError("file", str(path), f"ends before tensor {stored.name}: it is cut short")
            self._stored[name] = (stored, kind, nbytes)
            self.tensors[name] = TensorInfo(stored.shape, DTYPES.get(kind.name, torch.float32))
        if not self.tensors:
            raise CheckpointError("file", str(path), "has no tensors")
        self.quantization = self._commonest_quantization()

    def _commonest_quantization(self) -> str | None:
        """The quantised type of most of the model's values; None where none are quantised."""
        values: dict[str, int] = {}
        for stored, kind, _ in self._stored.values():
            if kind.name not in DTYPES:
                values[kind.name] = values.get(kind.name, 0) + math.prod(stored.shape)
        return max(values, key=lambda name: values[name], default=None)

    def _transformers_name(self, stored: str) -> str:
        stem, _, kind = stored.rpartition(".")
        layer = re.match(r"blk\.(\d+)\.", stem)
        template = re.sub(r"^blk\.\d+\.", "blk.{layer}.", stem)
        names = self.family.gguf_tensors
        if template not in names or kind not in ("weight", "bias"):
            rule = f"has no place in a {self.family.model_type} model"
            raise CheckpointError("GGUF tensor", stored, rule)
        return f"{names[template].format(layer=layer[1] if layer else None)}.{kind}"

    def _read(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        stored, kind, nbytes = self._stored[name]
        with self.path.open("rb") as file:
            file.seek(stored.offset)
            raw = np.frombuffer(bytearray(file.read(nbytes)), dtype=np.uint8)
        if kind.name in DTYPES:
            tensor = torch.from_numpy(raw).view(DTYPES[kind.name]).reshape(stored.shape)
        else:
            rows = raw.reshape(*stored.shape[:-1], -1)
            with np.errstate(all="ignore"):  # `read` refuses a tensor with a scale that is NaN by name
                values = dequantize(rows, kind)
            tensor = torch.from_numpy(values).reshape(stored.shape)
        if self.family.gguf_interleaved:
            tensor = self._unpermute(name, tensor)
        return tensor

    def _unpermute(self, name: str, tensor: Tensor) -> Tensor:
        """Undo llama.cpp's reordering of the rows of queries and keys from halves to neighbouring pairs."""
        heads = {
            "q_proj": self.config["num_attention_heads"],
            "k_proj": self.config["num_key_value_heads"],
        }.get(name.split(".")[-2])
        if heads is None:
            return tensor
        pairs = torch.unflatten(tensor, 0, (heads, -1, 2))  # [H, D/2, 2, E]
        return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()  # [H·D, E]

    def copy_companions(self, destination: Path) -> None:
        """Rebuild the tokenizer from the file's metadata, where it has one, and save it into a folder.

        Args:
            destination: the folder, which must exist.

        Raises:
            CheckpointError: the metadata are damaged.
            StorageError: the tokenizer cannot be written.
        """
        from headwise.checkpoints.tokenizer import load_gguf_tokenizer

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
