"""Model folders: ``config.json`` beside safetensors, in one file or sharded."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwise.base.documents import RECORDS, load_json
from headwise.errors import CheckpointError, StorageError
from headwise.models.checkpoints.checkpoint import DTYPES, Checkpoint, TensorInfo
from headwise.models.checkpoints.unsafe import ADAPTER, refuse_unsafe
from headwise.models.families.base import family_of, has_family
from headwise.models.specs import LARGEST_CONFIG, LARGEST_INDEX, read_json
from headwise.models.specs.sources import INDEX, SINGLE, with_stored_head

_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_TEMPLATES = "additional_chat_templates/*.jinja"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class FolderCheckpoint(Checkpoint):
    """A model folder, read as transformers reads it where its files disagree; `notes` says where they do.

    Args:
        path: the folder.

    Raises:
        CheckpointError: a file is missing, damaged, a pickle or quantised, or the config asks to run code.
        StorageError: a file cannot be read.
    """

    _dtypes = DTYPES

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise CheckpointError("folder", str(path), "has no config.json")
        config = self._plain_config(read_json(path / "config.json"))
        refuse_unsafe(config, path)
        if config.pop("auto_map", None):  # what is read, run and written is transformers' class
            own = f"transformers' own {config['model_type']} is used"
            self.notes = (*self.notes, f"config.json names code in auto_map, which is not run: {own}")
        self.config = with_stored_head(config, path)
        if self.config is not config:
            note = "the stored head differs from the embedding, so tie_word_embeddings is taken as false"
            self.notes = (*self.notes, note)
        named = _shards(path)
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self.tensors = {}
        model_type = self.config.get("model_type")
        family = family_of(str(model_type)) if has_family(model_type) else None
        unread = family.buffers if family else ()
        for file in sorted(set(named.values())):
            self._read_header(file, unread, named)
        if not self.tensors:
            raise CheckpointError("folder", str(path), "has no tensors in its files of weights")
        if absent := [name for name in named if name and name not in self.tensors and not name.endswith(unread)]:
            note = f"{INDEX} names tensors that no file has, such as {absent[0]} ({len(absent)} in all)"
            self.notes = (*self.notes, note)
        self._stored = family.names_today(self.tensors) if family else {name: name for name in self.tensors}
        self.tensors = {name: self.tensors[stored] for name, stored in self._stored.items()}
        self._join()
        self._experts = family.experts(self.tensors) if family else {}
        self.joined = {
            name: {part: self.tensors.pop(part) for expert in experts for part in expert}
            for name, experts in self._experts.items()
        }
        for name, experts in self._experts.items():
            self.tensors[name] = self._joined_info(name, experts)
        self._take_as_transformers()

    def _plain_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The config without what this kind of folder reads by itself."""
        return config

    def _join(self) -> None:
        """Put tensors in the place of several stored ones that they are made of, where there are such."""

    def _joined_info(self, name: str, experts: list[list[str]]) -> TensorInfo:
        """The shape and the dtype of a tensor that is made of each expert's.

        Raises:
            CheckpointError: the experts' tensors differ in shape or dtype.
        """
        parts = [[self.joined[name][part] for part in expert] for expert in experts]
        if any(other != parts[0] for other in parts) or len({(*part.shape[1:], part.dtype) for part in parts[0]}) > 1:
            raise CheckpointError("tensor", name, "is made of experts that differ in shape or dtype")
        rows = sum(part.shape[0] for part in parts[0])
        return TensorInfo((len(experts), rows, *parts[0][0].shape[1:]), parts[0][0].dtype)

    @property
    def stored_config(self) -> dict[str, Any]:
        """The config to write beside weights that are stored as these are."""
        return self.config

    @property
    def read_files(self) -> tuple[Path, ...]:
        """The files that tensors are read from, and the index that names them."""
        files = tuple(sorted(set(self._files.values())))
        return files if self.path / SINGLE in files else (*files, self.path / INDEX)

    def place(self, name: str) -> tuple[Path, str]:
        """The file of a tensor that is stored, and its name there.

        Args:
            name: transformers' name of it; of a quantised matrix, that of one of its parts.
        """
        return self._files[self._stored[name]], self._stored[name]

    def _read_header(self, file: Path, unread: tuple[str, ...], named: Mapping[str, Path]) -> None:
        """Note the tensors of one file, except those with an ending of ``unread``.

        Args:
            file: the file.
            unread: the endings.
            named: the file of each tensor by the index.
        """
        handle = self._handle(file)
        for name in handle.keys():  # noqa: SIM118  (a handle is not a mapping)
            if name.endswith(unread):
                continue
            header = handle.get_slice(name)
            dtype = header.get_dtype()
            if dtype not in self._dtypes:
                rule = f"must be one of {', '.join(self._dtypes)}: quantised weights are not read"
                raise CheckpointError(f"{name} dtype", dtype, rule)
            if name not in self._files or named.get(name) == file:  # of two files, the one the index names
                self._files[name] = file
                self.tensors[name] = TensorInfo(tuple(header.get_shape()), self._dtypes[dtype])

    def _handle(self, file: Path) -> Any:
        """An open safetensors file."""
        if file not in self._open:
            try:
                # safetensors holds no code: a header of JSON, then numbers. The file is read, not mapped: pages of a
                # mapped file count as this process's memory from their first use until the file is closed, and one
                # that is cut short under its mapping ends the process.
                self._open[file] = safe_open(file, framework="pt", backend="pread")
            except OSError as error:
                raise StorageError("file", str(file), f"could not be read: {error.strerror or error}") from None
            except (SafetensorError, ValueError) as error:
                rule = f"is not a whole safetensors file ({_one_line(error)})"
                raise CheckpointError("file", str(file), rule) from None
        return self._open[file]

    def _read(self, name: str) -> Tensor:
        if (experts := self._experts.get(name)) is None:
            return self._read_stored(name)
        whole = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
        for place, parts in zip(whole, experts, strict=True):
            torch.cat([self._read(part) for part in parts], out=place)
        return whole

    def _read_stored(self, name: str) -> Tensor:
        try:
            stored = self._stored[name]
            tensor: Tensor = self._handle(self._files[stored]).get_tensor(stored)
        except SafetensorError as error:
            raise CheckpointError("tensor", name, f"could not be read ({_one_line(error)})") from None
        return tensor

    def _read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        stored = self._stored[name]
        try:
            matrix = self._handle(self._files[stored]).get_slice(stored)
            return torch.cat([matrix[row : row + 1] for row in rows])
        except SafetensorError as error:
            raise CheckpointError("tensor", name, f"could not be read ({_one_line(error)})") from None

    def copy_companions(self, destination: Path) -> None:
        """Copy the files beside the weights: tokenizer, chat template, settings, a sentence encoder's pooling.

        Links that lead out of the model are not followed; `left_out` names them.

        Args:
            destination: the folder to copy to, which must exist.

        Raises:
            StorageError: a file has changed since the model was opened, or has vanished.
        """
        for folder in _module_folders(self.path):  # also without files: a normalisation has none
            (destination / folder.relative_to(self.path)).mkdir(exist_ok=True)
        for file in self._companions():
            if (inner := inner_file(file, self.path)) is not None:
                place = destination / file.relative_to(self.path)
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(inner, place)
        self.refuse_changed()  # a file that has vanished would be missing in silence

    def _watched(self) -> Sequence[Path]:
        own = {file for file in self.path.iterdir() if file.is_file()}  # as those of `run_identity`
        inner = (inner_file(file, self.path) for file in self._companions())
        return sorted(own | {file for file in inner if file is not None})

    @property
    def left_out(self) -> tuple[str, ...]:
        """Paths in the folder that `copy_companions` skips, see `inner_file`."""
        files = (file for file in self._companions() if inner_file(file, self.path) is None)
        return tuple(str(file.relative_to(self.path)) for file in files)

    def _companions(self) -> list[Path]:
        """Every path beside the weights with the name of a companion file: files, links and devices, not folders."""
        paths = [path for pattern in (*_COMPANIONS, _TEMPLATES) for path in self.path.glob(pattern)]
        paths = [path for path in paths if path.name not in ("config.json", INDEX, ADAPTER, *RECORDS)]
        for folder in _module_folders(self.path):
            paths += [path for pattern in (*_COMPANIONS, "*.safetensors") for path in folder.glob(pattern)]
        return sorted(path for path in paths if path.is_symlink() or not path.is_dir())


