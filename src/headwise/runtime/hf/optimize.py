"""`optimize`: replace a loaded model's attention, cache and linear layers by headwise's, and keep its parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import HOSTED_PREFIX
from headwise.runtime.caches.cache import NAME, HeadwiseCache
from headwise.runtime.hf.deepseek import FAMILIES, take_over_attention
from headwise.runtime.hf.linear import take_over_linears


def optimize(model: Any) -> Any:
    """Make a loaded transformers model use headwise's attention, cache and linear layers, in place.

    For example ``model = headwise.optimize(AutoModelForCausalLM.from_pretrained("./model"))``.

    - Attention is `headwise.runtime.kernels.attend`, as with ``attn_implementation="headwise"``. DeepSeek's
    attention modules
      are replaced too, because the stock ones decode keys and values from all cached latents at every step.
    - ``generate`` caches in a `HeadwiseCache`, unless a cache or its kind is passed to it.
    - Linear layers read their weights at the speed of memory when there are few tokens (on a CPU, without gradients).

    Outputs are the same up to rounding. Parameters, their names and hooks stay the same objects, and saving the model
    gives a stock folder. A second call changes nothing.

    Args:
        model: any transformers model whose attention can be set, with or without a head, converted or not.

    Returns:
        The model itself.

    Raises:
        ArgumentError: it is no transformers model, or one of its modules cannot be replaced; the model is unchanged.
        SpecError: its attention cannot be set, or needs a feature that `attend` does not have.
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
        instance: Any = model
        instance._prepare_cache_for_generation = partial(_prepare_cache, model)
    return model


def _check(model: Any, family: str) -> None:
    """Refuse a model that would not call headwise's attention, or needs a feature that it does not have.

    Raises:
        SpecError: it is such a model.
    """
    if not model._can_set_attn_implementation():
        raise SpecError("model_type", family, "cannot be optimised: transformers cannot set its attention")
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    unsupported = {
        "caps its scores": any(getattr(config, "attn_logit_softcapping", None) is not None for config in configs),
        "adds a learned bias to its scores": any(
            hasattr(config, "relative_attention_num_buckets") for config in configs
        ),
        "has attention sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise SpecError("model_type", family, f"cannot be optimised: it {feature}")


def _prepare_cache(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    """Call transformers' method, and if that made a `DynamicCache`, replace it by a `HeadwiseCache`."""
    passed = model_kwargs.get("past_key_values")
    result = type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )
    prepared = model_kwargs.get("past_key_values")
    if prepared is None or prepared is passed:
        return result
    decoder_cache = prepared.self_attention_cache if isinstance(prepared, EncoderDecoderCache) else prepared
    if type(decoder_cache) is not DynamicCache or decoder_cache.offloading:
        return result
    cache = HeadwiseCache(model)
    cache.expect(max_cache_length)
    if generation_config.is_assistant:
        cache.activate_past_recording()
    if decoder_cache is prepared:
        model_kwargs["past_key_values"] = cache
    else:
        prepared.self_attention_cache = cache
    return result
