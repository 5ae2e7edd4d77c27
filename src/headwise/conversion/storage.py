"""Files that a run keeps so that a killed one goes on: hidden states, solved layers, converted layers.

The hidden states of all windows between two layers are on disk, so that memory does not grow with the windows. A
solved layer is kept so that a run that continues a killed one need not solve it again, and a converted layer until it
is written to the folder.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headwise.base.disk import open_regular, storage_errors, write_whole
from headwise.base.processes import all_sum, barrier, process_index
from headwise.conversion.plan import Place
from headwise.conversion.solvers.device import CPU, Stopwatch, to_device
from headwise.errors import CheckpointError
from headwise.models.checkpoints import dtype_name
from headwise.models.checkpoints.writer import tensor_bytes
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import code_from, code_tensors

_STATE = "activations.json"
_PIECE = 1 << 20


class Activations:
    """Streams of hidden states ``[N, W, E]``: the inputs of the next layer are read, and its outputs are written.

    Nothing is held in memory; the operating system caches the files where memory is free. `commit` replaces the
    inputs by the outputs, for all streams at once or not at all, and a run that continues a killed one starts from
    the last commit. Processes that share a conversion share the folder, each with its own windows.

    Args:
        folder: the folder of the files; made if it is missing.
        streams: the streams' names, such as ``source`` and ``converted``.
        shape: the numbers N of windows, W of tokens and E of channels.
        dtype: the dtype of the states.
        run: the identity of the run; states of another run are discarded.

    Attributes:
        layer: the number of layers whose outputs are committed, 0 after the embeddings; None before any commit.

    Raises:
        StorageError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        streams: tuple[str, ...],
        shape: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
        run: str = "",
    ) -> None:
        self.folder, self.streams, self.shape, self.dtype = folder, streams, shape, dtype
        self._about = {"run": run, "streams": list(streams), "shape": list(shape), "dtype": dtype_name(dtype)}
        with storage_errors("activations", self.folder, "prepared"):
            folder.mkdir(parents=True, exist_ok=True)
            self.layer = self._last_commit()
            barrier()
            self._clear()
        barrier()

    def __len__(self) -> int:
        """The number of windows, N."""
        return self.shape[0]

    def read(self, stream: str, start: int, stop: int) -> Tensor:
        """Windows ``start`` to ``stop`` as the last commit has them, ``[stop - start, W, E]``.

        Raises:
            CheckpointError: the file is cut short.
            StorageError: the file cannot be read.
        """
        assert self.layer is not None, "nothing was committed yet"
        assert 0 <= start < stop <= len(self), (start, stop)
        states = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype, device=CPU)
        return _read(self._file(stream, self.layer), start, states, self.folder)

    def write(self, stream: str, start: int, states: Tensor) -> None:
        """Write the next layer's outputs of the windows from ``start`` on, ``[n, W, E]``.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        assert states.shape[1:] == self.shape[1:], (states.shape, self.shape)
        assert 0 <= start <= start + len(states) <= len(self), (start, len(states))
        _write(self._file(stream, self._next), start, states.to(self.dtype), self.folder)
        self._written.update((stream, window) for window in range(start, start + len(states)))

    def commit(self) -> None:
        """Make the outputs the next layer's inputs: a run that is killed after this continues from here.

        Nothing waits for the disk. A checksum tells if a power cut lost states; the run then begins at layer 0.

        Raises:
            StorageError: the disk is full, or the files cannot be written.
        """
        total = int(all_sum(torch.tensor(float(len(self._written)), dtype=torch.float64, device=CPU)))
        assert total == len(self) * len(self.streams), "a window was not written"
        if process_index() == 0:
            with storage_errors("activations", self.folder):
                sums = {stream: _checksum(self._file(stream, self._next)) for stream in self.streams}
                state = self.folder / f"{_STATE}.new"
                state.write_text(json.dumps({**self._about, "layer": self._next, "sums": sums}))
                os.replace(state, self.folder / _STATE)
        barrier()
        self.layer = self._next
        with storage_errors("activations", self.folder):
            self._clear()

    @property
    def _next(self) -> int:
        return 0 if self.layer is None else self.layer + 1

    def _file(self, stream: str, layer: int) -> Path:
        return self.folder / f"{stream}-{layer}.activations"

    def _last_commit(self) -> int | None:
        """The last commit's layer, if it is this run's and complete: a power cut may lose states of a commit."""
        try:
            state = json.loads((self.folder / _STATE).read_text())
            if not isinstance(state, dict) or state | self._about != state:
                return None
            sums = {stream: _checksum(self._file(stream, state["layer"])) for stream in self.streams}
        except (OSError, ValueError):
            return None
        return int(state["layer"]) if sums == state["sums"] else None

    def _clear(self) -> None:
        """Begin the next layer: remove all files but those of the last commit."""
        self._written: set[tuple[str, int]] = set()
        if process_index() == 0:
            committed = (
                {self._file(stream, self.layer) for stream in self.streams} if self.layer is not None else set()
            )
            for file in self.folder.glob("*.activations"):
                if file not in committed:
                    file.unlink()
        barrier()


class Spill:
    """Windows ``[N, W, E]`` float32 in a file, for as long as one layer needs them.

    Args:
        path: the file's path; an existing file is overwritten window by window.
        shape: the numbers N of windows, W of tokens and E of channels.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.path, self.shape = path, shape

    def write(self, window: int, states: Tensor) -> None:
        """Write one window ``[W, E]``.

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        _write(self.path, window, states[None].float(), self.path)

    def read(self, window: int) -> Tensor:
        """Read one window ``[W, E]``.

        Raises:
            CheckpointError: the file is cut short.
            StorageError: the file cannot be read.
        """
        return _read(self.path, window, torch.empty(1, *self.shape[1:], device=CPU), self.path)[0]


def _write(file: Path, start: int, states: Tensor, place: Path) -> None:
    """Write windows ``[n, W, E]`` into a file from the one numbered ``start`` on; ``place`` is named in errors."""
    states = states.detach().to(CPU).contiguous()
    with (
        storage_errors("activations", place),
        os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as opened,
    ):
        opened.seek(start * states[0].nbytes)
        opened.write(_bytes(states))


def _read(file: Path, start: int, states: Tensor, place: Path) -> Tensor:
    """Fill windows ``[n, W, E]`` from a file, from the one numbered ``start`` on; ``place`` is named in errors."""
    with storage_errors("activations", place, "read"), file.open("rb") as opened:
        opened.seek(start * states[0].nbytes)
        if opened.readinto(_bytes(states)) != states.nbytes:
            raise CheckpointError("activations", str(place), "are cut short")
    return to_device(states)


def _bytes(tensor: Tensor) -> Any:
    return tensor.flatten().view(torch.uint8).numpy()


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            total = zlib.crc32(piece, total)
    return total


_KEY = "headwise"
LOST = "an earlier run's result is lost; the same command begins anew"
_DAMAGED = (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError)


class LayerFiles:
    """Solved layers and other results by number or by name, one file each, which is written completely or not at all.

    A layer must be saved before the activations pass it (`Activations.commit`): then every layer that the activations
    have passed can be loaded.

    Args:
        folder: the folder of the files, such as one within `FolderWriter.work`; made when the first is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, key: int | str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Save a layer or another result; when this returns, it is on disk.

        Args:
            key: the layer's number, or the result's name.
            tensors: the tensors of the layer or the result, by name.
            about: the other facts about it, as JSON-able values: spec, channels, errors, ….

        Raises:
            StorageError: the disk is full, or the file cannot be written.
        """
        text = json.dumps(about)
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        # Metadata under one name: safetensors writes several names in any order.
        content = save(
            copies, metadata={_KEY: json.dumps({"about": text, "checksum": _tensors_checksum(copies, text)})}
        )
        with storage_errors("results", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.file(key), content)

    def load(self, key: int | str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """A saved layer's tensors and facts; None if it was not saved or is damaged."""
        try:
            with self._opened(key) as file:
                about = _metadata(file)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            if about["checksum"] != _tensors_checksum(tensors, about["about"]):
                return None
            return tensors, json.loads(about["about"])
        except _DAMAGED:
            return None

    def about(self, key: int | str) -> dict[str, Any] | None:
        """A saved layer's facts without its tensors; None if it was not saved."""
        try:
            with self._opened(key) as file:
                about: dict[str, Any] = json.loads(_metadata(file)["about"])
        except _DAMAGED:
            return None
        return about

    def checksum(self, key: int | str) -> str | None:
        """The checksum that a saved layer's file states; None if it was not saved."""
        try:
            with self._opened(key) as file:
                return _metadata(file)["checksum"]
        except _DAMAGED:
            return None

    def _opened(self, key: int | str) -> Any:
        open_regular(self.file(key)).close()  # safetensors would wait for a pipe
        return safe_open(self.file(key), framework="pt", backend="pread")

    def file(self, key: int | str) -> Path:
        """The path of a result's file."""
        name = f"layer-{key:05d}" if isinstance(key, int) else key
        return self.folder / f"{name}.safetensors"


