"""Converted layers before they are written to the folder, and on disk for a run that continues a killed one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.conversion.planning.plan import Place
from headwise.conversion.storage.layers import LayerFiles
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.files import code_from, code_tensors

_CODE = "cache code."
"""Before the names of a code's tensors, which no tensor of a model has."""


@dataclass(frozen=True)
class ConvertedLayer:
    """One converted layer.

    Attributes:
        place: its place in the model.
        tensors: its tensors by the folder's names, in the folder's dtype; each is removed when it is written.
        channels: the model frequency of each rotary pair (MLA).
        about: its measurements: ``errors``, ``chosen``, ``shared``, ``own``.
        code: the code of its cache, if there is one.
    """

    place: Place
    tensors: dict[str, Tensor]
    channels: list[int] = field(default_factory=list)
    about: Mapping[str, Any] = field(default_factory=dict)
    code: TransformCode | None = None


class LayerStore:
    """Converted layers on disk, one file each, and the time that reading and writing them takes.

    Args:
        folder: the folder of the files, such as one within `FolderWriter.work`; None to save nothing.

    Attributes:
        read_seconds: seconds spent on reading.
        write_seconds: seconds spent on writing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._files = {} if folder is None else {False: LayerFiles(folder), True: LayerFiles(folder / "cross")}
        self.read_seconds = self.write_seconds = 0.0

    def save(self, layer: ConvertedLayer) -> None:
        """Save a layer; when this returns, it is on disk.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        if self._files:
            tensors, about = dict(layer.tensors), {"channels": layer.channels, **layer.about}
            if layer.code is not None:
                parts, about["code"] = code_tensors(layer.code)
                tensors |= {_CODE + name: tensor for name, tensor in parts.items()}
            with self._timed("write_seconds"):
                self._files[layer.place.cross].save(layer.place.index, tensors, about)

    def load(self, place: Place) -> ConvertedLayer | None:
        """A saved layer; None if it was not saved or is damaged."""
        if not self._files:
            return None
        with self._timed("read_seconds"):
            result = self._files[place.cross].load(place.index)
        if result is None:
            return None
        tensors, about = result
        code = None
        if "code" in about:
            parts = {name.removeprefix(_CODE): tensors.pop(name) for name in list(tensors) if name.startswith(_CODE)}
            code = code_from(parts, about.pop("code"))
        return ConvertedLayer(place, tensors, about.pop("channels"), about, code)

    def about(self, place: Place) -> dict[str, Any]:
        """A saved layer's measurements; empty if it was not saved."""
        return (self._files[place.cross].about(place.index) if self._files else None) or {}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)
