"""What a study of a model found, in a folder: layers are solved from it for any target, and the model is not run.

``statistics.json`` says of which model it is and of which text; each layer has a file of its own, with a checksum. Of
the Gram matrices the upper triangles are kept, in float64: in float32 the folder would be half as large, and rounding
would hide what a text shorter than the model is wide does not show at all.

Shapes: L layers, H query heads, E hidden, E' = E + 1, T tokens of a window.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint, model_identity, versions
from headwise.checkpoints.disk import sync
from headwise.conversion.results import LayerResults
from headwise.conversion.statistics import Statistics
from headwise.errors import CheckpointError
from headwise.evaluation import text_identity
from headwise.progress import Progress, silent

ABOUT = "statistics.json"
FORMAT = 1
_GRAMS = ("inputs", "keys")
_FIELD = "statistics"


@dataclass(frozen=True)
class SavedStatistics:
    """Statistics of every layer of a model, read when they are asked for.

    Attributes:
        folder: where they are.
        tokens: how many went into them.
        identity: what tells them from others.
        texts: what they are of, by name.
        studied: the same texts' `text_identity`, where it is known.
    """

    folder: Path
    tokens: int
    identity: str
    texts: tuple[str, ...]
    studied: frozenset[str] = frozenset()

    def layer(self, index: int) -> tuple[Statistics, Tensor]:
        """One layer's statistics, and what an error of its output costs, ``[E, E]`` float64.

        Raises:
            CheckpointError: its file is missing or damaged, or holds NaN or infinite values.
        """
        found = LayerResults(self.folder).load(index)
        if found is None:
            file = LayerResults(self.folder).file(index)
            rule = "is cut short or damaged" if file.is_file() else "is missing"
            raise CheckpointError(_FIELD, str(file), f"{rule}; calibrate again")
        tensors = found[0]
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    _FIELD, str(self.folder), f"holds NaN or infinite values: {name} of layer {index}"
                )
        sensitivity = tensors.pop("sensitivity").double()
        width = len(sensitivity) + 1
        known = {name: _whole(tensor, width) if name in _GRAMS else tensor for name, tensor in tensors.items()}
        return Statistics(**known), sensitivity


def save_layer(results: LayerResults, index: int, known: Statistics, sensitivity: Tensor) -> None:
    """Keep one layer's statistics, as means.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """
    tensors = {field.name: getattr(known, field.name) for field in fields(known)}
    packed = {name: _triangle(tensor) if name in _GRAMS else tensor for name, tensor in tensors.items()}
    results.save(index, {**packed, "sensitivity": sensitivity.float()}, {})


def write_statistics(
    folder: Path, results: LayerResults, checkpoint: Checkpoint, texts: Sequence[str | Path], windows: Tensor
) -> None:
    """Make a folder of what was kept of every layer.

    Args:
        folder: where to.
        results: the layers'; the files are shared with the folder where the disk can do that, and copied otherwise.
        checkpoint: the model.
        texts: what was read; of paths the last name is noted.
        windows: ``[N, T]``, the tokens of it.

    Raises:
        OSError: the disk is full.
    """
    for index in range(checkpoint.spec.num_layers):
        file = results.file(index)
        try:
            os.link(file, folder / file.name)
        except OSError:
            shutil.copyfile(file, folder / file.name)
            sync(folder / file.name)
    about = {
        "format": FORMAT,
        "model": _model(checkpoint),
        "texts": [_about_text(text) for text in texts],
        "tokens": windows.numel(),
        "window": windows.shape[1],
        "versions": versions(),
        "layers": [results.checksum(index) for index in range(checkpoint.spec.num_layers)],
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def open_statistics(folder: str | Path, checkpoint: Checkpoint, progress: Progress = silent) -> SavedStatistics:
    """Statistics of a model, all of them read once to see that they are whole.

    Args:
        folder: of `headwise.calibrate`.
        checkpoint: the model they must be of.
        progress: told of each layer.

    Raises:
        CheckpointError: it is no such folder, of another model or format, or damaged.
    """
    folder = Path(folder)
    try:
        text = (folder / ABOUT).read_text(encoding="utf-8")
        about = json.loads(text)
        form, model, sums, tokens = about["format"], about["model"], about["layers"], int(about["tokens"])
        texts = tuple(str(text["name"]) for text in about["texts"])
        studied = frozenset(str(text.get("sha256", text["name"])) for text in about["texts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(_FIELD, str(folder), f"has no readable {ABOUT}; headwise calibrate makes one") from None
    if form != FORMAT:
        raise CheckpointError(_FIELD, str(folder), f"is of format {form!r}; this headwise reads format {FORMAT}")
    layers = checkpoint.spec.num_layers
    if not isinstance(sums, list) or len(sums) != layers:
        count = len(sums) if isinstance(sums, list) else 0
        raise CheckpointError(_FIELD, str(folder), f"has {count} layers, and {checkpoint.path} has {layers}")
    if model != _model(checkpoint):
        raise CheckpointError(_FIELD, str(folder), f"is of another model than {checkpoint.path}")
    found = SavedStatistics(folder, tokens, hashlib.sha256(text.encode()).hexdigest(), texts, studied)
    results = LayerResults(folder)
    for index, layer in enumerate(checkpoint.spec.layers):
        progress("checking statistics", index, layers)
        known, _ = found.layer(index)
        heads = getattr(layer, "num_heads", 0)
        if results.checksum(index) != sums[index] or known.head_weight.shape != (heads,):
            raise CheckpointError(_FIELD, str(results.file(index)), f"is not the layer that {ABOUT} names")
    progress("checking statistics", layers, layers)
    return found


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    spec = checkpoint.spec
    return {"model_type": spec.model_type, "hidden_size": spec.hidden_size, "identity": model_identity(checkpoint)}


def _about_text(text: str | Path) -> dict[str, str]:
    identity = text_identity(text)
    if identity == str(text):
        return {"name": identity}
    return {"name": Path(text).name, "sha256": identity}


def _triangle(gram: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row; an index of it would be as large as the matrix."""
    return torch.cat([row[at:] for at, row in enumerate(gram)])


def _whole(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix of an upper triangle.

    Raises:
        CheckpointError: it is of another size.
    """
    if triangle.numel() != width * (width + 1) // 2:
        raise CheckpointError(_FIELD, tuple(triangle.shape), f"must be the triangle of a matrix {width} wide")
    gram = triangle.new_empty(width, width)
    for at, row in enumerate(torch.split(triangle, list(range(width, 0, -1)))):
        gram[at, at:] = row
        gram[at:, at] = row
    return gram
