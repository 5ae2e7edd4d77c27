"""Statistics of a model in a folder, from which any target is solved without running the model.

``statistics.json`` says of which model it is and of which text; each layer has a file of its own, with a checksum. Of
the Gram matrices the upper triangles are kept, in float64: in float32 the folder would be half as large, and rounding
would hide what a text shorter than the model is wide does not show at all.

Shapes: L layers, H query heads, E hidden, E' = E + 1, T tokens of a window.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint, dtype_name, model_identity, versions
from headwise.checkpoints.disk import sync
from headwise.conversion.calibration.base import Calibrator
from headwise.conversion.methods import Evidence
from headwise.conversion.planning.plan import Place
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.storage.layers import LayerFiles
from headwise.errors import ArgumentError, CheckpointError
from headwise.progress import Progress, silent
from headwise.texts import text_identity

ABOUT = "statistics.json"
FORMAT = 1
_GRAMS = ("inputs", "keys")
_FIELD = "statistics"


@dataclass
class SavedCalibrator(Calibrator):
    """Statistics of every layer of a model, read when they are asked for.

    Attributes:
        folder: where they are.
        tokens: how many went into them.
        window: tokens in each window of them.
        identity: tells them from others.
        texts: the names of the texts they are of.
        text_identities: the same texts' `text_identity`, where it is known.
        read_seconds: spent on reading them.
    """

    folder: Path
    tokens: int = 0
    window: int = 0
    identity: str = ""
    texts: tuple[str, ...] = ()
    text_identities: frozenset[str] = frozenset()
    read_seconds: float = 0.0

    def evidence(self, place: Place, source: Layer | None = None) -> Evidence:
        """One layer's statistics and sensitivity; the layer itself is not looked at.

        Raises:
            CheckpointError: its file is missing or damaged, or does not hold statistics of a layer.
        """
        start, index = time.perf_counter(), place.index
        assert not place.cross  # a model with attention to an encoder has no statistics
        found = LayerFiles(self.folder).load(index)
        if found is None:
            file = LayerFiles(self.folder).file(index)
            rule = "is cut short or damaged" if file.is_file() else "is missing"
            raise CheckpointError(_FIELD, str(file), f"{rule}; calibrate again")
        tensors = found[0]
        if (wrong := _wrong(tensors)) is not None:
            raise CheckpointError(_FIELD, str(self.folder), f"{wrong} of layer {index}; calibrate again")
        sensitivity = tensors.pop("sensitivity").double()
        width = len(sensitivity) + 1
        known = {name: _whole(tensor, width) if name in _GRAMS else tensor for name, tensor in tensors.items()}
        self.read_seconds += time.perf_counter() - start
        return Evidence(Statistics(**known), sensitivity)


def save_layer(results: LayerFiles, index: int, known: Statistics, sensitivity: Tensor) -> None:
    """Keep one layer's statistics, as means.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """
    tensors = {field.name: getattr(known, field.name) for field in fields(known)}
    packed = {name: _triangle(tensor) if name in _GRAMS else tensor for name, tensor in tensors.items()}
    results.save(index, {**packed, "sensitivity": sensitivity.float()}, {})


def write_statistics(
    folder: Path, results: LayerFiles, checkpoint: Checkpoint, texts: Sequence[str | Path], windows: Tensor
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


def open_statistics(folder: str | Path, checkpoint: Checkpoint, progress: Progress = silent) -> SavedCalibrator:
    """Statistics of a model, all of them read once to see that they are whole.

    Args:
        folder: of `headwise.calibrate`.
        checkpoint: the model they must be of.
        progress: told of each layer.

    Raises:
        ArgumentError: it is empty.
        CheckpointError: it is no such folder, of another model or format, or damaged.
    """
    if not str(folder):
        raise ArgumentError(_FIELD, "", "is empty; it must name a folder")
    folder = Path(folder)
    try:
        text = (folder / ABOUT).read_text(encoding="utf-8")
        about = json.loads(text)
        form, model, sums = about["format"], about["model"], about["layers"]
        tokens, window = about["tokens"], about["window"]
        texts = tuple(str(text["name"]) for text in about["texts"])
        identities = frozenset(str(text.get("sha256", text["name"])) for text in about["texts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(_FIELD, str(folder), f"has no readable {ABOUT}; headwise calibrate makes one") from None
    if form != FORMAT:
        raise CheckpointError(_FIELD, str(folder), f"is of format {form!r}; this headwise reads format {FORMAT}")
    for name, count in (("tokens", tokens), ("window", window)):
        if type(count) is not int or count < 1:
            rule = f"names {count!r} {name} in its {ABOUT}, which must be a whole number of at least 1"
            raise CheckpointError(_FIELD, str(folder), rule)
    layers = checkpoint.spec.num_layers
    if not isinstance(sums, list) or len(sums) != layers:
        count = len(sums) if isinstance(sums, list) else 0
        raise CheckpointError(_FIELD, str(folder), f"has {count} layers, and {checkpoint.path} has {layers}")
    if model != _model(checkpoint):
        raise CheckpointError(_FIELD, str(folder), f"is of another model than {checkpoint.path}")
    found = SavedCalibrator(folder, tokens, window, hashlib.sha256(text.encode()).hexdigest(), texts, identities)
    results = LayerFiles(folder)
    for index, layer in enumerate(checkpoint.spec.layers):
        progress("checking statistics", index, layers)
        evidence = found.evidence(Place(index))
        assert evidence.statistics is not None
        assert evidence.sensitivity is not None
        found_sizes = (*evidence.statistics.distances.shape, len(evidence.sensitivity))
        sizes = (getattr(layer, "num_heads", 0), window, layer.hidden_size)
        if results.checksum(index) != sums[index] or found_sizes != sizes:
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


def _wrong(tensors: Mapping[str, Tensor]) -> str | None:
    """Why these are not one layer's statistics, by a tensor's name; None when they are."""
    names = {"sensitivity", *(field.name for field in fields(Statistics))}
    for name in sorted(names ^ tensors.keys()):
        return f"{'lacks' if name in names else 'has a tensor too many:'} {name}"
    width, heads = math.isqrt(tensors["sensitivity"].numel()), tensors["head_weight"].numel()
    shapes: dict[str, tuple[int, ...]] = {
        "sensitivity": (width, width),
        **dict.fromkeys(_GRAMS, ((width + 1) * (width + 2) // 2,)),
        "head_weight": (heads,),
        "distances": (heads, tensors["distances"].numel() // max(heads, 1)),
        "queries": (),
    }
    for name, shape in shapes.items():
        tensor, dtype = tensors[name], torch.float32 if name == "sensitivity" else torch.float64
        if tensor.dtype != dtype:
            return f"holds {dtype_name(tensor.dtype)} in the place of {dtype_name(dtype)}: {name}"
        if tensor.shape != shape:
            return f"holds shape {tuple(tensor.shape)} in the place of {shape}: {name}"
        if not bool(torch.isfinite(tensor).all()):
            return f"holds NaN or infinite values: {name}"
        if bool((_squares(name, tensor) < 0).any()):
            return f"holds negative sums of squares: {name}"
    return None


def _squares(name: str, tensor: Tensor) -> Tensor:
    """What cannot be negative of one of them."""
    if name == "sensitivity":
        return tensor.diagonal()
    if name not in _GRAMS:
        return tensor
    width = (math.isqrt(8 * len(tensor) + 1) - 1) // 2
    rows = torch.arange(width, 0, -1)
    return tensor[rows.cumsum(0) - rows]


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
