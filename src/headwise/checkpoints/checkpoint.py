"""A model on disk, read one tensor at a time: what the folder and the GGUF reader have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.family import Family, family_of
from headwise.errors import CheckpointError, StorageError
from headwise.specs import ModelSpec, read_config

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes weights are read in, by the name safetensors and GGUF both give them."""

_PIECE = 1 << 20


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``, as configs and reports write it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor's shape, and the dtype it is read as."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Its size once read."""
        return self.numel * self.dtype.itemsize


class Checkpoint(ABC):
    """A model's config and weights.

    Attributes:
        path: the folder or file.
        config: what its ``config.json`` holds, or would.
        spec: what the config describes.
        tensors: every stored tensor by transformers' name.
        read_seconds: how long reading and checking them has taken so far.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    read_seconds: float = 0.0

    @property
    def spec(self) -> ModelSpec:
        """What the config describes."""
        return read_config(self.config)

    @property
    def family(self) -> Family:
        """Where its attention lives, in the names of these tensors."""
        family = family_of(str(self.config.get("model_type")))
        is_whole = not self.tensors or any(name.startswith(family.base) for name in self.tensors)
        return family if is_whole else family.bare()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype most of its values are read as."""
        counts: dict[torch.dtype, int] = {}
        for info in self.tensors.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.nbytes
        return max(counts, key=lambda dtype: counts[dtype])

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own.

        Raises:
            CheckpointError: there is none of that name, or it has NaN or infinite values.
            StorageError: its file could not be read.
        """
        if name not in self.tensors:
            raise CheckpointError("tensor", name, f"is missing from {self.path}")
        start = time.perf_counter()
        try:
            tensor = self._read(name)
        except OSError as error:
            raise StorageError("tensor", name, f"could not be read: {error.strerror or error}") from None
        # A piece at a time: asked of the whole, it takes the tensor's memory twice over.
        if not all(bool(torch.isfinite(piece).all()) for piece in torch.split(tensor.flatten(), _PIECE)):
            kind = "NaN" if bool(torch.isnan(tensor).any()) else "infinite values"
            raise CheckpointError("tensor", name, f"holds {kind}")
        self.read_seconds += time.perf_counter() - start
        return tensor

    @property
    def left_out(self) -> tuple[str, ...]:
        """What lies beside the weights and `copy_companions` does not copy: links out of the folder, and no files."""
        return ()

    @abstractmethod
    def _read(self, name: str) -> Tensor: ...

    @abstractmethod
    def copy_companions(self, destination: Path) -> None:
        """Write the tokenizer and generation settings that belong to the model into a folder."""
