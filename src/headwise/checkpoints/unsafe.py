"""Refuse what in a model folder would run code, or would be read in the place of what headwise has checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError

_IMPLEMENTATION = re.compile(r"(attn|attention|experts?)_implementation", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[\w|]*")
_FLOAT_TAG = "__float__"  # how transformers writes NaN and infinities
_SPLIT_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
ADAPTER = "adapter_config.json"


def refuse_unsafe(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config that needs code from its folder or from the hub, or whose weights are quantised.

    Args:
        config: the parsed ``config.json``.
        path: its folder.

    Raises:
        CheckpointError: it does.
    """
    refuse_kernels(config)
    for name, field, value in _fields(config):
        if field == "auto_map" and value:
            raise CheckpointError(name, value, f"asks to run code from {path}, which headwise never does")
        if field in ("quantization_config", "compression_config") and value:
            method = value.get("quant_method") if isinstance(value, Mapping) else value
            raise CheckpointError(name, method, "quantised weights are not read; use the original")
    if files := config.get("configuration_files"):
        rule = "transformers would read one of them in the place of config.json; leave config.json alone"
        raise CheckpointError("configuration_files", files, rule)
    if other := config.get("transformers_weights"):
        rule = "weights are read from model.safetensors or model.safetensors.index.json only"
        raise CheckpointError("transformers_weights", other, rule)


def refuse_kernels(config: Mapping[str, Any]) -> None:
    """Refuse a config that names a kernel of the hub, which transformers would fetch and run.

    Args:
        config: the parsed ``config.json``; every field of it counts, those of configs within it too.

    Raises:
        CheckpointError: a field that chooses an implementation holds more than a plain name such as ``sdpa``, or a
            field would set such a one under another name.
    """
    for name, field, value in _fields(config):
        if _IMPLEMENTATION.search(field):
            for text in _strings(value):
                refuse_kernel(name, text)
        if field == "attribute_map":
            raise CheckpointError(name, value, "renames other fields, which headwise leaves to a model's class")
        if field.startswith("__") and field.endswith("__") and field != _FLOAT_TAG:
            raise CheckpointError(name, value, "is no field of a config, but a part of Python's objects")


def refuse_kernel(name: str, implementation: str) -> None:
    """Refuse the name of an implementation that is not one of transformers' own.

    Args:
        name: of the field.
        implementation: what it holds.

    Raises:
        CheckpointError: it is not a plain name.
    """
    if not _PLAIN_NAME.fullmatch(implementation):
        rule = "must be a plain name such as sdpa: a kernel of the hub is code, which headwise never fetches or runs"
        raise CheckpointError(name, implementation, rule)


def refuse_other_weights(path: Path) -> None:
    """Refuse a folder in which transformers would look for other weights than headwise does.

    Raises:
        CheckpointError: it holds an adapter, or a checkpoint that several processes wrote.
    """
    if (path / ADAPTER).is_file():
        rule = f"an adapter is not applied; merge it into the weights, or take {ADAPTER} away"
        raise CheckpointError("folder", str(path), f"has an {ADAPTER}: {rule}")
    for file in path.glob("shard-*.safetensors"):
        if _SPLIT_SHARD.fullmatch(file.name):
            rule = "is a part that several processes wrote, which transformers would read before model.safetensors"
            raise CheckpointError("file", str(file), rule)


def refuse_tokenizer_class(path: Path) -> None:
    """Refuse a folder whose tokenizer is to be made by a class of transformers that is no tokenizer's.

    transformers takes any of its classes by name, such as a model, or one that loads further folders.

    Raises:
        CheckpointError: a config of the folder names one.
    """
    import transformers

    for file in ("tokenizer_config.json", "config.json"):
        try:
            name = json.loads((path / file).read_text(encoding="utf-8")).get("tokenizer_class")
        except (OSError, ValueError, AttributeError, RecursionError):  # transformers' to refuse, where it needs it
            continue
        made = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if not isinstance(made, type) or getattr(made, "is_dummy", False):
            continue
        if not issubclass(made, transformers.PreTrainedTokenizerBase):
            raise CheckpointError("tokenizer_class", name, f"in {path / file} is not the class of a tokenizer")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Every field of a config and of what it holds: its path with dots, its own name, its value."""
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        place, holder = left.pop()
        items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
        for key, value in items:
            name = f"{place}{key}"
            if isinstance(holder, Mapping):
                yield name, str(key), value
            if isinstance(value, Mapping | list):
                left.append((f"{name}.", value))


def _strings(value: Any) -> Iterator[str]:
    """Every string in a value, keys and all."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            left += item
