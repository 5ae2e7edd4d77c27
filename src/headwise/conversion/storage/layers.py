"""Solved layers on disk, so that a run that continues a killed one does not solve them again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headwise.base.disk import clearly, write_whole
from headwise.models.checkpoints.safetensors_shards import tensor_bytes

_KEY = "headwise"
LOST = "an earlier run's result is lost; the same command begins anew"
_DAMAGED = (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError)


class LayerFiles:
    """Solved layers, one file each, written whole or not at all.

    A layer must be saved before the activations pass it (`Activations.commit`): then every layer that the activations
    have passed can be loaded.

    Args:
        folder: the folder of the files, such as one within `FolderWriter.work`; made when the first is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, index: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Save a layer; when this returns, it is on disk.

        Args:
            index: the layer's number.
            tensors: its weights by name.
            about: other facts of it, as JSON-able values: spec, channels, errors, ….

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        text = json.dumps(about)
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        # Metadata under one name: safetensors writes several names in any order.
        content = save(copies, metadata={_KEY: json.dumps({"about": text, "checksum": _checksum(copies, text)})})
        with clearly("results", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.file(index), content)

    def load(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """A saved layer's tensors and facts; None if it was not saved or is damaged."""
        try:
            with safe_open(self.file(index), framework="pt", backend="pread") as file:
                about = _metadata(file)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            if about["checksum"] != _checksum(tensors, about["about"]):
                return None
            return tensors, json.loads(about["about"])
        except _DAMAGED:
            return None

    def about(self, index: int) -> dict[str, Any] | None:
        """A saved layer's facts without its tensors; None if it was not saved."""
        try:
            with safe_open(self.file(index), framework="pt", backend="pread") as file:
                about: dict[str, Any] = json.loads(_metadata(file)["about"])
        except _DAMAGED:
            return None
        return about

    def checksum(self, index: int) -> str | None:
        """The checksum that a saved layer's file states; None if it was not saved."""
        try:
            with safe_open(self.file(index), framework="pt", backend="pread") as file:
                return _metadata(file)["checksum"]
        except _DAMAGED:
            return None

    def file(self, index: int) -> Path:
        """The path of a layer's file."""
        return self.folder / f"layer-{index:05d}.safetensors"


def _metadata(file: Any) -> dict[str, str]:
    metadata: dict[str, str] = json.loads((file.metadata() or {})[_KEY])
    return metadata


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    total = zlib.crc32(about.encode())
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor_bytes(tensor), total)
    return f"{total:08x}"
