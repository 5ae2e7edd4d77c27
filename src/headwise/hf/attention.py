"""Our layers, called the way transformers calls a model's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attention import MultiHeadLatentAttention
from headwise.attention.latent import constructor_arguments
from headwise.errors import ArgumentError
from headwise.specs import LatentSpec, RopeSpec


class LayerCache:
    """One layer of a transformers cache, seen as the cache our layers take.

    The latent and the rotary key are stored as the "keys" and the "values" are of width 0, so that every stock
    cache holds exactly what is needed and attention reads it in one piece.

    Args:
        past_key_values: the transformers cache.
        layer_idx: which of its layers.
        trim: give only the tokens held. A static cache gives all its slots, which is right only under a mask.
    """

    def __init__(self, past_key_values: Any, layer_idx: int, *, trim: bool) -> None:
        self._past, self._layer_idx, self._trim = past_key_values, layer_idx, trim

    @property
    def length(self) -> int:
        """Tokens held."""
        return int(self._past.get_seq_length(self._layer_idx))

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append ``[B, 1, S, R + P]`` and return all that is held."""
        (states,) = new
        keys, _ = self._past.update(states, states[..., :0], self._layer_idx)
        return (keys[:, :, : self.length] if self._trim else keys,)

    def views(self) -> tuple[Tensor, ...]:
        """All that is held."""
        return (self._past.layers[self._layer_idx].keys,)


class HostedLatentAttention(MultiHeadLatentAttention):
    """MLA in the place of a transformers model's own attention.

    The model's rotary embedding, with whatever scaling it has, goes on computing cos and sin; this layer takes
    from them the frequencies it kept.

    Args:
        spec: what the layer is.
        config: the model's; its ``attention_dropout`` is kept, and ``eager`` attention returns weights, as stock.
        layer_idx: its place in the model, and in the cache.
        channels: the model's frequency that each of the layer's rotary pairs turns at; repeats allowed.
    """

    def __init__(self, spec: LatentSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        super().__init__(
            **constructor_arguments(spec),
            dropout=float(config.attention_dropout or 0.0),
            rope=RopeSpec(dim=spec.qk_rope_head_dim),  # cos and sin come from the model; pairs are halves
        )
        if len(channels) != spec.qk_rope_head_dim // 2:
            rule = f"must be {spec.qk_rope_head_dim // 2}, one a rotary pair"
            raise ArgumentError("headwise.rope_channels", len(channels), rule)
        self.config = config
        self.layer_idx = layer_idx
        self.channels = list(channels)

    def forward(  # type: ignore[override]  # transformers' calling convention
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers' attention modules: the output ``[B, S, E]`` and, when asked for, the weights."""
        cache = None
        if past_key_values is not None:
            cache = LayerCache(past_key_values, self.layer_idx, trim=attention_mask is None)
        attended = super().forward(
            hidden_states,
            attention_mask=None if attention_mask is None else _as_bool(attention_mask),
            # In a 4-D mask causality is already; without one, or with padding alone, plain causal is meant.
            is_causal=attention_mask is None or attention_mask.dim() == 2,
            position_embeddings=self._tables(position_embeddings),
            cache=cache,
            return_weights=output_attentions or self.config._attn_implementation == "eager",
        )
        return attended if isinstance(attended, tuple) else (attended, None)

    def _tables(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin of the layer's pairs ``[B or 1, S, P/2]``, of those the model made for all its frequencies."""
        # Made anew: one kept from a call in inference mode could not be used in training.
        channels = torch.tensor(self.channels, device=position_embeddings[0].device)
        cos, sin = (table.index_select(-1, channels) for table in position_embeddings)
        return cos, sin


def _as_bool(mask: Tensor) -> Tensor:
    """transformers' eager masks are added to the scores: 0 attends, a huge negative number does not."""
    return mask == 0 if mask.is_floating_point() else mask
