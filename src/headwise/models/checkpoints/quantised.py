"""A model folder whose weights are quantised, read as the matrices that its codes and scales amount to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.models.checkpoints.checkpoint import DTYPES, TensorInfo
from headwise.models.checkpoints.folder import FolderCheckpoint
from headwise.models.checkpoints.quantised_formats import BESIDES, Format, Rows, read_scheme
from headwise.models.checkpoints.unsafe import refuse_kernels
from headwise.models.specs import read_json

FIELDS = ("quantization_config", "compression_config")
"""The fields of a config that say how weights are quantised."""

_CODES = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
_CODES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}


def is_quantised(folder: Path) -> bool:
    """Whether the config of a model folder says that its weights are quantised.

    For example ``is_quantised(Path("./model-awq"))``.
    """
    file = folder / "config.json"
    return file.is_file() and any(read_json(file).get(field) for field in FIELDS)


class QuantisedFolder(FolderCheckpoint):
    """A model folder of AWQ, GPTQ, compressed-tensors or FP8; see `headwise.models.checkpoints.quantised_formats`.

    Its config is that of the model without quantisation, and `read` returns matrices in float32.

    Preparing changes scales of rows alone, which is exact. A converted matrix would have to be quantised anew, so
    that `open_checkpoint` refuses such folders to whoever does not ask for them.

    Args:
        path: the folder.

    Attributes:
        quantisation: the fields of the config that say how weights are quantised.

    Raises:
        CheckpointError: the folder is refused as others are, or its weights are quantised in a way that is not read.
        StorageError: a file cannot be read.
    """

    _dtypes = DTYPES | _CODES

    def _plain_config(self, config: dict[str, Any]) -> dict[str, Any]:
        self.quantisation = {field: config[field] for field in FIELDS if field in config}
        refuse_kernels(self.quantisation)
        self._scheme = read_scheme(next(given for given in self.quantisation.values() if given))
        return {field: value for field, value in config.items() if field not in FIELDS}

    @property
    def stored_config(self) -> dict[str, Any]:
        """The config with what says how weights are quantised."""
        return self.config | self.quantisation

    def _join(self) -> None:
        """Put one tensor in the place of those that store a quantised matrix."""
        modules: dict[str, dict[str, torch.dtype]] = {}
        for name, info in self.tensors.items():
            module, _, part = name.rpartition(".")
            modules.setdefault(module, {})[part] = info.dtype
        self._formats: dict[str, tuple[Format, tuple[str, ...]]] = {}
        self._sharing: dict[str, int] = {}
        for module, parts in modules.items():
            if (found := self._scheme.format(module, parts)) is None:
                continue
            form, names = self._formats[f"{module}.weight"] = found
            shapes = {part: self.tensors[f"{module}.{part}"].shape for part in names}
            for part in (*names, *BESIDES):
                self.tensors.pop(f"{module}.{part}", None)
            self._sharing[f"{module}.weight"] = form.sharing(shapes)
            shape = form.shape(shapes, partial(self._read_part, module))
            self.tensors[f"{module}.weight"] = TensorInfo(shape, torch.float32)
        for name, info in self.tensors.items():
            if info.dtype not in DTYPES.values():
                rule = "is not a dtype of weights, and is no part of a quantised matrix that is read"
                raise CheckpointError(f"{name} dtype", str(info.dtype).removeprefix("torch."), rule)

    def sharing(self, name: str) -> int:
        """How many rows of a tensor share a scale; 0 where it is not quantised."""
        return self._sharing.get(name, 0)

    def parts(self, name: str) -> dict[str, str]:
        """The stored tensors of a quantised matrix: their names within the module, and their full names.

        Args:
            name: the name of the matrix, such as ``model.layers.0.self_attn.q_proj.weight``.
        """
        module = name.removesuffix("weight")
        return {part: f"{module}{part}" for part in self._formats[name][1]}

    def rows(self, name: str) -> Rows:
        """The rows of a quantised matrix.

        Raises:
            CheckpointError: the matrix's tensors do not fit together.
        """
        tensors = {part: self._read_stored(whole) for part, whole in self.parts(name).items()}
        return self._formats[name][0].read(tensors)

    def written(self, name: str, rows: Rows) -> dict[str, Tensor]:
        """The stored tensors, by their full names, of a matrix with other rows.

        Args:
            name: the name of the matrix.
            rows: the new rows of the matrix.
        """
        names = self.parts(name)
        tensors = {part: self._read_stored(whole) for part, whole in names.items()}
        return {names[part]: tensor for part, tensor in self._formats[name][0].written(rows, tensors).items()}

    def _read_part(self, module: str, part: str) -> Tensor:
        return self._read_stored(f"{module}.{part}")

    def _read(self, name: str) -> Tensor:
        return self.rows(name).weight() if name in self._formats else super()._read(name)

    def _read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        return self._read(name)[list(rows)] if name in self._formats else super()._read_rows(name, rows)
