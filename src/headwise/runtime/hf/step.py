"""Layers of a decoder by one kernel for a few new tokens, where their Python would take longer than their products.

Layers of Llama's form are recognised by their classes. A layer goes transformers' way wherever somebody could see the
difference: with hooks, adapters, quantised or replaced modules, gradients, or returned weights.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from ctypes import addressof
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN

from headwise.models.specs import GroupedSpec
from headwise.runtime.attention.rope import RotaryEmbedding, Rotation
from headwise.runtime.caches.cache import NAME, HeadwiseCache
from headwise.runtime.caches.layers import GrowingLayer
from headwise.runtime.hf.attention import CodedAttention, HostedAttention
from headwise.runtime.hf.interface import TRAINED_FORMAT
from headwise.runtime.hf.linears import FewTokensLinear
from headwise.runtime.kernels.mask import mask_strides
from headwise.runtime.kernels.native import are_plain, why_not
from headwise.runtime.kernels.native.abi import (
    KERNELS,
    MOST_ROWS,
    CodedArguments,
    CoderArguments,
    HeadsArguments,
    NormArguments,
    ProjectionArguments,
    StepArguments,
)
from headwise.runtime.kernels.native.build import run
from headwise.runtime.kernels.native.calls import Coder, TrellisLayout
from headwise.runtime.quantization.transform_code import SINKS
from headwise.runtime.quantization.trellis_format import TrellisFormat

FORMS = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Names before ``DecoderLayer`` in transformers of the layers that have Llama's form."""

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
        position_embeddings: Rotation | None = None,
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
        stock: Any = type(module)
        if _form_of(stock) is not None and "forward" not in vars(module):
            module.__class__ = stepping(stock)


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


class _PreparedCodes(NamedTuple):
    """The arguments of a layer's codes, for as long as they are read by one layout."""

    layout: TrellisLayout
    code: Coder
    coder: CoderArguments
    attention: HeadsArguments | CodedArguments


# Not in the layers, because arguments can be neither copied nor pickled.
_PREPARED: WeakKeyDictionary[Any, _Prepared] = WeakKeyDictionary()
_PREPARED_CODES: WeakKeyDictionary[Any, _PreparedCodes] = WeakKeyDictionary()


def _step(layer: Any, states: Tensor, mask: Tensor | None, past: Any, position_embeddings: Rotation) -> Tensor | None:
    """A layer's output by the kernel; None where it does not apply."""
    B, S, _ = states.shape
    if not 0 < B * S <= MOST_ROWS or torch.is_grad_enabled() or layer.training or _has_any_global_hook():
        return None
    attention = layer._modules["self_attn"]
    cached = past.layers[attention.layer_idx] if type(past) is HeadwiseCache else None
    if type(cached) is not GrowingLayer or why_not(states.dtype, states.device) is not None:
        return None
    T = cached.get_seq_length() + S
    prepared = _prepared(layer, states.dtype)
    if prepared is None or not are_plain(states, mask) or not states.is_contiguous():
        return None
    if states.shape[2] != prepared.hidden:
        return None
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1:] != (1, S, T) or len(mask) not in (1, B)):
        return None
    arguments = StepArguments.from_buffer_copy(prepared)  # another thread may be in this layer
    if isinstance(attention, CodedAttention):
        rotation = _rotation_of_own(attention, cached, position_embeddings, states, T)
    else:
        rotation = _rotation_by_positions(attention, cached, position_embeddings, mask, T)
    if rotation is None or not _set_rotation(arguments, rotation, states):
        return None
    arguments.B, arguments.S, arguments.T = B, S, T
    arguments.causal = mask is None
    if mask is not None:
        arguments.mask, arguments.mask_stride = mask.data_ptr(), mask_strides(mask)
    if cached.codec is not None:
        held = _append_codes(arguments, attention, cached, states)
    else:
        widths = (arguments.R + arguments.P, 0) if arguments.R else (arguments.D, arguments.V)
        held = cached.lengthen(*(states.new_empty(B, arguments.K, S, width) for width in widths))
        arguments.key, arguments.key_stride = held[0].data_ptr(), held[0].stride()[:3]
        arguments.value, arguments.value_stride = held[1].data_ptr(), held[1].stride()[:3]
    out = torch.empty_like(states)
    arguments.x, arguments.y = states.data_ptr(), out.data_ptr()
    run("headwise_step", arguments, states.dtype)
    return out


def _rotation_by_positions(
    attention: Any, cached: GrowingLayer, tables: Rotation, mask: Tensor | None, T: int
) -> Rotation | None:
    """cos and sin of the model's positions, ``[B or 1, S, D]``; None where attention is not `attention_forward`."""
    is_headwise = attention.config._attn_implementation == NAME and attention.is_causal
    if not is_headwise or cached.codec is not None or hasattr(attention, TRAINED_FORMAT):
        return None
    S = tables[0].shape[1]
    return tables if mask is not None or S in (1, T) else None  # else without a mask the first tokens are meant


