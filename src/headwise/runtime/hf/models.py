"""Model classes and configs for parsed ``config.json``s, of converted folders among them.

The class of a converted folder is the family's transformers model in everything but the attention modules. Its rotary
embedding goes on computing cos and sin, whatever the scaling; a converted layer picks the frequencies that it kept.
"""

from __future__ import annotations

from functools import cache
from textwrap import shorten
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from headwise.errors import CheckpointError, HeadwiseError, SpecError
from headwise.models.checkpoints import family_names, family_of, has_family, refuse_kernel, refuse_kernels
from headwise.models.specs import HOSTED_PREFIX, AttentionSpec, GroupedSpec, LatentSpec, read_config
from headwise.runtime.hf.attention import HostedGroupedAttention, HostedLatentAttention

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


def config_in(dtype: torch.dtype, config: dict[str, Any]) -> Any:
    """Build transformers' config object of a model that is run in a dtype; see `stock_config`.

    For example ``config_in(torch.float64, open_checkpoint("./model").config)``.

    Args:
        dtype: the dtype.
        config: the parsed file.
    """
    stock = stock_config(config)
    if dtype == torch.float64 and stock._experts_implementation is None:
        stock._experts_implementation = "eager"  # the default does not support float64
    return stock


def _refuse_kernels_of(stock: Any) -> None:
    """Refuse a config object that names a kernel of the hub in any of its fields, nested configs included.

    Raises:
        CheckpointError: the config names such a kernel.
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
        value: the value of the field.
        error: the exception.
    """
    if isinstance(error, HeadwiseError):
        return error
    reason = shorten(str(error), 300, placeholder=" …")
    return CheckpointError(field, value, f"is refused by transformers: {type(error).__name__}: {reason}")


@cache
def hosted_classes(model_type: str) -> tuple[type[Any], dict[str, type[Any]]]:
    """The config class of a family's converted folders, and their model class for each Auto class.

    For example ``hosted_classes("llama")[0].model_type`` is ``"headwise_llama"``.

    Models of ``headwise_llama``, for example, are transformers' llama except for the attention modules.

    Args:
        model_type: the family's model type, such as ``llama``.

    Returns:
        The config class, and model classes by the name of the Auto class.
    """
    family, config_base = family_of(model_type), CONFIG_MAPPING[model_type]
    config_class = _subclass(
        config_base,
        {
            "__annotations__": {"headwise": dict[str, Any] | None},
            "model_type": HOSTED_PREFIX + model_type,
            "headwise": None,
            "base_model_tp_plan": None,  # the family's plan splits projections that are no longer there
        },
    )

    @cache
    def hosted(base: type[Any]) -> type[Any]:
        def init(self: Any, config: Any) -> None:
            base.__init__(self, config)
            install_attention(self, config)
            self.post_init()  # again, because it initialises weights and lists the names of the modules

        def prepare_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
            # transformers leaves Whisper's prompt unchanged, and recognises Whisper by its model_type.
            self.config.model_type = model_type
            try:
                return base._prepare_decoder_input_ids_for_generation(self, *args, **kwargs)
            finally:
                del self.config.model_type

        attributes = {
            "__init__": init,
            "config_class": config_class,
            # headwise's attention takes masks as tensors, and these two implementations pass other objects.
            "_supports_flash_attn": False,
            "_supports_flex_attn": False,
            "init_continuous_batching": refuse_continuous_batching,
        }
        if family.cross_attention:
            attributes["_prepare_decoder_input_ids_for_generation"] = prepare_prompt
        return _subclass(base, attributes)

    autos = dict.fromkeys(("AutoModel", *family.autos))
    return config_class, {auto: hosted(getattr(transformers, auto)._model_mapping[config_base]) for auto in autos}


def refuse_continuous_batching(self: Any, *_: Any, **__: Any) -> None:
    """In the place of transformers' method of this name: its paged cache has room for a model's own heads alone.

    Raises:
        SpecError: always.
    """
    rule = "is not possible with a cache of latents or of codes, which transformers' paged cache cannot hold"
    raise SpecError("continuous batching", type(self).__name__, rule)


