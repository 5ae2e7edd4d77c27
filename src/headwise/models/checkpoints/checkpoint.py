"""The base class of model folders and GGUF files, read one tensor at a time; and digests that identify one.

By digests of a run, or of a model, kept results are used again for the same one only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headwise.base.disk import storage_errors
from headwise.errors import CheckpointError, SpecError, StorageError
from headwise.models.families.base import Family, family_of, has_family
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec, ModelSpec, read_config, text_part

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that weights are read in, by their names in safetensors and in GGUF."""

_PIECE = 1 << 18
"""Numbers that are tested for NaN and infinity at once."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as configs and reports write it: ``float32`` for ``torch.float32``.

    For example ``dtype_name(torch.float32)`` is ``"float32"``.
    """
    return str(dtype).removeprefix("torch.")


def no_numbers(tensor: Tensor) -> str | None:
    """What a tensor holds that is no number, ``NaN`` or ``infinite values``; None where all of it is finite.

    For example ``no_numbers(torch.tensor([1.0, torch.inf]))`` is ``"infinite values"``.

    Args:
        tensor: of any shape.
    """
    # In pieces: `isfinite` of the whole would take the tensor's memory twice over.
    if all(bool(torch.isfinite(piece).all()) for piece in torch.split(tensor.flatten(), _PIECE)):
        return None
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinite values"


@dataclass(frozen=True)
class TensorInfo:
    """The shape of a stored tensor, and the dtype it is read as."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of memory once read."""
        return self.numel * self.dtype.itemsize


