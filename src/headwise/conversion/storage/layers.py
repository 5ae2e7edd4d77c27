"""What each layer became, on disk, so that a run that was killed does not solve it again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headwise.checkpoints.disk import clearly, write_whole
from headwise.checkpoints.shards import tensor_bytes

_KEY = "headwise"
LOST = "was lost of what an earlier run had kept; the same command begins anew"
_DAMAGED = (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError)


class LayerFiles:
    """Solved layers, one file each, there whole or not at all.

    A layer is to be saved before the activations are moved past it (`Activations.commit`): then every layer that
    the activations are past can be loaded.

    Args:
        folder: to keep the files in, such as within `FolderWriter.work`; made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, index: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Keep a layer; when this returns, it is on the disk.

        Args:
            index: the layer's.
            tensors: its weights by name.
            about: what else there is to know of it, as JSON-able values: spec, channels, errors, ….

        Raises:
            CheckpointError: the disk is full, or the file cannot be written.
        """
        text = json.dumps(about)
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        # Under one name: safetensors writes several in any order.
        content = save(own, metadata={_KEY: json.dumps({"about": text, "checksum": _checksum(own, text)})})
        with clearly("results", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.file(index), content)

    def load(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """A layer's tensors and what is known of it, or None when it was not kept or is damaged."""
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
        """What is noted of a layer that was kept, its tensors left on the disk; None when it was not."""
        try:
            with safe_open(self.file(index), framework="pt", backend="pread") as file:
                about: dict[str, Any] = json.loads(_metadata(file)["about"])
        except _DAMAGED:
            return None
        return about

    def checksum(self, index: int) -> str | None:
        """What a layer that was kept says its checksum is, or None."""
        try:
            with safe_open(self.file(index), framework="pt", backend="pread") as file:
                return _metadata(file)["checksum"]
        except _DAMAGED:
            return None

    def file(self, index: int) -> Path:
        """Where a layer is kept."""
        return self.folder / f"layer-{index:05d}.safetensors"


def _metadata(file: Any) -> dict[str, str]:
    found: dict[str, str] = json.loads((file.metadata() or {})[_KEY])
    return found


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    total = zlib.crc32(about.encode())
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor_bytes(tensor), total)
    return f"{total:08x}"
