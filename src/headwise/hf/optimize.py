"""`optimize`: a loaded model goes on with headwise's attention, cache and products, and the parameters it has."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from headwise.errors import ArgumentError, SpecError
from headwise.hf.cache import HeadwiseCache
from headwise.hf.deepseek import FAMILIES, take_over_attention
from headwise.hf.interface import NAME
from headwise.hf.linear import take_over_linears
from headwise.specs import HOSTED_PREFIX


def optimize(model: Any) -> Any:
    """Let a loaded transformers model run as headwise does; nothing is copied, and the model itself is returned.

    - Attention is `headwise.kernels.attend`, as with ``attn_implementation="headwise"``. DeepSeek's modules, which
      decode keys and values from the cached latents before they ask for that, are made headwise's own.
    - ``generate`` keeps what it remembers in a `HeadwiseCache`, unless it is given another or told which.
    - Linear layers read their weights at the speed of memory where tokens are few (on a CPU, without gradients).

    Outputs are the same to rounding; parameters, their names and hooks are the same objects, and what is saved is a
    stock folder. A second time changes nothing.

    Args:
        model: any transformers model whose attention can be set, with or without a head; converted ones too.

    Raises:
        ArgumentError: it is no transformers model, or a module of it cannot be taken over. Nothing is changed then.
        SpecError: its attention cannot be set, or wants something that `attend` does not know.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("model", type(model).__name__, "must be a loaded transformers model")
    family = str(model.config.model_type)
    if family in FAMILIES:
        take_over_attention(model)
    elif not family.startswith(HOSTED_PREFIX):
        _check(model, family)
        model.set_attn_implementation(NAME)
    take_over_linears(model)
    if model.can_generate():
        own: Any = model
        own._prepare_cache_for_generation = partial(_prepare_cache, model)
    return model


def _check(model: Any, family: str) -> None:
    """Refuse a model whose attention would not ask ours, or ask what ours does not know."""
    if not model._can_set_attn_implementation():
        raise SpecError("model_type", family, "cannot be optimised: transformers cannot set its attention")
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    wants = {
        "caps its scores": any(getattr(config, "attn_logit_softcapping", None) is not None for config in configs),
        "adds a learned bias to its scores": any(
            hasattr(config, "relative_attention_num_buckets") for config in configs
        ),
        "has attention sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
    }
    for what, is_wanted in wants.items():
        if is_wanted:
            raise SpecError("model_type", family, f"cannot be optimised: it {what}")


def _prepare_cache(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    """transformers' own method, and a `HeadwiseCache` where it has made a `DynamicCache`."""
    given = model_kwargs.get("past_key_values")
    told = type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )
    made = model_kwargs.get("past_key_values")
    if made is None or made is given:
        return told
    inner = made.self_attention_cache if isinstance(made, EncoderDecoderCache) else made
    if type(inner) is not DynamicCache or inner.offloading:
        return told
    cache = HeadwiseCache(model)
    cache.expect(max_cache_length)
    if generation_config.is_assistant:
        cache.activate_past_recording()
    if inner is made:
        model_kwargs["past_key_values"] = cache
    else:
        made.self_attention_cache = cache
    return told
