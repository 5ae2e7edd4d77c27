"""Model classes for converted folders: the family's own transformers model, with our attention in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from headwise.checkpoints import family_names, family_of
from headwise.errors import SpecError
from headwise.hf.attention import HostedGroupedAttention, HostedLatentAttention
from headwise.specs import HOSTED_PREFIX, AttentionSpec, GroupedSpec, LatentSpec, read_config


@cache
def hosted_classes(model_type: str) -> tuple[type[Any], dict[str, type[Any]]]:
    """The config of a family's converted folders, and the model for each of its Auto classes.

    ``headwise_llama`` is transformers' llama in everything but its attention modules.
    """
    family, config_base = family_of(model_type), CONFIG_MAPPING[model_type]
    config_class = _subclass(
        config_base,
        {
            "__annotations__": {"headwise": dict[str, Any] | None},
            "model_type": HOSTED_PREFIX + model_type,
            "headwise": None,
            "base_model_tp_plan": None,  # the family's would split projections that are no longer there
        },
    )

    def hosted(base: type[Any]) -> type[Any]:
        def init(self: Any, config: Any) -> None:
            base.__init__(self, config)
            install_attention(self, config)
            self.post_init()  # again: it initialises weights and gathers names from the modules there are

        def prepare_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
            # transformers knows a Whisper, whose prompt is left as it is given, by its model_type alone.
            self.config.model_type = model_type
            try:
                return base._prepare_decoder_input_ids_for_generation(self, *args, **kwargs)
            finally:
                del self.config.model_type

        own = {
            "__init__": init,
            "config_class": config_class,
            # Our attention takes masks as tensors; these two implementations hand over something else.
            "_supports_flash_attn": False,
            "_supports_flex_attn": False,
        }
        if family.cross_attention:
            own["_prepare_decoder_input_ids_for_generation"] = prepare_prompt
        return _subclass(base, own)

    autos = dict.fromkeys(("AutoModel", *family.autos))
    return config_class, {auto: hosted(getattr(transformers, auto)._model_mapping[config_base]) for auto in autos}


def _subclass(base: type[Any], attributes: dict[str, Any]) -> type[Any]:
    doc = f"{base.__name__}, with headwise's attention."
    made = type(f"Headwise{base.__name__}", (base,), {"__module__": __name__, "__doc__": doc, **attributes})
    globals()[made.__name__] = made  # where pickle, and so a spawned worker, looks for it
    return made


def install_attention(model: Any, config: Any) -> None:
    """Put the attention that a converted config describes in the place of a model's own.

    Raises:
        SpecError: the config does not describe every layer.
    """
    values = config.to_dict()
    spec, family = read_config(values), family_of(values["model_type"])
    # The family names modules from the language model; a bare model is what stands below their first name.
    bare, base = family.bare(), model.base_model
    frequencies = [buffer.numel() for name, buffer in base.named_buffers() if name.endswith("inv_freq")]
    channels = _channels(config, spec.layers, min(frequencies, default=0))
    for index, (layer, pairs) in enumerate(zip(spec.layers, channels, strict=True)):
        path = bare.place(index, hosted=True)
        _replace(base, path, _hosted_layer(layer, config, index, pairs))
        for name in family.emptied:
            base.set_submodule(f"{bare.place(index)}.{name}", nn.Identity())
    for index, layer in enumerate(spec.cross_layers):
        _replace(base, bare.place(index, cross=True), _hosted_layer(layer, config, index, []))


def _channels(config: Any, layers: tuple[AttentionSpec, ...], frequencies: int) -> list[list[int]]:
    """Which of the model's frequencies each layer's rotary pairs turn at: those it kept, or all in their order.

    Raises:
        SpecError: the config does not list them for every layer, or lists what is not there.
    """
    given = config.headwise.get("rope_channels")
    if given is None and not any(isinstance(layer, LatentSpec) for layer in layers):
        return [list(range(layer.rope.dim // 2)) if layer.rope else [] for layer in layers]
    if not isinstance(given, list) or len(given) != len(layers):
        raise SpecError("headwise.rope_channels", given, f"must list the frequencies of {len(layers)} layers")
    for kept in given:
        if not isinstance(kept, list) or any(type(at) is not int or not 0 <= at < frequencies for at in kept):
            raise SpecError("headwise.rope_channels", kept, f"must list some of the {frequencies} frequencies")
    return given


def _hosted_layer(spec: AttentionSpec, config: Any, index: int, channels: list[int]) -> nn.Module:
    if isinstance(spec, LatentSpec):
        return HostedLatentAttention(spec, config, index, channels)
    if isinstance(spec, GroupedSpec) and spec.qk_norm is None:
        return HostedGroupedAttention(spec, config, index, channels)
    raise SpecError("headwise.attention", spec.kind, f"cannot be hosted in {config.model_type}")


def _replace(base: nn.Module, path: str, layer: nn.Module) -> None:
    """Put a layer where the family's attention is; it stays an instance of that class.

    transformers finds the modules whose weights it gathers (``output_attentions``) by their class.
    """
    ours: Any = type(layer)
    theirs: Any = type(base.get_submodule(path))
    layer.__class__ = _both(ours, theirs)
    base.set_submodule(path, layer)


@cache
def _both(ours: Any, theirs: Any) -> type[Any]:
    name = f"{ours.__name__}As{theirs.__name__}"
    made = type(name, (ours, theirs), {"__module__": __name__, "__doc__": ours.__doc__})
    globals()[name] = made
    return made


def register() -> None:
    """Make transformers' Auto classes know converted folders of every family."""
    for name in family_names():
        config_class, models = hosted_classes(name)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for auto, model in models.items():
            getattr(transformers, auto).register(config_class, model, exist_ok=True)
        stock = CONFIG_MAPPING[name]
        if stock in TOKENIZER_MAPPING:  # for folders whose tokenizer_config.json names no class
            AutoTokenizer.register(config_class, TOKENIZER_MAPPING[stock], exist_ok=True)
