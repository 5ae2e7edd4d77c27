"""transformers' config object and model class for a parsed ``config.json``."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headwise.errors import CheckpointError, HeadwiseError
from headwise.models.checkpoints import family_of, has_family, refuse_kernel, refuse_kernels

_RETURNED = ("return_dict", "output_hidden_states", "output_attentions")
"""Fields for what a call returns. They are ignored, because headwise's calls rely on the defaults."""


def stock_config(config: dict[str, Any]) -> Any:
    """Build transformers' config object from a parsed ``config.json``, of a converted model too.

    For example ``stock_config({"model_type": "llama", "hidden_size": 64}).hidden_size`` is 64.

    Args:
        config: the parsed file.

    Raises:
        CheckpointError: transformers does not accept the config, or the config names a kernel of the hub.
    """
    refuse_kernels(config)
    try:
        fields = {name: value for name, value in config.items() if name not in _RETURNED}
        stock = CONFIG_MAPPING[config["model_type"]].from_dict(fields)
    except Exception as error:  # transformers' validators raise many kinds of exceptions
        raise refused("config.json", config.get("model_type"), error) from None
    _refuse_kernels_of(stock)
    return stock


def _refuse_kernels_of(stock: Any) -> None:
    """Refuse a config object that names a kernel of the hub in any of its fields, nested configs included.

    Raises:
        CheckpointError: it names one.
    """
    pending = [stock]
    while pending:
        item = pending.pop()
        if isinstance(item, PreTrainedConfig):
            for name in ("_attn_implementation", "_experts_implementation"):
                if isinstance(text := getattr(item, name, None), str):
                    refuse_kernel(name, text)
            pending += vars(item).values()
        elif isinstance(item, dict | list | tuple):
            pending += item.values() if isinstance(item, dict) else item


def model_class(config: dict[str, Any]) -> Any:
    """The transformers class of a config's model; of a family's several classes, the one in ``architectures``.

    For example ``model_class({"model_type": "llama"}).__name__`` is ``"LlamaForCausalLM"``.

    Args:
        config: a parsed ``config.json``.

    Raises:
        CheckpointError: transformers has no text-generating class for the ``model_type``, or ``architectures`` names
            a class of another family.
    """
    stock, model_type = stock_config(config), str(config.get("model_type"))
    autos = family_of(model_type).autos if has_family(model_type) else ("AutoModelForCausalLM",)
    try:
        classes = [getattr(transformers, auto)._model_mapping[type(stock)] for auto in autos]
    except KeyError:
        raise CheckpointError("model_type", model_type, "is not a model that generates text") from None
    architectures = config.get("architectures")
    if len(classes) == 1 or not architectures:
        return classes[0]
    by_name = {candidate.__name__.removeprefix("Headwise"): candidate for candidate in classes}
    name = str(architectures[0] if isinstance(architectures, list) else architectures).removeprefix("Headwise")
    if name not in by_name:
        raise CheckpointError("architectures", name, f"must be one of {', '.join(by_name)}")
    return by_name[name]


def auto_class(config: dict[str, Any]) -> str:
    """The name of transformers' Auto class that loads the folder of a config.

    For example ``auto_class({"model_type": "llama"})`` is ``"AutoModelForCausalLM"``.

    Args:
        config: a parsed ``config.json``.

    Raises:
        CheckpointError: see `model_class`.
    """
    wanted, stock, model_type = model_class(config), stock_config(config), str(config.get("model_type"))
    autos = family_of(model_type).autos if has_family(model_type) else ("AutoModelForCausalLM",)
    return next(auto for auto in autos if getattr(transformers, auto)._model_mapping[type(stock)] is wanted)


def refused(field: str, value: object, error: Exception) -> HeadwiseError:
    """Turn an exception from transformers into a one-line `CheckpointError`; a `HeadwiseError` stays as it is.

    Args:
        field: the field or file to name.
        value: its value.
        error: the exception.
    """
    if isinstance(error, HeadwiseError):
        return error
    reason = shorten(str(error), 300, placeholder=" …")
    return CheckpointError(field, value, f"is refused by transformers: {type(error).__name__}: {reason}")
