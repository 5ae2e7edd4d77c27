"""The file beside a model's weights that says how its cache is coded.

Programs that do not know it read the weights alone, and keep a cache of the model's own numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.runtime.quantization.transform_code import TransformCode

FILE = "kv_cache.safetensors"
"""The name of the file."""

FORMAT = 1
"""The version of its layout."""

_KEY = "headwise"


def code_tensors(code: TransformCode) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A code's tensors, and the rest of it as JSON-able values.

    For example ``code_from(*code_tensors(code))`` is an equal code.
    """
    about = {"bits": list(code.bits), "sections": list(code.sections), "parts": list(code.parts)}
    return {"offset": code.offset, "scale": code.scale}, about


def code_from(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> TransformCode:
    """The code that `code_tensors` took apart.

    Raises:
        ValueError: it is no code, or its numbers code nothing.
    """
    offset, scale = tensors["offset"], tensors["scale"]
    if not (bool(offset.isfinite().all()) and bool(((scale > 0) & scale.isfinite()).all())):
        raise ValueError("offsets must be finite, and scales finite and positive")
    return TransformCode(offset, scale, *(tuple(about[name]) for name in ("bits", "sections", "parts")))


def codes_content(codes: Mapping[int, TransformCode]) -> bytes:
    """The content of the file.

    Args:
        codes: the code of each layer, by the layer's number.
    """
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for index, code in codes.items():
        own, layers[str(index)] = code_tensors(code)
        tensors |= {f"{index}.{name}": tensor.contiguous().clone() for name, tensor in own.items()}
    return save(tensors, metadata={_KEY: json.dumps({"format": FORMAT, "layers": layers})})


def read_codes(folder: Path, layers: int | None = None) -> dict[int, TransformCode]:
    """The code of each layer of a model folder; empty where its cache is not coded.

    Args:
        folder: of the model.
        layers: the number of the model's layers, each of which must have a code; not checked when None.

    Raises:
        CheckpointError: the file is damaged, of another version, or not of so many layers.
    """
    path = folder / FILE
    if not (path.exists() or path.is_symlink()):
        return {}
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            about = json.loads(file.metadata()[_KEY])
            if about["format"] != FORMAT:
                rule = f"is of format {about['format']!r}; this headwise reads format {FORMAT}"
                raise CheckpointError(FILE, str(path), rule)
            codes = {
                int(index): code_from({name: file.get_tensor(f"{index}.{name}") for name in ("offset", "scale")}, own)
                for index, own in about["layers"].items()
            }
    except CheckpointError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(FILE, str(path), "is damaged; convert the model again") from None
    if layers is not None and sorted(codes) != list(range(layers)):
        rule = f"must have a code for each of the model's {layers} layers; convert the model again"
        raise CheckpointError(FILE, f"{len(codes)} codes", rule)
    return codes
