"""Model classes for converted folders: the family's own transformers model, with our attention in it."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from headwise.checkpoints import family_names, family_of
from headwise.errors import SpecError
from headwise.hf.attention import HostedLatentAttention
from headwise.specs import HOSTED_PREFIX, LatentSpec, read_config


@cache
def hosted_classes(model_type: str) -> tuple[type[Any], type[Any], type[Any]]:
    """The config, the bare model and the language model of a family's converted folders.

    ``headwise_llama`` is transformers' llama in everything but its attention modules.
    """
    config_base = CONFIG_MAPPING[model_type]
    bare_base, causal_base = MODEL_MAPPING[config_base], MODEL_FOR_CAUSAL_LM_MAPPING[config_base]
    config_class = _subclass(
        config_base,
        {
            "__annotations__": {"headwise": dict[str, Any] | None},
            "model_type": HOSTED_PREFIX + model_type,
            "headwise": None,
            "base_model_tp_plan": None,  # the family's would split projections that are no longer there
        },
    )

    def init_bare(self: Any, config: Any) -> None:
        bare_base.__init__(self, config)
        install_attention(self, config)
        self.post_init()  # again: it initialises weights and gathers names from the modules there are

    def init_causal(self: Any, config: Any) -> None:
        causal_base.__init__(self, config)
        setattr(self, self.base_model_prefix, bare_class(config))
        self.post_init()

    records = {**(bare_base._can_record_outputs or {}), "attentions": HostedLatentAttention}
    own = {
        "config_class": config_class,
        "_can_record_outputs": records,
        # Our attention takes masks as tensors; these two implementations hand over something else.
        "_supports_flash_attn": False,
        "_supports_flex_attn": False,
    }
    bare_class = _subclass(bare_base, {**own, "__init__": init_bare})
    causal_class = _subclass(causal_base, {**own, "__init__": init_causal})
    return config_class, bare_class, causal_class


def _subclass(base: type[Any], attributes: dict[str, Any]) -> type[Any]:
    doc = f"{base.__name__}, with headwise's attention."
    made = type(f"Headwise{base.__name__}", (base,), {"__module__": __name__, "__doc__": doc, **attributes})
    globals()[made.__name__] = made  # where pickle, and so a spawned worker, looks for it
    return made


def install_attention(model: nn.Module, config: Any) -> None:
    """Put the attention that a converted config describes in the place of a bare model's own.

    Raises:
        SpecError: the config does not describe every layer.
    """
    values = config.to_dict()
    spec, family = read_config(values), family_of(values["model_type"])
    channels = config.headwise.get("rope_channels")
    if not isinstance(channels, list) or len(channels) != spec.num_layers:
        raise SpecError("headwise.rope_channels", channels, f"must list the frequencies of {spec.num_layers} layers")
    for index, layer in enumerate(spec.layers):
        if not isinstance(layer, LatentSpec):
            raise SpecError("headwise.attention", layer.kind, f"cannot be hosted in {values['model_type']}")
        # The family names modules from the language model; a bare model is that model's `model`.
        name = family.attention.format(layer=index).removeprefix(f"{model.base_model_prefix}.")
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, HostedLatentAttention(layer, config, index, channels[index]))


def register() -> None:
    """Make transformers' Auto classes know converted folders of every family."""
    for name in family_names():
        config_class, bare_class, causal_class = hosted_classes(name)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, bare_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, causal_class, exist_ok=True)
