"""transformers' config object and model class for a parsed ``config.json``."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headwise.checkpoints import family_of, has_family, refuse_kernel, refuse_kernels
from headwise.errors import CheckpointError, HeadwiseError

_RETURNED = ("return_dict", "output_hidden_states", "output_attentions")
"""Fields that say what a call gives back: whoever calls says that."""


def stock_config(config: dict[str, Any]) -> Any:
    """transformers' config object for a parsed ``config.json`` (a converted one's included).

    Raises:
        CheckpointError: transformers does not accept it, or it names a kernel of the hub.
    """
    refuse_kernels(config)
    try:
        fields = {name: value for name, value in config.items() if name not in _RETURNED}
        made = CONFIG_MAPPING[config["model_type"]].from_dict(fields)
    except Exception as error:  # its validators raise many kinds
        raise refused("config.json", config.get("model_type"), error) from None
    _refuse_kernels_of(made)
    return made


def _refuse_kernels_of(made: Any) -> None:
    """Refuse a config object that names a kernel of the hub, by whatever way the name came into it."""
    left = [made]
    while left:
        item = left.pop()
        if isinstance(item, PreTrainedConfig):
            for name in ("_attn_implementation", "_experts_implementation"):
                if isinstance(text := getattr(item, name, None), str):
                    refuse_kernel(name, text)
            left += vars(item).values()
        elif isinstance(item, dict | list | tuple):
            left += item.values() if isinstance(item, dict) else item


def model_class(config: dict[str, Any]) -> Any:
    """The class transformers would build for a config: of the family's, the one its ``architectures`` names.

    Raises:
        CheckpointError: it has none that generates text, or names one that is not the family's.
    """
    stock, model_type = stock_config(config), str(config.get("model_type"))
    autos = family_of(model_type).autos if has_family(model_type) else ("AutoModelForCausalLM",)
    try:
        classes = [getattr(transformers, auto)._model_mapping[type(stock)] for auto in autos]
    except KeyError:
        raise CheckpointError("model_type", model_type, "is not a model that generates text") from None
    named = config.get("architectures")
    if len(classes) == 1 or not named:
        return classes[0]
    known = {made.__name__.removeprefix("Headwise"): made for made in classes}
    name = str(named[0] if isinstance(named, list) else named).removeprefix("Headwise")
    if name not in known:
        raise CheckpointError("architectures", name, f"must be one of {', '.join(known)}")
    return known[name]


def auto_class(config: dict[str, Any]) -> str:
    """The name of transformers' Auto class that loads the folder of a config.

    Raises:
        CheckpointError: see `model_class`.
    """
    made, stock, model_type = model_class(config), stock_config(config), str(config.get("model_type"))
    autos = family_of(model_type).autos if has_family(model_type) else ("AutoModelForCausalLM",)
    return next(auto for auto in autos if getattr(transformers, auto)._model_mapping[type(stock)] is made)


def refused(field: str, value: object, error: Exception) -> HeadwiseError:
    """What transformers raised, as one line of ours."""
    if isinstance(error, HeadwiseError):
        return error
    reason = shorten(str(error), 300, placeholder=" …")
    return CheckpointError(field, value, f"is refused by transformers: {type(error).__name__}: {reason}")
