"""Statistics of a model in a folder, from which any target is solved without running the model.

``statistics.json`` names the model and the texts; each layer has its own file, with a checksum. Gram matrices are
stored as their upper triangles, in float64: float32 would halve the folder, but a text with fewer tokens than a layer
has inputs gives singular matrices, whose zero directions rounding would fill.

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

from headwise.base.disk import open_regular, sync
from headwise.base.progress import Progress, silent
from headwise.conversion.calibration.candidates import Calibrator
from headwise.conversion.calibration.windows import CalibrationWindows
from headwise.conversion.methods import Evidence
from headwise.conversion.plan import Place
from headwise.conversion.solvers.device import to_device
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.storage import LOST, LayerFiles
from headwise.errors import ArgumentError, CheckpointError
from headwise.measure.texts import first_ids, text_identity
from headwise.models.checkpoints import Checkpoint, dtype_name, load_tokenizer, model_identity, versions

ABOUT = "statistics.json"
FORMAT = 2
_GRAMS = ("inputs", "keys")
_FIELD = "statistics"


@dataclass
class SavedCalibrator(Calibrator):
    """Calibration by saved statistics, each layer's read when the layer is solved.

    Attributes:
        folder: the folder of the statistics.
        tokens: the number of calibration tokens.
        window: the number of tokens in each window.
        identity: a digest that tells these statistics from others.
        texts: the names of the calibration texts.
        text_identities: the `text_identity` of each calibration text.
        read_seconds: seconds spent on reading statistics.
    """

    has_evidence = True

    folder: Path
    tokens: int = 0
    window: int = 0
    identity: str = ""
    texts: tuple[str, ...] = ()
    text_identities: frozenset[str] = frozenset()
    read_seconds: float = 0.0

    def collect(self, place: Place, source: Layer) -> tuple[Evidence, None]:
        """One layer's statistics and sensitivity, whatever its weights.

        Raises:
            CheckpointError: see `read_evidence`.
        """
        start = time.perf_counter()
        assert not place.cross  # a model with attention to an encoder has no statistics
        evidence = read_evidence(LayerFiles(self.folder), place.index)
        self.read_seconds += time.perf_counter() - start
        return evidence, None


def save_layer(results: LayerFiles, index: int, statistics: Statistics, sensitivity: Tensor) -> None:
    """Save one layer's statistics, as means, and its sensitivity.

    Raises:
        StorageError: the disk is full, or the file cannot be written.
    """
    tensors = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    tensors = {name: _triangle(tensor) if name in _GRAMS else tensor for name, tensor in tensors.items()}
    results.save(index, {**tensors, "sensitivity": sensitivity.float()}, {})


def read_evidence(results: LayerFiles, index: int, *, inputs: int | None = None) -> Evidence:
    """Read what `save_layer` saved.

    Args:
        results: the files that the layer was saved in.
        index: the layer's number.
        inputs: the number of inputs that the statistics are of; when None, the number E of the layer's own inputs.

    Raises:
        CheckpointError: the layer's file is missing or damaged, or does not hold statistics of a layer.
    """
    result = results.load(index)
    if result is None:
        file = results.file(index)
        rule = "is cut short or damaged" if file.is_file() else "is missing"
        raise CheckpointError(_FIELD, str(file), f"{rule}; calibrate again")
    tensors = result[0]
    if (fault := _fault(tensors, inputs)) is not None:
        raise CheckpointError(_FIELD, str(results.folder), f"{fault} of layer {index}; calibrate again")
    sensitivity = to_device(tensors.pop("sensitivity")).double()
    width = (len(sensitivity) if inputs is None else inputs) + 1
    means = {
        name: _full_matrix(to_device(tensor), width) if name in _GRAMS else to_device(tensor)
        for name, tensor in tensors.items()
    }
    return Evidence(Statistics(**means), sensitivity)


def write_statistics(
    folder: Path,
    results: LayerFiles,
    checkpoint: Checkpoint,
    texts: Sequence[str | Path],
    windows: CalibrationWindows,
) -> None:
    """Write the folder of statistics from the saved layers.

    Args:
        folder: the folder to write.
        results: the saved layers, whose files are linked where the disk allows it and copied otherwise.
        checkpoint: the model that the statistics are of.
        texts: the calibration texts; of a path only the last name is written.
        windows: the calibration windows.

    Raises:
        CheckpointError: an earlier run saved a layer, and its file is missing or damaged.
        OSError: the disk is full.
    """
    distances = []
    for index in range(checkpoint.spec.num_layers):
        if (result := results.load(index)) is None:
            raise CheckpointError("layer", index, LOST)
        distances.append(result[0]["distances"].shape[1])
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
        "tokens": windows.tokens,
        "window": windows.width,
        "begin": windows.ids[0, : windows.begin].tolist(),
        "distances": distances,
        "versions": versions(),
        "layers": [results.checksum(index) for index in range(checkpoint.spec.num_layers)],
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def open_statistics(folder: str | Path, checkpoint: Checkpoint, progress: Progress = silent) -> SavedCalibrator:
    """Open a folder of statistics and check every layer in it.

    Args:
        folder: a folder that `headwise.calibrate` wrote.
        checkpoint: the model that the statistics must belong to.
        progress: the callback that is told of each layer.

    Raises:
        ArgumentError: the folder's name is empty.
        CheckpointError: the folder has no statistics, or those of another model or format, or is damaged.
    """
    if not str(folder):
        raise ArgumentError(_FIELD, "", "is empty; it must name a folder")
    folder = Path(folder)
    try:
        with open_regular(folder / ABOUT) as file:
            text = file.read().decode()
        about = json.loads(text)
        version, model, sums = about["format"], about["model"], about["layers"]
        distances = about.get("distances")  # absent in another format
        tokens, window, begin = about["tokens"], about["window"], about.get("begin", [])
        texts = tuple(str(text["name"]) for text in about["texts"])
        identities = frozenset(str(text.get("sha256", text["name"])) for text in about["texts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(_FIELD, str(folder), f"has no readable {ABOUT}; headwise calibrate makes one") from None
    if version != FORMAT:
        raise CheckpointError(_FIELD, str(folder), f"is of format {version!r}; this headwise reads format {FORMAT}")
    for name, count in (("tokens", tokens), ("window", window)):
        if type(count) is not int or count < 1:
            rule = f"names {count!r} {name} in its {ABOUT}, which must be a whole number of at least 1"
            raise CheckpointError(_FIELD, str(folder), rule)
    layers = checkpoint.spec.num_layers
    for each in (sums, distances):
        if isinstance(each, list) and len(each) == layers:
            continue
        count = len(each) if isinstance(each, list) else 0
        raise CheckpointError(_FIELD, str(folder), f"has {count} layers, and {checkpoint.path} has {layers}")
    if model != _model(checkpoint):
        raise CheckpointError(_FIELD, str(folder), f"is of another model than {checkpoint.path}")
    _check_begin(begin, folder, checkpoint)
    calibrator = SavedCalibrator(folder, tokens, window, hashlib.sha256(text.encode()).hexdigest(), texts, identities)
    results = LayerFiles(folder)
    for index, layer in enumerate(checkpoint.spec.layers):
        progress("checking statistics", index, layers)
        evidence = read_evidence(results, index)
        assert evidence.statistics is not None
        assert evidence.sensitivity is not None
        sizes = (*evidence.statistics.distances.shape, len(evidence.sensitivity))
        model_sizes = (getattr(layer, "num_heads", 0), distances[index], layer.hidden_size)
        if results.checksum(index) != sums[index] or sizes != model_sizes:
            raise CheckpointError(_FIELD, str(results.file(index)), f"is not the layer that {ABOUT} names")
    progress("checking statistics", layers, layers)
    return calibrator


def _check_begin(begin: object, folder: Path, checkpoint: Checkpoint) -> None:
    """Refuse statistics of texts that began otherwise than the model's tokenizer begins one.

    Raises:
        CheckpointError: the texts began otherwise.
    """
    try:
        tokenizer = load_tokenizer(checkpoint.path)
    except CheckpointError:  # statistics need none
        return
    now = first_ids(tokenizer) if checkpoint.spec.is_causal else []
    if begin != now:
        rule = f"is of windows that begin with tokens {begin}, and the tokenizer begins a text with {now}"
        raise CheckpointError(_FIELD, str(folder), f"{rule}; calibrate again")


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    spec = checkpoint.spec
    return {"model_type": spec.model_type, "hidden_size": spec.hidden_size, "identity": model_identity(checkpoint)}


def _about_text(text: str | Path) -> dict[str, str]:
    identity = text_identity(text)
    if identity == str(text):
        return {"name": identity}
    return {"name": Path(text).name, "sha256": identity}


def _fault(tensors: Mapping[str, Tensor], inputs: int | None) -> str | None:
    """Why tensors are not one layer's statistics, ending with a tensor's name; None when they are.

    Args:
        tensors: the tensors of the layer's file, by name.
        inputs: the number of inputs; see `read_evidence`.
    """
    names = {"sensitivity", *(field.name for field in fields(Statistics))}
    for name in sorted(names ^ tensors.keys()):
        return f"{'lacks' if name in names else 'has a tensor too many:'} {name}"
    width, heads = math.isqrt(tensors["sensitivity"].numel()), tensors["head_weight"].numel()
    # Behind norms the solver sees other inputs than the layer's own; the constant input comes on top.
    own = width if inputs is None else inputs
    shapes: dict[str, tuple[int, ...]] = {
        "sensitivity": (width, width),
        **dict.fromkeys(_GRAMS, ((own + 1) * (own + 2) // 2,)),
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
    """The numbers of one tensor of statistics that cannot be negative."""
    if name == "sensitivity":
        return tensor.diagonal()
    if name not in _GRAMS:
        return tensor
    width = (math.isqrt(8 * len(tensor) + 1) - 1) // 2
    rows = torch.arange(width, 0, -1, device=tensor.device)
    return tensor[rows.cumsum(0) - rows]


def _triangle(gram: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row: index tensors would be larger than the matrix."""
    return torch.cat([row[index:] for index, row in enumerate(gram)])


def _full_matrix(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix ``[width, width]`` of an upper triangle.

    Raises:
        CheckpointError: the triangle has another size.
    """
    if triangle.numel() != width * (width + 1) // 2:
        raise CheckpointError(_FIELD, tuple(triangle.shape), f"must be the triangle of a matrix {width} wide")
    gram = triangle.new_empty(width, width)
    for index, row in enumerate(torch.split(triangle, list(range(width, 0, -1)))):
        gram[index, index:] = row
        gram[index:, index] = row
    return gram
