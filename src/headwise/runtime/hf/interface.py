"""headwise's attention as an ``attn_implementation`` of transformers, for every model that supports those.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from headwise.errors import ArgumentError
from headwise.runtime.caches.cache import NAME
from headwise.runtime.kernels import attend, attend_with_weights
from headwise.runtime.quantization.codec import StoredKeys

UNKNOWN = ("softcap", "position_bias", "s_aux", "cache")
"""Arguments of attention functions that are not supported: caps and biases of scores, sinks, paged caches."""

TRAINED_FORMAT = "headwise_format"
"""The attribute of an attention module with the format that keys and values are rounded to while it is trained."""


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
    """Compute `headwise.runtime.kernels.attend` with the signature of transformers' attention functions.

    For example ``output, _ = attention_forward(model.model.layers[0].self_attn, query, key, value, None)``;
    transformers calls it in a model loaded with ``attn_implementation="headwise"`` after ``import headwise.hf``.

    Args:
        module: the attention module; its ``is_causal`` is used where the argument is None.
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        attention_mask: ``[B, 1 or H, S, T]``, True or 0.0 = attend, causality included; None means causal.
        dropout: probability of dropping an attention weight.
        scaling: factor of the scores; ``1/sqrt(D)`` when None.
        is_causal: without a mask, whether a query sees only the keys up to its own.
        more: the model's other arguments; a sliding window is in the mask already.

    Returns:
        ``[B, S, H, V]``, and the weights ``[B, H, S, T]`` with ``output_attentions``, else None.

    Raises:
        ArgumentError: the model gives one of the arguments in `UNKNOWN`.
    """
    for name in UNKNOWN:
        if more.get(name) is not None:
            rule = "is not supported by headwise's attention; use sdpa or eager"
            raise ArgumentError(name, type(module).__name__, rule)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    mask = None if attention_mask is None else as_bool(attention_mask)
    returns_weights = bool(more.get("output_attentions"))
    if isinstance(key, StoredKeys):  # of a quantised cache
        if not dropout and not returns_weights:
            return key.attend(query, mask, causal, scaling).transpose(1, 2).contiguous(), None
        key, value = key.decode()
    if (trained := getattr(module, TRAINED_FORMAT, None)) is not None:
        query, key, value = trained.rounded(query, key, value)
    if causal and key.shape[2] > query.shape[2]:
        # The slots of a static cache beyond the prompt: without a mask transformers means the first tokens.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    weights = None
    if returns_weights:
        out, weights = attend_with_weights(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling
        )
    else:
        out = attend(query, key, value, mask, dropout, causal, scaling)  # [B, H, S, V]
    return out.transpose(1, 2).contiguous(), weights


def attention_mask(*, config: Any = None, allow_is_causal_skip: bool = True, **call: Any) -> Tensor | None:
    """Make the mask that `attention_forward` is given.

    It is transformers' own for SDPA, which leaves a plain causal mask out. It stays where transformers does not run a
    model by SDPA: such a decoder's modules need not say that they are causal (BigBird-Pegasus, NLLB-MoE).

    Args:
        config: the config of the model.
        allow_is_causal_skip: whether a causal mask may be left out.
        call: the other arguments of transformers' ``sdpa_mask``.

    Returns:
        ``[B, 1, S, T]``, True = attend; None where nothing is masked but what lies ahead.
    """
    config_class: Any = type(config)
    may_skip = allow_is_causal_skip and _runs_by_sdpa(config_class)
    mask: Tensor | None = sdpa_mask(config=config, allow_is_causal_skip=may_skip, **call)
    return mask


@cache
def _runs_by_sdpa(config_class: type[Any]) -> bool:
    """Whether transformers runs a config's model by SDPA; True for a part of a model that has no class of its own."""
    found = MODEL_MAPPING.get(config_class, None)
    classes = found if isinstance(found, tuple) else (found,)
    return all(getattr(one, "_supports_sdpa", True) for one in classes)


def as_bool(mask: Tensor) -> Tensor:
    """Convert a mask that is added to the scores, as transformers' eager masks are, to True = attend.

    Args:
        mask: 0 where a query attends, a large negative number elsewhere; integers and bool are returned as they are.

    Raises:
        ArgumentError: the mask has another number, such as ALiBi's slopes.
    """
    if not mask.is_floating_point():
        return mask
    visible = mask == 0
    if not torch.compiler.is_compiling() and not bool((visible | (mask <= _MASKED)).all()):
        raise ArgumentError("attention_mask", "floats", f"must contain only 0 and numbers up to {_MASKED:g}")
    return visible


_MASKED = -1e4
"""The largest number that masks a score when added to it; some models use the lowest number of the dtype."""


def register() -> None:
    """Register ``attn_implementation="headwise"`` with transformers."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
