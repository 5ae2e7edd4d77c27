"""Layers of a decoder by one kernel for a few new tokens, where their Python would take longer than their products.

Layers of Llama's form are recognised by their classes. A layer goes transformers' way wherever somebody could see the
difference: with hooks, adapters, quantised or replaced modules, gradients, or returned weights.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN

from headwise.runtime.caches.cache import NAME, HeadwiseCache
from headwise.runtime.caches.layers import GrowingLayer
from headwise.runtime.hf.interface import TRAINED_FORMAT
from headwise.runtime.hf.linears import FewTokensLinear
from headwise.runtime.kernels.mask import mask_strides
from headwise.runtime.kernels.native import are_plain, why_not
from headwise.runtime.kernels.native.abi import MOST_ROWS, NormArguments, ProjectionArguments, StepArguments
from headwise.runtime.kernels.native.build import run

FORMS = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Names before ``DecoderLayer`` in transformers of the layers that have Llama's form."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HARMLESS = {"cache_position", "return_dict", "output_hidden_states"}
"""Arguments of a layer that do not change what it computes."""


class SteppingLayer(nn.Module):
    """A decoder layer of transformers after `take_over_layers`, which sets the class of existing modules."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **more: Any,
    ) -> Tensor:
        """Map ``[B, S, E]`` to ``[B, S, E]``; arguments as for transformers' layers."""
        if position_embeddings is not None and not any(more[name] for name in more.keys() - _HARMLESS):
            out = _step(self, hidden_states, attention_mask, past_key_values, position_embeddings)
            if out is not None:
                return out
        stock: Tensor = super().forward(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **more,
        )
        return stock


def take_over_layers(model: nn.Module) -> None:
    """Change the class of every decoder layer of Llama's form; parameters and names are the same objects.

    Args:
        model: the model, which is changed in place.
    """
    for module in model.modules():
        if _form_of(type(module)) is not None and "forward" not in vars(module):
            module.__class__ = stepping(type(module))


@cache
def stepping(stock: Any) -> type[Any]:
    """A decoder layer's class that is also the stock class, by which transformers finds decoder layers."""
    return type(f"Optimized{stock.__name__}", (SteppingLayer, stock), {"__module__": OPTIMIZE})


OPTIMIZE = "headwise.runtime.hf.optimize"
"""The module in which pickle finds changed classes."""


class _Form(NamedTuple):
    """transformers' classes of a layer's modules."""

    attention: type[Any]
    mlp: type[Any]
    norm: type[Any]


@cache
def _form_of(kind: type[Any]) -> _Form | None:
    """The classes of the modules of a decoder layer's class; None where it does not have Llama's form."""
    name = kind.__name__.removesuffix("DecoderLayer")
    module = f"transformers.models.{name.lower()}.modeling_{name.lower()}"
    if name not in FORMS or kind.__module__ != module:
        return None
    return _Form(*(getattr(sys.modules[module], f"{name}{part}") for part in ("Attention", "MLP", "RMSNorm")))


class _Prepared(NamedTuple):
    """The arguments of a layer's parameters, which hold for as long as these are where they were."""

    key: tuple[Any, ...]
    arguments: StepArguments | None


_PREPARED: WeakKeyDictionary[nn.Module, _Prepared] = WeakKeyDictionary()
"""Of each layer; not in the layers, because arguments can be neither copied nor pickled."""


def _step(
    layer: Any, states: Tensor, mask: Tensor | None, past: Any, position_embeddings: tuple[Tensor, Tensor]
) -> Tensor | None:
    """A layer's output by the kernel; None where it does not apply."""
    B, S, _ = states.shape
    if not 0 < B * S <= MOST_ROWS or torch.is_grad_enabled() or layer.training or _has_any_global_hook():
        return None
    cache = _cache_layer(past, layer._modules["self_attn"], mask, S)
    if cache is None or why_not(states.dtype, states.device) is not None:
        return None
    prepared = _prepared(layer, states.dtype)
    cos, sin = position_embeddings
    if (
        prepared is None
        or not are_plain(states, cos, sin, mask)
        or not (states.is_contiguous() and cos.is_contiguous() and sin.is_contiguous())
        or not states.dtype == cos.dtype == sin.dtype
        or cos.shape != sin.shape
        or cos.shape[1:] != (S, prepared.D)
    ):
        return None
    arguments = StepArguments.from_buffer_copy(prepared)  # another thread may be in this layer
    keys, values = cache.lengthen(states.new_empty(B, arguments.K, S, arguments.D))
    out, T = torch.empty_like(states), keys.shape[2]
    arguments.B, arguments.S, arguments.T = B, S, T
    arguments.x, arguments.y = states.data_ptr(), out.data_ptr()
    arguments.cos, arguments.sin = cos.data_ptr(), sin.data_ptr()
    arguments.position_stride = S * arguments.D if cos.shape[0] > 1 else 0
    for name, cached in (("key", keys), ("value", values)):
        address, stride = cached.data_ptr(), cached.stride()[:3]
        setattr(arguments, name, address)
        setattr(arguments, f"{name}_stride", stride)
        setattr(arguments, f"new_{name}", address + (T - S) * stride[2] * cached.element_size())
        setattr(arguments, f"new_{name}_stride", stride)
    arguments.causal = mask is None
    if mask is not None:
        arguments.mask, arguments.mask_stride = mask.data_ptr(), mask_strides(mask)
    run("headwise_step", arguments, states.dtype)
    return out


