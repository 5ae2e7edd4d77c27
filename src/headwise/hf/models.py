"""Model classes for converted folders: the family's own transformers model, with our attention in it."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headwise.checkpoints import family_names, family_of
from headwise.errors import SpecError
from headwise.hf.attention import HostedLatentAttention
from headwise.specs import HOSTED_PREFIX, LatentSpec, read_config


@cache
def hosted_classes(model_type: str) -> tuple[type[Any], type[Any]]:
    """The config and model class of a family's converted models.

    ``headwise_llama`` is transformers' llama in everything but its attention modules.
    """
    config_base = CONFIG_MAPPING[model_type]
    model_base = MODEL_FOR_CAUSAL_LM_MAPPING[config_base]
    config_class = type(
        f"Headwise{config_base.__name__}",
        (config_base,),
        {
            "__module__": __name__,
            "__annotations__": {"headwise": dict[str, Any] | None},
            "__doc__": f"{config_base.__name__}, and what headwise put in the place of its attention.",
            "model_type": HOSTED_PREFIX + model_type,
            "headwise": None,
        },
    )

    def __init__(self: Any, config: Any) -> None:  # noqa: N807  (it is the class's)
        model_base.__init__(self, config)
        install_attention(self, config)
        # Again, for what it gathers from the modules: initial weights, tied names.
        self.post_init()

    model_class = type(
        f"Headwise{model_base.__name__}",
        (model_base,),
        {
            "__module__": __name__,
            "__doc__": f"{model_base.__name__} with headwise's attention.",
            "__init__": __init__,
            "config_class": config_class,
            "_can_record_outputs": {
                **(model_base._can_record_outputs or {}),
                "attentions": HostedLatentAttention,
            },
        },
    )
    return config_class, model_class


def install_attention(model: nn.Module, config: Any) -> None:
    """Put the attention that a converted config describes in the place of the model's own.

    Raises:
        SpecError: the config does not describe every layer.
    """
    values = config.to_dict()
    spec, family = read_config(values), family_of(spec_type := values["model_type"])
    channels = config.headwise.get("rope_channels")
    if not isinstance(channels, list) or len(channels) != spec.num_layers:
        raise SpecError("headwise.rope_channels", channels, f"must list the frequencies of {spec.num_layers} layers")
    for index, layer in enumerate(spec.layers):
        if not isinstance(layer, LatentSpec):
            raise SpecError("headwise.attention", layer.kind, f"cannot be hosted in {spec_type}")
        path, _, attribute = family.attention.format(layer=index).rpartition(".")
        module = HostedLatentAttention(layer, index, channels[index], float(config.attention_dropout or 0.0))
        setattr(model.get_submodule(path), attribute, module)


def register() -> None:
    """Make transformers' Auto classes know converted folders of every family."""
    for name in family_names():
        config_class, model_class = hosted_classes(name)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
