"""Refuse model folders that would run code, or have transformers read other files than headwise has checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.base.documents import load_json
from headwise.errors import CheckpointError
from headwise.models.specs import HOSTED_PREFIX, LARGEST_INDEX

_IMPLEMENTATION = re.compile(r"(attn|attention|experts?)_implementation", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[\w|]*")
_FLOAT_TAG = "__float__"
"""The key under which transformers writes NaN and infinities."""
_SPLIT_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
ADAPTER = "adapter_config.json"
"""The file of an adapter, which transformers applies to the weights where peft is installed."""


def refuse_unsafe(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config that asks for code from its folder or from the hub, or whose weights are quantised.

    For example ``refuse_unsafe({"auto_map": {"AutoModel": "code.Model"}}, Path("./model"))`` raises a
    CheckpointError. Where transformers has the ``model_type``, its own class is meant, and ``auto_map`` is not used.

    Args:
        config: the parsed ``config.json``; fields of configs within it count too.
        path: the path of the config's folder.

    Raises:
        CheckpointError: the config does, or names other files to read in the place of itself or of the weights.
    """
    refuse_kernels(config)
    for name, field, value in _fields(config):
        if field == "auto_map" and value and not (name == field and _is_transformers(config.get("model_type"))):
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


def _is_transformers(model_type: object) -> bool:
    """Whether transformers has a class for a model type, or for what it was converted from."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type.removeprefix(HOSTED_PREFIX) in CONFIG_MAPPING


def refuse_kernels(config: Mapping[str, Any]) -> None:
    """Refuse a config that names a kernel of the hub, which transformers would download and run.

    For example ``refuse_kernels({"_attn_implementation": "owner/kernel"})`` raises a CheckpointError.

    Args:
        config: the parsed ``config.json``; fields of configs within it count too.

    Raises:
        CheckpointError: a field that chooses an implementation holds anything but plain names such as ``sdpa``, or
            another field could be used to set it.
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
    """Refuse an implementation whose name is that of a kernel of the hub, such as ``owner/kernel@main:function``.

    For example ``refuse_kernel("attn_implementation", "owner/kernel@main:function")`` raises a CheckpointError.

    Args:
        name: the name of the field, for the error.
        implementation: the field's value.

    Raises:
        CheckpointError: the value is not a plain name.
    """
    if not _PLAIN_NAME.fullmatch(implementation):
        rule = "must be a plain name such as sdpa: a kernel of the hub is code, which headwise never fetches or runs"
        raise CheckpointError(name, implementation, rule)


def refuse_other_weights(path: Path) -> None:
    """Refuse a folder from which transformers would load other weights than headwise has checked.

    For example ``refuse_other_weights(Path("./model"))``.

    Args:
        path: the folder.

    Raises:
        CheckpointError: the folder holds an adapter, or a checkpoint in the parts that several processes wrote.
    """
    if (path / ADAPTER).is_file():
        rule = f"an adapter is not applied; merge it into the weights, or take {ADAPTER} away"
        raise CheckpointError("folder", str(path), f"has an {ADAPTER}: {rule}")
    for file in path.glob("shard-*.safetensors"):
        if _SPLIT_SHARD.fullmatch(file.name):
            rule = "is a part that several processes wrote, which transformers would read before model.safetensors"
            raise CheckpointError("file", str(file), rule)


def refuse_tokenizer_class(path: Path) -> None:
    """Refuse a folder that names a class as its tokenizer's which is not the class of a tokenizer.

    transformers accepts the name of any of its classes: a model's, or one that loads further folders.

    Args:
        path: the folder.

    Raises:
        CheckpointError: the folder's ``tokenizer_config.json`` or ``config.json`` names such a class.
    """
    import transformers

    for file in ("tokenizer_config.json", "config.json"):
        try:
            name = load_json(path / file, LARGEST_INDEX).get("tokenizer_class")
        except (OSError, ValueError, AttributeError):  # transformers refuses it, if it needs it
            continue
        cls = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if not isinstance(cls, type) or getattr(cls, "is_dummy", False):
            continue
        if not issubclass(cls, transformers.PreTrainedTokenizerBase):
            raise CheckpointError("tokenizer_class", name, f"in {path / file} is not the class of a tokenizer")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Every field of a config and of the objects within it: its path with dots, its name and its value."""
    left: list[tuple[str, Any]] = [("", config)]
    while left:  # no recursion: a file may nest deeper than Python does
        place, holder = left.pop()
        items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
        for key, value in items:
            name = f"{place}{key}"
            if isinstance(holder, Mapping):
                yield name, str(key), value
            if isinstance(value, Mapping | list):
                left.append((f"{name}.", value))


def _strings(value: Any) -> Iterator[str]:
    """Every string within a value, keys included."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            left += item
