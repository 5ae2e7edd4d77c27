"""`optimize`: put headwise's attention, cache and linear layers into a loaded model, and keep its parameters.

Linear layers compute the same as torch's, faster. DeepSeek's attention modules are replaced too, because their stock
forward decodes every cached latent before it attends; other families' attention is set by name. A module's class is
changed in place, so that parameters, names, hooks and devices stay, and saving gives a stock folder.
"""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import HOSTED_PREFIX, LatentSpec, RopeSpec
from headwise.runtime.attention.rope import RotaryEmbedding, Rotation
from headwise.runtime.caches.cache import NAME, HeadwiseCache
from headwise.runtime.hf.attention import HostedLatentAttention
from headwise.runtime.hf.linears import FewTokensLinear, take_over_linears
from headwise.runtime.hf.step import FORMS, stepping, take_over_layers

FAMILIES = {"deepseek_v2": "DeepseekV2Attention", "deepseek_v3": "DeepseekV3Attention"}
"""transformers' attention class of each family."""

_PROJECTIONS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def take_over_attention(model: Any) -> None:
    """Make the attention modules of a ``deepseek_v2`` or ``deepseek_v3`` model attend to the cached latents directly.

    Outputs are the same up to rounding. Parameters, their names and hooks stay the same objects.

    Args:
        model: a loaded transformers model of one of these families.

    Raises:
        SpecError: the model has no attention modules of the family's transformers class.
        ArgumentError: a module cannot be changed: its weights are not plain, its forward was replaced, or its masks
            are made for flash or flex attention. No module has been changed then.
    """
    if (implementation := model.config._attn_implementation) not in ("sdpa", "eager", "headwise"):
        rule = "does not pass masks as tensors; load the model with sdpa or eager"
        raise ArgumentError("attn_implementation", implementation, rule)
    stock = FAMILIES[model.config.model_type]
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == stock or isinstance(module, OptimizedLatentAttention)
    }
    if not modules:
        raise SpecError("model", type(model).__name__, f"has no {stock}")
    changed = {name: m for name, m in modules.items() if not isinstance(m, OptimizedLatentAttention)}
    for name, module in changed.items():  # checks all of them before the first is changed
        _check_deepseek(name, module)
    for module in changed.values():
        _take_over(module)


class OptimizedLatentAttention(HostedLatentAttention):
    """DeepSeek's attention module after `take_over_attention`, which sets the class of existing modules."""

    def _rotation(self, tables: Any, states: Tensor, past: Any) -> Rotation:
        if isinstance(tables, Tensor):  # V2: cos + i·sin
            return tables.real, tables.imag
        cos, sin = tables  # V3: every angle is stored twice, in the first half and in the second
        half = self.spec.qk_rope_head_dim // 2
        return cos[..., :half], sin[..., :half]


def _check_deepseek(name: str, module: Any) -> None:
    """Refuse a module for which headwise's forward would give other results.

    Raises:
        ArgumentError: the module's forward was replaced, or ``kv_b_proj`` is no plain linear layer.
    """
    if "forward" in vars(module):  # such as accelerate's hooks, which call the forward that they replaced
        raise ArgumentError(name, type(module).__name__, "has a forward of its own, which optimize would not replace")
    # headwise calls the other projections, but multiplies with this one's weight itself. In a quantised layer, or one
    # with an adapter, the weight is not the whole projection.
    decoder = module.kv_b_proj
    rows = module.num_heads * (module.qk_nope_head_dim + module.v_head_dim)
    if type(decoder) not in (nn.Linear, FewTokensLinear) or tuple(decoder.weight.shape) != (
        rows,
        module.kv_lora_rank,
    ):
        raise ArgumentError(f"{name}.kv_b_proj", type(decoder).__name__, "must be a whole, plain linear layer")


def _take_over(module: Any) -> None:
    """Change a module's class, as torch's parametrizations do, so that its hooks and parameters stay."""
    config = module.config
    sizes = ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    module.spec = LatentSpec(
        **{name: getattr(module, name) for name in (*sizes, "q_lora_rank")},
        bias=tuple(name for name in _PROJECTIONS if getattr(getattr(module, name), "bias", None) is not None),
        softmax_scale=module.scaling,
    )
    for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"):
        if getattr(module, name, None) is None:
            setattr(module, name, None)
    # cos and sin come from the model; V2 always rotates neighbouring channels.
    module.rope = RotaryEmbedding(
        RopeSpec(dim=module.qk_rope_head_dim, interleaved=bool(getattr(config, "rope_interleave", True)))
    )
    module.dropout = float(module.attention_dropout or 0.0)
    module.backend, module.impl = "auto", "auto"
    module.window, module.output_dropout = None, 0.0
    stock: Any = type(module)
    module.__class__ = _optimized(stock)


@cache
def _optimized(stock: Any) -> type[Any]:
    """A class of headwise's attention that is also the stock class, by which transformers finds attention modules."""
    return type(f"Optimized{stock.__name__}", (OptimizedLatentAttention, stock), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """Look up a class of `_optimized` by its name, as pickle does, and with it a spawned worker."""
    for family, stock in FAMILIES.items():
        if name == f"Optimized{stock}":
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            return _optimized(getattr(modeling, stock))
    for form in FORMS:
        if name == f"Optimized{form}DecoderLayer":
            modeling = importlib.import_module(f"transformers.models.{form.lower()}.modeling_{form.lower()}")
            return stepping(getattr(modeling, f"{form}DecoderLayer"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def optimize(model: Any) -> Any:
    """Make a loaded transformers model use headwise's attention, cache and linear layers, in place.

    For example ``model = headwise.optimize(AutoModelForCausalLM.from_pretrained("./model"))``.

    - Attention is `headwise.runtime.kernels.attend`, as with ``attn_implementation="headwise"``. DeepSeek's
    attention modules
      are replaced too, because the stock ones decode keys and values from all cached latents at every step.
    - ``generate`` caches in a `HeadwiseCache`, unless a cache or its kind is passed to it.
    - Linear layers read their weights at the speed of memory when there are few tokens (on a CPU, without gradients).
    - So do whole decoder layers of Llama's form, each in one call of a kernel; see `headwise.runtime.hf.step`.

    Outputs are the same up to rounding. Parameters, their names and hooks stay the same objects, and saving the model
    gives a stock folder. A second call changes nothing.

    Args:
        model: any transformers model whose attention can be set, with or without a head, converted or not.

    Returns:
        The model itself.

    Raises:
        ArgumentError: the argument is no transformers model, or a module cannot be replaced; the model is unchanged.
        SpecError: the model's attention cannot be set, or needs a feature that `attend` does not have.
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
    take_over_layers(model)
    if model.can_generate():
        instance: Any = model
        instance._prepare_cache_for_generation = partial(_prepare_cache, model)
    return model


def _check(model: Any, family: str) -> None:
    """Refuse a model that would not call headwise's attention, or needs a feature that it does not have.

    Raises:
        SpecError: the model is of that kind.
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
    # A static or an offloaded cache was asked for by name, and stays as it is.
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