def _cache_layer(past: Any, attention: Any, mask: Tensor | None, new: int) -> GrowingLayer | None:
    """The layer of a cache that the kernel appends to and reads; None where that is not possible."""
    if type(past) is not HeadwiseCache or attention.config._attn_implementation != NAME:
        return None
    layer = past.layers[attention.layer_idx]
    if type(layer) is not GrowingLayer or layer.codec is not None or hasattr(attention, TRAINED_FORMAT):
        return None
    length = layer.get_seq_length()
    if mask is None:
        return layer if new == 1 or not length else None
    return layer if mask.dtype == torch.bool and mask.shape[1:] == (1, new, length + new) else None


def _prepared(layer: Any, dtype: torch.dtype) -> StepArguments | None:
    """The arguments of a layer's parameters; None where its modules are not all as transformers made them."""
    own = layer._modules
    attention, mlp = own["self_attn"], own["mlp"]
    modules = (*own.values(), *attention._modules.values(), *mlp._modules.values())
    for module in modules:
        state = module.__dict__
        if "forward" in state or any(state[name] for name in _HOOKS):
            return None
    tensors = [tensor for module in modules for tensor in module._parameters.values() if tensor is not None]
    key = (dtype, *map(type, modules), *(tensor.data_ptr() for tensor in tensors))
    known = _PREPARED.get(layer)
    if known is None or known.key != key:
        fits = _fits(layer, modules) and all(
            tensor.dtype == dtype and tensor.is_contiguous() and are_plain(tensor) for tensor in tensors
        )
        known = _PREPARED[layer] = _Prepared(key, _new_arguments(layer) if fits else None)
    return known.arguments


def _fits(layer: Any, modules: tuple[Any, ...]) -> bool:
    """Whether a layer has the modules of its form."""
    form = _form_of(type(layer).__mro__[2])
    assert form is not None
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    norms = [module for module in modules if type(module) is form.norm]
    return (
        type(layer.self_attn) is form.attention
        and type(layer.mlp) is form.mlp
        and isinstance(layer.mlp.act_fn, _SILU)
        and all(type(linear) in (nn.Linear, FewTokensLinear) for linear in linears)
        and len(linears) + len(norms) + 3 == len(modules)
    )


_SILU = type(ACT2FN["silu"])


def _new_arguments(layer: Any) -> StepArguments:
    """The arguments that are the same in every call."""
    attention, mlp = layer.self_attn, layer.mlp
    D = attention.head_dim
    norms = {"norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm}
    norms |= {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    linears = {name: getattr(attention, f"{name}_proj") for name in ("q", "k", "v", "o")}
    linears |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}
    inner, hidden = mlp.gate_proj.weight.shape
    K = attention.k_proj.weight.shape[0] // D
    own: dict[str, Any] = {
        name: NormArguments(norm.weight.data_ptr(), norm.variance_epsilon) for name, norm in norms.items()
    }
    for name, linear in linears.items():
        bias = None if linear.bias is None else linear.bias.data_ptr()
        own[name] = ProjectionArguments(linear.weight.data_ptr(), bias)
    own |= {"K": K, "G": attention.q_proj.weight.shape[0] // D // K, "D": D, "V": D, "scale": attention.scaling}
    own |= {"hidden": hidden, "inner": inner} | dict.fromkeys(("projects", "attends", "finishes"), 1)
    return StepArguments(**own)