def _subclass(base: type[Any], attributes: dict[str, Any]) -> type[Any]:
    doc = f"{base.__name__}, with headwise's attention."
    subclass = type(f"Headwise{base.__name__}", (base,), {"__module__": __name__, "__doc__": doc, **attributes})
    globals()[subclass.__name__] = subclass  # pickle, and so a spawned worker, looks classes up here
    return subclass


def install_attention(model: Any, config: Any) -> None:
    """Replace a model's attention modules by the layers that a converted config describes.

    For example ``install_attention(LlamaForCausalLM(config), config)`` with
    ``config = stock_config(open_checkpoint("./mla").config)``.

    Args:
        model: a model of the family, with or without its head.
        config: the converted config.

    Raises:
        SpecError: the config does not describe every layer.
    """
    values = config.to_dict()
    spec, family = read_config(values), family_of(values["model_type"])
    # The family's paths start at the language model; those of `bare` start at its base model.
    bare, base, text = family.bare(), model.base_model, config.get_text_config()
    frequencies = [buffer.numel() for name, buffer in base.named_buffers() if name.endswith("inv_freq")]
    channels = _channels(config, spec.layers, min(frequencies, default=0))
    for index, (layer, pairs) in enumerate(zip(spec.layers, channels, strict=True)):
        path = bare.place(index, hosted=True)
        replace_attention(base, path, _hosted_layer(layer, text, index, pairs))
        for name in family.emptied:
            base.set_submodule(f"{bare.place(index)}.{name}", nn.Identity())
    for index, layer in enumerate(spec.cross_layers):
        replace_attention(base, bare.place(index, cross=True), _hosted_layer(layer, text, index, []))


def _channels(config: Any, layers: tuple[AttentionSpec, ...], frequencies: int) -> list[list[int]]:
    """For each rotary pair of each layer, the index of its frequency in the model: the listed ones, or all in order.

    Raises:
        SpecError: the config does not list frequencies for every layer, or lists one that the model does not have.
    """
    listed = config.headwise.get("rope_channels")
    if listed is None and not any(isinstance(layer, LatentSpec) for layer in layers):
        return [list(range(layer.rope.dim // 2)) if layer.rope else [] for layer in layers]
    if not isinstance(listed, list) or len(listed) != len(layers):
        raise SpecError("headwise.rope_channels", listed, f"must list the frequencies of {len(layers)} layers")
    for pairs in listed:
        if not isinstance(pairs, list) or any(type(at) is not int or not 0 <= at < frequencies for at in pairs):
            raise SpecError("headwise.rope_channels", pairs, f"must list some of the {frequencies} frequencies")
    return listed


def _hosted_layer(spec: AttentionSpec, config: Any, index: int, channels: list[int]) -> nn.Module:
    if isinstance(spec, LatentSpec):
        return HostedLatentAttention(spec, config, index, channels)
    if isinstance(spec, GroupedSpec) and spec.qk_norm is None:
        return HostedGroupedAttention(spec, config, index, channels)
    raise SpecError("headwise.attention", spec.kind, f"cannot be hosted in {config.model_type}")


def replace_attention(base: nn.Module, path: str, layer: nn.Module) -> None:
    """Replace the family's attention module by a layer, which becomes an instance of the module's class too.

    transformers finds the modules whose attention weights it returns (``output_attentions``) by their class.
    """
    layer_class: Any = type(layer)
    stock_class: Any = type(base.get_submodule(path))
    layer.__class__ = _combined_class(layer_class, stock_class)
    base.set_submodule(path, layer)


@cache
def _combined_class(layer_class: Any, stock_class: Any) -> type[Any]:
    name = f"{layer_class.__name__}As{stock_class.__name__}"
    combined = type(name, (layer_class, stock_class), {"__module__": __name__, "__doc__": layer_class.__doc__})
    globals()[name] = combined
    return combined


def register() -> None:
    """Register the config and model classes of every family's converted folders with transformers' Auto classes.

    For example ``register()``; ``import headwise.hf`` calls it.
    """
    for name in family_names():
        config_class, models = hosted_classes(name)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for auto, model in models.items():
            getattr(transformers, auto).register(config_class, model, exist_ok=True)
        stock = CONFIG_MAPPING[name]
        if stock in TOKENIZER_MAPPING:  # needed by folders whose tokenizer_config.json names no class
            AutoTokenizer.register(config_class, TOKENIZER_MAPPING[stock], exist_ok=True)
