"""headwise's attention for every transformers model that asks an attention function: ``attn_implementation``.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from headwise.errors import ArgumentError
from headwise.kernels import attend, attend_quantized, attend_with_weights, dequantize, unpack

NAME = "headwise"
"""What ``attn_implementation`` is to be."""

UNKNOWN = ("softcap", "position_bias", "s_aux", "cache")
"""What some models hand their attention beyond a mask and a scale: caps and biases of scores, sinks, paged caches."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """`headwise.kernels.attend`, called as transformers calls its attention functions.

    Args:
        module: the attention module; its ``is_causal`` counts where the argument is None.
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        attention_mask: ``[B, 1 or H, S, T]``, True or 0.0 = attend, with causality in it; None is plain causal.
        dropout: probability of dropping an attention weight.
        scaling: multiplies the scores; ``1/sqrt(D)`` when None.
        is_causal: whether plain causal is meant without a mask.
        more: what else the model says; a window is in the mask already.

    Returns:
        ``[B, S, H, V]``, and the weights ``[B, H, S, T]`` if ``output_attentions`` asks for them.

    Raises:
        ArgumentError: the model wants something of its scores that `attend` does not know.
    """
    for name in UNKNOWN:
        if more.get(name) is not None:
            raise ArgumentError(
                name, type(module).__name__, "is not known to headwise's attention; use sdpa or eager"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:
        # A static cache's slots beyond the prompt: without a mask transformers means the first tokens.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    mask = None if attention_mask is None else as_bool(attention_mask)
    returns_weights = bool(more.get("output_attentions"))
    if key.dtype == torch.int8:  # of a quantised cache
        if not dropout and not returns_weights:
            mixed = attend_quantized(query, unpack(key), unpack(value), mask, causal, scaling)
            return mixed.transpose(1, 2).contiguous(), None
        key, value = (dequantize(*unpack(states), query.dtype) for states in (key, value))
    weights = None
    if returns_weights:
        out, weights = attend_with_weights(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling
        )
    else:
        out = attend(query, key, value, mask, dropout, causal, scaling)
    return out.transpose(1, 2).contiguous(), weights


def as_bool(mask: Tensor) -> Tensor:
    """transformers' eager masks are added to the scores: 0 attends, a huge negative number does not.

    Raises:
        ArgumentError: there is a number that is neither, such as ALiBi's slopes.
    """
    if not mask.is_floating_point():
        return mask
    seen = mask == 0
    if not torch.compiler.is_compiling() and not bool((seen | (mask <= _HIDES)).all()):
        raise ArgumentError("attention_mask", "floats", f"must hold nothing but 0 and numbers up to {_HIDES:g}")
    return seen


_HIDES = -1e4
"""What added to a score leaves nothing of its weight; some models write the lowest number there is."""


def register() -> None:
    """Let models be loaded with, or set to, ``attn_implementation="headwise"``."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
