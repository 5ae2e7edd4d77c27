"""Whether a model folder stores an output head of its own, though its config ties the head to the embedding.

transformers then computes with the stored head, and warns. Its weights decide, so they are read here, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import HeadwiseError
from headwise.models.specs.huggingface import read_config

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

_LARGEST_HEADER = 100_000_000
"""The most bytes of a file's header, which are those that safetensors itself allows."""
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, HeadwiseError):
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
    for tied, sources in _TIED:
        pair = _single_tensor(tensors, tied), _single_tensor(tensors, sources)
        if pair[0] is not None and pair[1] is not None and not _are_equal(pair[0], pair[1]):
            return True
    return False


def _single_tensor(tensors: Mapping[str, StoredTensor], ends: tuple[str, ...]) -> StoredTensor | None:
    """The one tensor outside layers with one of these ends; None where there are several."""
    found = [
        tensor
        for name, tensor in tensors.items()
        if f".{name}".endswith(tuple(f".{end}" for end in ends)) and ".layers." not in name
    ]
    return found[0] if len(found) == 1 else None


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
        named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(named.values()))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():  # no file outside, and no pipe
            raise ValueError(file)
        for name, stored in stored_tensors(folder / file).items():
            if named.get(name) == file:
                tensors[name] = stored
            else:
                tensors.setdefault(name, stored)
    return tensors


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The place of each tensor of a safetensors file, by its name.

    For example ``stored_tensors(Path("./model/model.safetensors"))["model.norm.weight"].nbytes``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _LARGEST_HEADER:
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