def inner_file(file: Path, folder: Path) -> Path | None:
    """Follow a path in a model folder to a regular file of that model.

    A link may lead to another file of the folder. In the hub's cache, where ``snapshots/<revision>/<file>`` is a link
    to ``../../blobs/<hash>``, it may lead to a blob of the same model. A file anywhere else may be private.

    Args:
        file: a path in the folder, or in a folder within.
        folder: the model folder.

    Returns:
        The file without links, or None where the path leads out of the model or to no regular file.
    """
    try:
        root, target = folder.resolve(strict=True), file.resolve(strict=True)
        is_regular = stat.S_ISREG(target.stat().st_mode)
    except (OSError, RuntimeError):  # a dangling link, or a cycle of links
        return None
    allowed = [root]
    for snapshots in root.parents:
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            allowed.append(snapshots.parent / "blobs")
    return target if is_regular and any(target.is_relative_to(place) for place in allowed) else None


def _module_folders(path: Path) -> list[Path]:
    """The folders of a sentence encoder's further modules, such as its pooling, as ``modules.json`` names them."""
    try:
        modules = load_json(path / "modules.json", LARGEST_CONFIG)
    except (OSError, ValueError):
        return []
    if not isinstance(modules, list):
        return []
    paths = [module.get("path") for module in modules if isinstance(module, dict)]
    names = [name for name in paths if isinstance(name, str) and name not in ("", "..") and Path(name).name == name]
    return [path / name for name in names if os.path.isdir(path / name)]


def _shards(path: Path) -> dict[str, Path]:
    """Map each tensor's name to its file; a single file has the empty name until it is opened.

    Raises:
        CheckpointError: the folder has no weights, or its index is damaged.
    """
    # Where a folder has both, transformers too prefers the single file to the shards.
    if (path / SINGLE).is_file():
        return {"": path / SINGLE}
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX, LARGEST_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError("weight_map", weight_map, f"must name each tensor's file in {path / INDEX}")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError("weight_map", {name: file}, "must name files in the folder itself")
            if not os.path.isfile(path / file):  # `Path.is_file` raises where a name is too long
                raise CheckpointError("shard", file, f"is named in {INDEX} but missing from {path}")
        return {name: path / file for name, file in weight_map.items()}
    for pattern in _PICKLES:
        if pickles := sorted(path.glob(pattern)):
            rule = "is a pickle, which can run code; headwise reads safetensors and GGUF only"
            raise CheckpointError("weights", pickles[0].name, rule)
    raise CheckpointError("folder", str(path), f"has no weights: neither {SINGLE} nor {INDEX}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