def _rotation_of_own(
    attention: Any, cached: GrowingLayer, tables: Rotation, states: Tensor, T: int
) -> Rotation | None:
    """cos and sin ``[B or 1, S, P/2]`` of a layer of headwise's: by positions, or where values have a code by slots.

    None where weights are returned, or the layer's code is not the cache's.
    """
    rotation: Rotation | None
    if attention.config._attn_implementation == "eager" or cached.codec is not attention.codec:
        rotation = None
    elif attention.codec is None:
        rotation = attention.rotation_of(tables)
    else:
        begin = T - states.shape[1]
        rotation = attention.slot_rotation(states, begin, T) if cached.holds_first_tokens() else None
    return rotation


def _set_rotation(arguments: StepArguments, rotation: Rotation, states: Tensor) -> bool:
    """Set the arguments of cos and sin, each ``[B or 1, S, at least P/2]``; False where they do not fit."""
    cos, sin = rotation
    B, S = states.shape[:2]
    if not (
        are_plain(cos, sin)
        and states.dtype == cos.dtype == sin.dtype
        and cos.stride() == sin.stride()
        and cos.shape == sin.shape
        and cos.stride(2) == 1
        and cos.shape[0] in (1, B)
        and cos.shape[1] == S
        and cos.shape[2] in (arguments.P, arguments.P // 2)
    ):
        return False
    arguments.cos, arguments.sin = cos.data_ptr(), sin.data_ptr()
    arguments.angle_stride = (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
    return True


def _append_codes(arguments: StepArguments, attention: Any, cached: GrowingLayer, states: Tensor) -> tuple[Any, ...]:
    """Make room for the codes of new tokens, and set the arguments of codes; what they point to is returned."""
    codec: TrellisFormat = attention.codec
    size = codec.code.token_bytes
    new = torch.empty(len(states), 1, states.shape[1], size, dtype=torch.uint8)
    codes, _ = cached.lengthen(new, new[..., :0])
    channels = attention.channels_of(states)
    rotation = attention.slots.of_keys(codes.shape[2], channels, tuple(attention.channels))
    layout = codec.layout_for(rotation, of_gpu=False)
    assert isinstance(layout, TrellisLayout)
    prepared = _PREPARED_CODES.get(codec)
    if prepared is None or prepared.layout is not layout:
        prepared = _PREPARED_CODES[codec] = _new_codes(arguments, codec.code.coder, layout, size)
    own = type(prepared.attention).from_buffer_copy(prepared.attention)
    first, wide = cached.first, cached.unquantised
    assert first is not None
    assert wide is not None
    first, wide = first.contiguous(), wide.contiguous()
    own.first, own.cos, own.sin = first.data_ptr(), rotation.cos.data_ptr(), rotation.sin.data_ptr()
    own.frequency, own.frequencies = channels.data_ptr(), rotation.cos.shape[-1]
    own.value, own.value_stride = wide.data_ptr(), (wide.stride(0), wide.stride(0), wide.stride(1))
    arguments.key, arguments.key_stride = codes.data_ptr(), codes.stride()[:3]
    arguments.coder = addressof(prepared.coder)
    setattr(arguments, "heads" if layout.heads else "latents", addressof(own))
    return codes, rotation, first, wide, prepared, own


def _new_codes(arguments: StepArguments, coder: Coder, layout: TrellisLayout, size: int) -> _PreparedCodes:
    """The arguments of a code that are the same for all tokens."""
    coding = {name: tensor.data_ptr() for name, tensor in coder.tensors.items()}
    reading = {name: tensor.data_ptr() for name, tensor in layout.tensors.items()}
    D = arguments.D
    if not layout.heads:
        D = arguments.R + arguments.P if arguments.P < D else arguments.P
    own = {"K": 1, "G": arguments.K * arguments.G, "D": D, "V": layout.value_dim}
    own["wide"] = SINKS if layout.first is None else 1
    kernel: Any = KERNELS[layout.kernel]
    return _PreparedCodes(
        layout,
        coder,  # whose addresses are in the arguments, also where another thread has made one more at the same time
        CoderArguments(**coding, **coder.numbers, bytes=size),
        kernel(**reading, **layout.numbers, **own),
    )


def _prepared(layer: Any, dtype: torch.dtype) -> StepArguments | None:
    """The arguments of a layer's parameters; None where its modules are not all as they were made."""
    own = layer._modules
    attention, mlp = own["self_attn"], own["mlp"]
    modules = (*own.values(), *attention._modules.values(), *mlp._modules.values())
    for module in modules:
        state = module.__dict__ if isinstance(module, nn.Module) else {"forward": None}
        if "forward" in state or state["_forward_hooks"] or state["_forward_pre_hooks"]:
            return None
    tensors = [tensor for module in modules for tensor in module._parameters.values() if tensor is not None]
    state = attention.__dict__
    settings = (state.get(name) for name in ("scaling", "codec", "impl"))
    key = (dtype, *settings, *map(type, modules), *((x.data_ptr(), x.numel()) for x in tensors))
    known = _PREPARED.get(layer)
    if known is None or known.key != key:
        fits = all(tensor.dtype == dtype and tensor.is_contiguous() and are_plain(tensor) for tensor in tensors)
        known = _PREPARED[layer] = _Prepared(key, _new_arguments(layer, modules) if fits else None)
    return known.arguments


def _new_arguments(layer: Any, modules: tuple[Any, ...]) -> StepArguments | None:
    """The arguments that are the same in every call; None where a layer computes something else."""
    form = _form_of(type(layer).__mro__[2])
    assert form is not None
    attention, mlp = layer.self_attn, layer.mlp
    kinds = {type(attention), form.mlp, form.norm, _SILU, nn.Linear, FewTokensLinear, RotaryEmbedding}
    is_known = type(attention).forward in (form.attention.forward, HostedAttention.forward)
    if not is_known or type(mlp) is not form.mlp or not {type(module) for module in modules} <= kinds:
        return None
    sizes = _sizes(attention)
    if sizes is None:
        return None
    of_attention = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    if "R" in sizes:
        of_attention = {"q": "q_proj", "k": "kv_a_proj_with_mqa", "o": "o_proj"}
        sizes["decoder"] = attention.kv_b_proj.weight.data_ptr()
    linears = {name: getattr(attention, own) for name, own in of_attention.items()}
    linears |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}
    sizes["inner"], sizes["hidden"] = mlp.gate_proj.weight.shape
    shapes = _shapes(sizes)
    given = {name: linear.weight.shape for name, linear in linears.items()}
    given |= {"decoder": attention.kv_b_proj.weight.shape} if "R" in sizes else {}
    if any(shape != shapes[name] for name, shape in given.items()):
        return None
    for name, linear in linears.items():
        if linear.bias is not None and linear.bias.shape != linear.weight.shape[:1]:
            return None
        bias = None if linear.bias is None else linear.bias.data_ptr()
        sizes[name] = ProjectionArguments(linear.weight.data_ptr(), bias)
    norms = {"norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm}
    norms |= {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None}
    for name, norm in norms.items():
        if norm.weight.shape != shapes[name]:
            return None
        sizes[name] = NormArguments(norm.weight.data_ptr(), norm.variance_epsilon)
    return StepArguments(**sizes)


def _shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that the kernel reads; a layer with others is left to torch, which reports them."""
    K, D, V, P, hidden, inner = (sizes[name] for name in ("K", "D", "V", "P", "hidden", "inner"))
    H, R = K * sizes["G"], sizes.get("R", 0)
    shapes: dict[str, tuple[int, ...]] = {"q": (H * D, hidden), "k": (R + P if R else K * D, hidden)}
    shapes |= {"v": (K * V, hidden), "o": (hidden, H * V), "decoder": (H * (D - P + V), R)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return shapes | {"norm": (hidden,), "mlp_norm": (hidden,), "q_norm": (D,), "k_norm": (D,)}


_SILU = type(ACT2FN["silu"])


def _sizes(attention: Any) -> dict[str, Any] | None:
    """The sizes of a layer's attention, and the factor of its scores; None where the kernel cannot compute it."""
    if not isinstance(attention, CodedAttention):
        D = attention.head_dim
        K, H = (attention._modules[name].weight.shape[0] // D for name in ("k_proj", "q_proj"))
        return {"K": K, "G": H // K, "D": D, "V": D, "P": D, "scale": attention.scaling}
    coded: Any = attention
    spec, rope = coded.spec, coded.rope
    if attention.window is not None or rope is None or (attention.codec is not None and attention.slots is None):
        return None
    if rope.spec.interleaved or attention.backend not in ("auto", "fused") or not spec.is_causal:
        return None
    H, P = spec.num_heads, rope.spec.dim
    if isinstance(spec, GroupedSpec):
        is_plain = spec.head_dim == P and spec.qk_norm in (None, "head") and coded.o_proj is not None
        if attention.codec is None or not is_plain:
            return None
        sizes = {"K": spec.num_kv_heads, "G": H // spec.num_kv_heads, "D": P, "V": spec.value_dim}
    else:
        is_plain = coded.q_proj is not None and spec.qk_norm is None and coded.kv_a_layernorm is None
        if not is_plain or coded.kv_b_proj.bias is not None or coded.impl == "expanded":
            return None
        sizes = {"K": 1, "G": H, "D": spec.qk_head_dim, "V": spec.v_head_dim, "R": spec.kv_lora_rank}
    scale = sizes["D"] ** -0.5 if spec.softmax_scale is None else spec.softmax_scale
    return {**sizes, "P": P, "scale": scale}