class Checkpoint(ABC):
    """The config and the weights of a model on disk.

    Where files disagree with their config, what transformers computes is settled here, once: readers and writers of
    ``config``, ``tensors`` and ``notes`` know nothing of it. What is needed and missing is refused.

    Attributes:
        path: the folder or file.
        config: the content of its ``config.json``; for a GGUF file, the ``config.json`` that its metadata amount to.
        tensors: shape and dtype of every tensor, by transformers' name.
        zeros: the names of those that are not stored, and are zeros.
        joined: the tensors that files store in the place of one, by its name; they are read by their names too.
        notes: what a user should know of the files, where they are no whole model that agrees with its config.
        read_seconds: spent so far on reading and checking tensors.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    zeros: frozenset[str] = frozenset()
    joined: Mapping[str, Mapping[str, TensorInfo]] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    read_seconds: float = 0.0
    _states: Mapping[Path, tuple[int, int]] = MappingProxyType({})

    @property
    def spec(self) -> ModelSpec:
        """The attention and the body that the config describes.

        Raises:
            SpecError: the architecture is not understood.
        """
        return read_config(self.config)

    @property
    def family(self) -> Family:
        """Where the model keeps its attention, in the names of these tensors.

        Raises:
            SpecError: `families` has no file for the model type.
        """
        family = family_of(str(self.config.get("model_type")))
        is_whole = not self.tensors or any(name.startswith(family.base) for name in self.tensors)
        return family if is_whole else family.bare()

    @property
    def writable(self) -> Collection[str]:
        """The names of the tensors that the files can have other numbers in; those in blocks of codes cannot."""
        return self.tensors.keys()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most bytes of its tensors are read as."""
        nbytes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            nbytes[info.dtype] += info.nbytes
        return nbytes.most_common(1)[0][0]

    def read(self, name: str) -> Tensor:
        """Read one tensor into memory of its own.

        Args:
            name: transformers' name of it.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or the tensor has NaN or infinite values.
            StorageError: the tensor's file could not be read, or a file has changed since the model was opened.
        """
        start = time.perf_counter()
        with self._reading(name):
            if name in self.zeros:
                tensor = torch.zeros(self.tensors[name].shape, dtype=self.tensors[name].dtype)
            else:
                tensor = self._read(name)
        if kind := no_numbers(tensor):
            raise CheckpointError("tensor", name, f"holds {kind}")
        self.read_seconds += time.perf_counter() - start
        return tensor

    def check_numbers(self, name: str) -> None:
        """Refuse a tensor that has NaN or infinite values, as `read` does, with as little work as its form allows.

        Args:
            name: transformers' name of it.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or the tensor has such values.
            StorageError: the tensor's file could not be read.
        """
        self.read(name)

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """Read some rows of a matrix, such as the embeddings of some tokens, ``[N, columns]``.

        Args:
            name: transformers' name of the tensor.
            rows: int64 ``[N]``, in any order.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or the rows have NaN or infinite values.
            StorageError: the tensor's file could not be read.
        """
        some, places = torch.unique(rows, return_inverse=True)
        with self._reading(name):
            read = self._read_rows(name, some.tolist())
        if kind := no_numbers(read):
            raise CheckpointError("tensor", name, f"holds {kind}")
        return read[places]

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn errors of reading a tensor into those that name it; the checkpoint must have it.

        What was read from a file that has changed meanwhile is refused: the output would be of two models.
        """
        if name not in self.tensors and not any(name in parts for parts in self.joined.values()):
            raise CheckpointError("tensor", name, f"is missing from {self.path}")
        with storage_errors("tensor", name, "read"):
            yield
        self.refuse_changed()

    def watch_files(self) -> None:
        """Note how the files are now, for `refuse_changed`.

        Raises:
            StorageError: a file cannot be read.
        """
        with storage_errors("file", self.path, "read"):
            self._states = {file: _state(file) for file in self._watched()}

    def _watched(self) -> Sequence[Path]:
        """The files that the output of a run may be made of."""
        return self.files

    def refuse_changed(self) -> None:
        """Refuse a source of which a file has another size or time of change than when it was opened.

        Raises:
            StorageError: a file has, or has vanished.
        """
        for file, was in self._states.items():
            with storage_errors("file", file, "read"):
                if _state(file) != was:
                    raise StorageError("file", str(file), "has changed since it was opened")

    def _read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        return self._read(name)[list(rows)]

    def layer_of(self, name: str) -> int | None:
        """The layer that a tensor belongs to by its name; None where it is of none, such as the embedding."""
        pattern = re.escape(self.family.layer).replace(r"\{layer\}", r"(\d+)") + r"\."
        return None if (match := re.match(pattern, name)) is None else int(match[1])

    def leave_out(self, names: Sequence[str], what: str) -> None:
        """Do not read some tensors, as transformers does not, and note that.

        Args:
            names: the names of the tensors; an empty sequence changes nothing.
            what: a phrase that says in the note what the tensors are.
        """
        for name in names:
            del self.tensors[name]
        if names:
            self.notes = (*self.notes, f"{what} are not read, such as {names[0]} ({len(names)} in all)")

    def _take_as_transformers(self) -> None:
        """Take tensors as transformers does where there are too many or too few, and note that.

        Layers beyond the config's, such as DeepSeek's and GLM's for predicting several tokens, are not read. Biases
        that the config asks for are zeros where they are missing.
        """
        model_type = self.config.get("model_type")
        if not has_family(model_type) or str(model_type).startswith(HOSTED_PREFIX):
            return  # transformers itself loads it, or headwise wrote it whole
        try:
            spec = self.spec
        except SpecError:
            return  # refused by whoever needs it
        layers = {name: self.layer_of(name) for name in self.tensors}
        beyond = [name for name, layer in layers.items() if layer is not None and layer >= spec.num_layers]
        self.leave_out(beyond, f"tensors of layers beyond the config's {spec.num_layers}")
        absent = [bias for bias in self._optional_biases(spec) if bias not in self.tensors]
        for bias in absent:
            if (weight := self.tensors.get(f"{bias.removesuffix('bias')}weight")) is not None:
                self.tensors[bias] = TensorInfo(weight.shape[:1], weight.dtype)
                self.zeros |= {bias}
        if self.zeros:
            note = f"biases that the config asks for are missing and taken as zeros, such as {min(self.zeros)}"
            self.notes = (*self.notes, f"{note} ({len(self.zeros)} in all)")

    def _optional_biases(self, spec: ModelSpec) -> Iterator[str]:
        """The names of the biases that a field of the config asks for, where the family has such a field."""
        config = text_part(self.config)
        for index, layer in enumerate(spec.layers[: len(self.tensors)]):  # a damaged config may have any number
            if config.get("attention_bias") and isinstance(layer, GroupedSpec):
                yield from (name for name in self.family.stored_shapes(index, layer) if name.endswith(".bias"))
            network = None if spec.body is None else spec.body.feed_forward[index]
            if config.get("mlp_bias") and network is not None and network.bias:
                place = self.family.layer.format(layer=index)
                yield from (f"{place}.mlp.{name}_proj.bias" for name in ("gate", "up", "down"))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the weights: a folder's, or a ``.gguf`` file, or all parts of one that is split."""
        return tuple(sorted(self.path.glob("*.safetensors")))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Paths beside the weights that `copy_companions` skips: links out of the folder, and what is no file."""
        return ()

    @abstractmethod
    def _read(self, name: str) -> Tensor: ...

    @abstractmethod
    def copy_companions(self, destination: Path) -> None:
        """Write the tokenizer and the generation settings that belong to the model into a folder.

        Args:
            destination: the folder, which must exist.
        """


_STRIDE, _PAGE = 1 << 20, 4096
_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path")
"""Fields of a config that say who wrote it, and not what the model is."""
_LIBRARIES = ("headwise", "torch", "transformers", "safetensors")

version = cache(metadata.version)
"""The version of an installed package, whose metadata are read once."""


def _state(file: Path) -> tuple[int, int]:
    """The size of a file, and the time at which it was changed, in nanoseconds."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def run_identity(checkpoint: Checkpoint, **decides: object) -> str:
    """Make a digest of everything that the output of a run depends on, for `FolderWriter`'s ``run``.

    For example ``run_identity(open_checkpoint("./model"), to="mqa", method="mean")``.

    The source's files count by name, size and time of change, not by content: reading gigabytes to find out whether
    they have to be read would take as long as reading them.

    Args:
        checkpoint: the source.
        decides: everything else that the output depends on, as JSON-able values: target, stages, digests of texts, ….
    """
    path = checkpoint.path
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else checkpoint.files
    stats = [(file.name, file.stat()) for file in files]
    inputs = {
        "path": os.path.realpath(path),
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "config": checkpoint.config,
        "tensors": [
            [name, list(info.shape), dtype_name(info.dtype)] for name, info in sorted(checkpoint.tensors.items())
        ],
        "versions": versions(),
        "decides": decides,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def model_identity(checkpoint: Checkpoint) -> str:
    """Make a digest of a model, wherever its files are, from its config and a sample of its weights.

    For example ``model_identity(open_checkpoint("./model"))``.

    The sample is the size of each file, its first megabyte, and 4096 bytes of every further megabyte: more training
    changes nearly all weights, and reading all of them would take as long as the work that the digest saves.

    Args:
        checkpoint: the model.

    Raises:
        StorageError: a file of it cannot be read, or has changed since it was opened.
    """
    config = {key: value for key, value in checkpoint.config.items() if key not in _NOT_OF_THE_MODEL}
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in checkpoint.files:
        with storage_errors("file", file, "read"), file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            total.update(f"{size} ".encode())
            total.update(opened.read(_STRIDE))
            for start in range(_STRIDE, size, _STRIDE):
                opened.seek(start)
                total.update(opened.read(_PAGE))
    checkpoint.refuse_changed()
    return total.hexdigest()


def versions() -> dict[str, str]:
    """The versions of headwise and of the libraries that a conversion's numbers depend on.

    For example ``versions()["torch"]``.
    """
    return {library: version(library) for library in _LIBRARIES}