def _metadata(file: Any) -> dict[str, str]:
    metadata: dict[str, str] = json.loads((file.metadata() or {})[_KEY])
    return metadata


def _tensors_checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    total = zlib.crc32(about.encode())
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor_bytes(tensor), total)
    return f"{total:08x}"


_CODE = "cache code."
"""The prefix of the names of a code's tensors, which no tensor of a model has."""


@dataclass(frozen=True)
class ConvertedLayer:
    """One converted layer.

    Attributes:
        place: the layer's place in the model.
        tensors: the layer's tensors by the folder's names, in the folder's dtype; each is removed when it is written.
        channels: the model frequency of each rotary pair of an MLA layer; empty for other layers.
        about: the layer's measurements, by the names ``errors``, ``chosen``, ``shared`` and ``own``.
        code: the code of the layer's cache; None for a cache without codes.
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
        seconds: the seconds spent on ``reading`` and on ``writing``.
    """

    def __init__(self, folder: Path | None) -> None:
        self._files = {} if folder is None else {False: LayerFiles(folder), True: LayerFiles(folder / "cross")}
        self.seconds = Stopwatch()

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
            with self.seconds.timed("writing"):
                self._files[layer.place.cross].save(layer.place.index, tensors, about)

    def load(self, place: Place) -> ConvertedLayer | None:
        """A saved layer; None if it was not saved or is damaged."""
        if not self._files:
            return None
        with self.seconds.timed("reading"):
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
