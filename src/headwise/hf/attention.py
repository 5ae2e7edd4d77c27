"""Our layers, called the way transformers calls a model's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EncoderDecoderCache

from headwise.attention import GroupedQueryAttention, MultiHeadLatentAttention
from headwise.attention.base import AttentionLayer
from headwise.attention.latent import constructor_arguments
from headwise.checkpoints import family_of
from headwise.errors import ArgumentError
from headwise.hf.interface import as_bool
from headwise.kernels.mask import causal_mask
from headwise.specs import AttentionSpec, GroupedSpec, LatentSpec, RopeSpec


class LayerCache:
    """One layer of a transformers cache, seen as the cache our layers take.

    A layer that keeps one tensor (MLA: the latent and the rotary key) stores it as the "keys", with "values" of
    width 0, so that every stock cache holds exactly what is needed and attention reads it in one piece.

    Args:
        past_key_values: the transformers cache.
        layer_idx: which of its layers.
        trim: give only the tokens held. A static cache gives all its slots, which is right only under a mask.
        tensors: how many the layer keeps: 1, or 2 for keys and values.
    """

    def __init__(self, past_key_values: Any, layer_idx: int, *, trim: bool, tensors: int = 1) -> None:
        self._past, self._layer_idx, self._trim, self._tensors = past_key_values, layer_idx, trim, tensors

    @property
    def length(self) -> int:
        """Tokens held."""
        return int(self._past.get_seq_length(self._layer_idx))

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append ``[B, heads, S, width]`` to each tensor and return all that is held."""
        keys, values = new if self._tensors == 2 else (new[0], new[0][..., :0])
        held = self._past.update(keys, values, self._layer_idx)
        if held[0].dtype == torch.int8:
            rule = "is for models whose own attention is asked by name, not for converted layers"
            raise ArgumentError("quantize", "int8", rule)
        return self._held(held)

    def views(self) -> tuple[Tensor, ...]:
        """All that is held."""
        layer = self._past.layers[self._layer_idx]
        return self._held((layer.keys, layer.values))

    def _held(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        wanted = states[: self._tensors]
        return tuple(x[:, :, : self.length] for x in wanted) if self._trim else wanted


class HostedAttention(AttentionLayer):
    """A layer of ours in the place of a transformers model's own attention: that call, answered by ours.

    The model's rotary embedding, with whatever scaling it has, goes on computing cos and sin; the layer takes from
    them the frequencies it kept. The model's mask already holds causality, window and padding.
    """

    def host(self, spec: AttentionSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        """Remember the place in the model.

        Args:
            spec: what the layer is by the converted config.
            config: the model's; ``eager`` attention returns weights, as stock.
            layer_idx: its place in the model, and in the cache.
            channels: the model's frequency that each of the layer's rotary pairs turns at; repeats allowed.
        """
        pairs = 0 if self.rope is None else self.rope.spec.dim // 2
        if len(channels) != pairs:
            raise ArgumentError("headwise.rope_channels", len(channels), f"must be {pairs}, one a rotary pair")
        self.config, self.layer_idx, self.channels = config, layer_idx, list(channels)
        self._kept_channels: Tensor | None = None
        self.window = spec.sliding_window
        self.spec = replace(spec, rope=self.spec.rope, sliding_window=None)
        dropped = family_of(config.model_type).output_dropout
        self.output_dropout = float(getattr(config, dropped) or 0.0) if dropped else 0.0

    def forward(  # type: ignore[override]  # transformers' calling convention
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        layer_past: Any = None,
        key_value_states: Tensor | None = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers' attention modules: the output ``[B, S, E]`` and, when asked for, the weights."""
        is_cross = key_value_states is not None
        past = self._past(layer_past if past_key_values is None else past_key_values, is_cross=is_cross)
        if self.window is not None:
            attention_mask = self._windowed(attention_mask, hidden_states, past)
        cache = None
        if past is not None:
            kept = len(self.cache_shapes())
            cache = LayerCache(past, self.layer_idx, trim=attention_mask is None, tensors=kept)
        attended = super().forward(
            hidden_states,
            key_value_states=key_value_states,
            attention_mask=None if attention_mask is None else as_bool(attention_mask),
            # In a 4-D mask causality is already; without one, or with padding alone, plain causal is meant.
            is_causal=self.spec.is_causal and not is_cross and (attention_mask is None or attention_mask.dim() == 2),
            position_embeddings=self._rotation(position_embeddings),
            cache=cache,
            return_weights=output_attentions or self.config._attn_implementation == "eager",
        )
        out, weights = attended if isinstance(attended, tuple) else (attended, None)
        return F.dropout(out, self.output_dropout, self.training), weights

    def _rotation(self, tables: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the frequencies the layer kept, ``[B or 1, S, P/2]``."""
        if self.rope is None or tables is None:
            return None
        channels = self._channels(tables[0])
        cos, sin = (table.index_select(-1, channels) for table in tables)
        return cos, sin

    def _channels(self, table: Tensor) -> Tensor:
        """``channels`` where the table is; kept, because every token asks for them."""
        if type(table) is not Tensor or torch.compiler.is_compiling():  # what is fake, or traced, is not to be kept
            return torch.tensor(self.channels, device=table.device)
        if self._kept_channels is None or self._kept_channels.device != table.device:
            with torch.inference_mode(False):  # one made in inference mode could not be used in training
                self._kept_channels = torch.tensor(self.channels, device=table.device)
        return self._kept_channels

    def _past(self, past: Any, *, is_cross: bool) -> Any:
        """The cache of this attention: a decoder with an encoder has one for each of its two."""
        if not isinstance(past, EncoderDecoderCache):
            return past
        if not is_cross:
            return past.self_attention_cache
        past.is_updated[self.layer_idx] = True
        return past.cross_attention_cache

    def _windowed(self, mask: Tensor | None, states: Tensor, past: Any) -> Tensor | None:
        """A 4-D mask has the window in it; with padding alone, or nothing, the window is still meant."""
        assert self.window is not None
        if mask is not None and mask.dim() == 4:
            return mask
        S = states.shape[1]
        held, forgotten = (S, 0) if past is None else past.get_mask_sizes(S, self.layer_idx)
        if mask is None and held <= self.window:
            return None
        seen = causal_mask(S, held, states.device, self.window)[None, None]
        return seen if mask is None else seen & (mask[:, None, None, forgotten : forgotten + held] != 0)


class HostedLatentAttention(HostedAttention, MultiHeadLatentAttention):
    """MLA in the place of a transformers model's own attention; arguments as `HostedAttention.host`."""

    def __init__(self, spec: LatentSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        # cos and sin come from the model; pairs are halves
        rope = RopeSpec(dim=spec.qk_rope_head_dim) if spec.qk_rope_head_dim else None
        super().__init__(**constructor_arguments(spec), dropout=_dropout(config), rope=rope)
        self.host(spec, config, layer_idx, channels)


class HostedGroupedAttention(HostedAttention, GroupedQueryAttention):
    """GQA, MQA or MHA in a model whose own class has one number of heads; arguments as `HostedAttention.host`."""

    def __init__(self, spec: GroupedSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        super().__init__(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            bias=spec.bias,
            dropout=_dropout(config),
            rope=RopeSpec(dim=spec.rope.dim) if spec.rope else None,
            softmax_scale=spec.softmax_scale,
        )
        self.host(spec, config, layer_idx, channels)


def _dropout(config: Any) -> float:
    return float(getattr(config, family_of(config.model_type).dropout) or 0.0)
