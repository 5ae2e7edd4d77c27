"""headwise's layers in the place of a transformers model's attention modules.

Shapes: B batch, S new tokens, T all tokens, E hidden size, P rotary dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EncoderDecoderCache

from headwise.errors import ArgumentError
from headwise.models.checkpoints import family_of
from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpec, RopeSpec
from headwise.runtime.attention import GroupedQueryAttention, MultiHeadLatentAttention
from headwise.runtime.attention.base import AttentionLayer, CacheLike, Call, merge_heads, rotated, split_heads
from headwise.runtime.attention.latent import constructor_arguments
from headwise.runtime.caches.coded import CodedLayer, CodedStates, SlotRotation, decoded
from headwise.runtime.hf.interface import as_bool
from headwise.runtime.kernels.mask import causal_mask
from headwise.runtime.quantization import CodeReader, HeadsReader, LatentReader, TransformCode


class LayerCache:
    """One layer of a transformers cache as an `AttentionCache`.

    A layer that caches one tensor (MLA: the latent and the rotary key) stores it as the "keys", with "values" of
    width 0, so that any transformers cache holds exactly that tensor and attention reads it without a copy.

    Args:
        past_key_values: the transformers cache.
        layer_idx: index of the layer in it.
        trim: return only the tokens that are cached. A static cache returns all its slots, which needs a mask.
        tensors: cached by the layer: 1, or 2 for keys and values.
    """

    def __init__(self, past_key_values: Any, layer_idx: int, *, trim: bool, tensors: int = 1) -> None:
        self._past, self._layer_idx, self._trim, self._tensors = past_key_values, layer_idx, trim, tensors

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return int(self._past.get_seq_length(self._layer_idx))

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new tokens.

        Args:
            new: ``[B, heads, S, width]`` for each cached tensor.

        Returns:
            ``[B, heads, T, width]`` for each.
        """
        keys, values = new if self._tensors == 2 else (new[0], new[0][..., :0])
        return self._trimmed(self._past.update(keys, values, self._layer_idx))

    def views(self) -> tuple[Tensor, ...]:
        """Everything in the cache, ``[B, heads, T, width]`` for each cached tensor."""
        layer = self._past.layers[self._layer_idx]
        return self._trimmed((layer.keys, layer.values))

    def _trimmed(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        cached = states[: self._tensors]
        return tuple(tensor[:, :, : self.length] for tensor in cached) if self._trim else cached


class HostedAttention(AttentionLayer):
    """A headwise layer that is called like the attention module of a transformers model, which it replaces.

    cos and sin are still computed by the model's rotary embedding, with its scaling; the layer selects the
    frequencies that it kept. The model's mask already includes causality, window and padding.
    """

    def host(self, spec: AttentionSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        """Set the layer's place in the model.

        Args:
            spec: of the layer, from the converted config.
            config: of the model; with ``eager`` attention, weights are returned as by transformers' own modules.
            layer_idx: index of the layer in the model and in the cache.
            channels: for each rotary pair of the layer, the index of the model's frequency; repeats are allowed.

        Raises:
            ArgumentError: there is not one frequency for each rotary pair.
        """
        pairs = 0 if self.rope is None else self.rope.spec.dim // 2
        if len(channels) != pairs:
            raise ArgumentError("headwise.rope_channels", len(channels), f"must be {pairs}, one for each rotary pair")
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
        """Compute the attention as transformers' modules do.

        Args:
            hidden_states: ``[B, S, E]``.
            position_embeddings: the model's cos and sin, each ``[B or 1, S, dims]``; None without rotary embeddings.
            attention_mask: ``[B, 1, S, T]`` with causality in it, or ``[B, T]`` for padding alone.
            past_key_values: the cache.
            layer_past: the cache, as some families call it.
            key_value_states: ``[B, T, E]``, an encoder's output to attend to.
            output_attentions: also return the weights.

        Returns:
            The output ``[B, S, E]``, and the weights or None.
        """
        is_cross = key_value_states is not None
        past = self._past(layer_past if past_key_values is None else past_key_values, is_cross=is_cross)
        if self.window is not None:
            attention_mask = self._windowed(attention_mask, hidden_states, past)
        mask = None if attention_mask is None else as_bool(attention_mask)
        attended = super().forward(
            hidden_states,
            key_value_states=key_value_states,
            attention_mask=mask,
            # A 4-D mask includes causality; without a mask, or with one for padding, plain causal is meant.
            is_causal=self.spec.is_causal and not is_cross and (attention_mask is None or attention_mask.dim() == 2),
            position_embeddings=self._rotation(position_embeddings, hidden_states, past),
            cache=self._cache(past, mask),
            return_weights=output_attentions or self.config._attn_implementation == "eager",
        )
        out, weights = attended if isinstance(attended, tuple) else (attended, None)
        return F.dropout(out, self.output_dropout, self.training), weights

    def _cache(self, past: Any, mask: Tensor | None) -> CacheLike | None:
        """The layer's part of a transformers cache; None where there is none."""
        if past is None:
            return None
        return LayerCache(past, self.layer_idx, trim=mask is None, tensors=len(self.cache_shapes()))

    def _rotation(
        self, tables: tuple[Tensor, Tensor] | None, states: Tensor, past: Any
    ) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the new tokens at the frequencies that the layer kept, each ``[B or 1, S, P/2]``.

        Args:
            tables: the model's, each ``[B or 1, S, dims]``.
            states: ``[B, S, E]``.
            past: the cache.
        """
        if self.rope is None or tables is None:
            return None
        channels = self._channels(tables[0])
        cos, sin = (table.index_select(-1, channels) for table in tables)
        return cos, sin

    def _channels(self, table: Tensor) -> Tensor:
        """``channels`` as a tensor on the table's device; it is kept, as every token needs it."""
        if type(table) is not Tensor or torch.compiler.is_compiling():  # a fake or traced tensor must not be kept
            return torch.tensor(self.channels, device=table.device)
        if self._kept_channels is None or self._kept_channels.device != table.device:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be used in training
                self._kept_channels = torch.tensor(self.channels, device=table.device)
        return self._kept_channels

    def _past(self, past: Any, *, is_cross: bool) -> Any:
        """The cache of this attention; a decoder with an encoder has one for self- and one for cross-attention."""
        if not isinstance(past, EncoderDecoderCache):
            return past
        if not is_cross:
            return past.self_attention_cache
        past.is_updated[self.layer_idx] = True
        return past.cross_attention_cache

    def _windowed(self, mask: Tensor | None, states: Tensor, past: Any) -> Tensor | None:
        """The mask with the sliding window, which a 4-D mask already includes."""
        assert self.window is not None
        if mask is not None and mask.dim() == 4:
            return mask
        S = states.shape[1]
        T, dropped = (S, 0) if past is None else past.get_mask_sizes(S, self.layer_idx)
        if mask is None and self.window >= T:
            return None
        visible = causal_mask(S, T, states.device, self.window)[None, None]  # [1, 1, S, T]
        return visible if mask is None else visible & (mask[:, None, None, dropped : dropped + T] != 0)


class CodedAttention(HostedAttention):
    """A layer that can cache its values in a code, as one tensor ``[B, 1, T, W]``.

    Keys are coded before rotation, and rotated when they are read (`headwise.runtime.caches.coded`).
    """

    CACHING = ("k_proj", "v_proj", "k_norm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    """The projections and norms that cached values come from, of all mechanisms that can be coded."""

    code: TransformCode | None = None
    slots: SlotRotation | None = None
    reader: CodeReader[Any] | None = None

    def set_code(self, code: TransformCode | None, slots: SlotRotation | None) -> None:
        """Code the values that the layer caches; None stores them as they are.

        Args:
            code: the code.
            slots: the rotation of the model's slots, where the layer has rotary dims.
        """
        self.code, self.slots = code, slots

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer, and its code with it: no buffer, because its numbers stay float32 in a narrower layer."""
        super()._apply(fn, recurse)
        if self.code is not None:
            device = fn(self.code.offset).device
            if device != self.code.offset.device:
                self.set_code(self.code.to(device), self.slots)
        return self

    def cache_layer(self, max_length: int | None) -> CodedLayer | None:
        """The layer of a `HeadwiseCache` that stores this one's codes; None where values are stored as they are."""
        return None if self.code is None else CodedLayer(self.code, max_length)

    def _cache(self, past: Any, mask: Tensor | None) -> CacheLike | None:
        if self.code is None:
            return super()._cache(past, mask)
        return CodedStates(self.code, past, self.layer_idx, mask)

    def _rotation(
        self, tables: tuple[Tensor, Tensor] | None, states: Tensor, past: Any
    ) -> tuple[Tensor, Tensor] | None:
        """See `HostedAttention._rotation`; queries are rotated by their slots where keys are coded."""
        if self.code is None:
            return super()._rotation(tables, states, past)
        begin = 0 if past is None else int(past.get_seq_length(self.layer_idx))
        return self._slots(states, begin, begin + states.shape[1])

    def _can_read(self, states: Tensor, memory: tuple[Tensor, ...], call: Call) -> bool:
        """Whether the compiled kernel attends to codes as they are stored, of new tokens ``[B, S, E]``."""
        if len(memory) == 1 or self.reader is None or call.return_weights or self._dropout_p():
            return False
        if self.backend not in ("auto", "fused"):
            return False
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (states, *self.parameters()))
        return self.reader.can_read(states, memory, call.attention_mask, needs_grad=needs_grad)

    def _values(self, memory: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The values of all tokens ``[B, 1, T, W]``, before rotation, out of codes or as another cache holds them."""
        assert self.code is not None
        return memory[0] if len(memory) == 1 else decoded(self.code, memory, dtype)

    def _slots(self, like: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin ``[1, end − begin, P/2]`` of slots; None without rotary dims."""
        if self.slots is None or not self.channels:
            return None
        if end == begin + 1 and type(like) is Tensor and not torch.compiler.is_compiling():
            return self.slots.of_slot(begin, self._channels(like), tuple(self.channels), like)
        cos, sin = (table[:, begin:] for table in self.slots.tables(end, like.device))
        channels = self._channels(cos)
        return cos[..., channels].to(like.dtype), sin[..., channels].to(like.dtype)


class HostedLatentAttention(CodedAttention, MultiHeadLatentAttention):
    """MLA in the place of a transformers model's attention; arguments as for `HostedAttention.host`."""

    reader: LatentReader | None

    def __init__(self, spec: LatentSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        # cos and sin come from the model; the two dims of a rotary pair are half a head apart
        rope = RopeSpec(dim=spec.qk_rope_head_dim) if spec.qk_rope_head_dim else None
        norm_eps = {} if spec.qk_norm is None else {"norm_eps": config.rms_norm_eps}
        super().__init__(**constructor_arguments(spec), dropout=_dropout(config), rope=rope, **norm_eps)
        self.host(spec, config, layer_idx, channels)

    def set_code(self, code: TransformCode | None, slots: SlotRotation | None) -> None:
        """See `CodedAttention.set_code`."""
        super().set_code(code, slots)
        self.reader = None if code is None else LatentReader(code, self.spec.kv_lora_rank, self.channels, slots)

    def _states_to_cache(self, states: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor]:
        return super()._states_to_cache(states, rotation if self.code is None else None)

    def _attend(
        self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.code is None:
            return super()._attend(hidden_states, memory, call)
        if self._can_read(hidden_states, memory, call):
            assert self.reader is not None
            query = self._absorbed_query(*self._queries(hidden_states, call.rotation))
            options = {"is_causal": call.is_causal, "has_sums": self.kv_b_proj.bias is not None}
            mixed = self.reader.attend(query, memory, call.attention_mask, scale=self._scale(), **options)
            out: Tensor = self.o_proj(merge_heads(self._decoded_values(mixed)))
            return out
        values, P = self._values(memory, hidden_states.dtype), self.spec.qk_rope_head_dim
        rotation = self._slots(values, 0, values.shape[2])
        if rotation is not None:
            values = torch.cat((values[..., :-P], rotated(values[..., -P:], rotation, self.rope)), -1)
        return super()._attend(hidden_states, (values,), call)


class HostedGroupedAttention(CodedAttention, GroupedQueryAttention):
    """GQA, MQA or MHA in a model whose own class has no ``num_key_value_heads``, or with a coded cache."""

    reader: HeadsReader | None

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

    def set_code(self, code: TransformCode | None, slots: SlotRotation | None) -> None:
        """See `CodedAttention.set_code`."""
        super().set_code(code, slots)
        self.reader = None if code is None else HeadsReader(code, self.cache_shapes(), self.channels, slots)

    def _states_to_cache(self, states: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        if self.code is None:
            return super()._states_to_cache(states, rotation)
        key, value = super()._states_to_cache(states, None)
        return (torch.cat((merge_heads(key), merge_heads(value)), -1)[:, None],)  # [B, 1, S, W]

    def _attend(
        self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.code is None:
            return super()._attend(hidden_states, memory, call)
        if self._can_read(hidden_states, memory, call):
            return self._read(hidden_states, memory, call)
        values, K = self._values(memory, hidden_states.dtype), self.spec.num_kv_heads
        widths = (K * self.spec.head_dim, K * self.spec.value_dim)
        key, value = (split_heads(part[:, 0], K) for part in values.split_with_sizes(widths, -1))
        key = rotated(key, self._slots(values, 0, key.shape[2]), self.rope)
        return super()._attend(hidden_states, (key, value), call)

    def _read(self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call) -> Tensor:
        """`_attend`, by the kernel that reads codes."""
        assert self.reader is not None
        query = self._heads(self.q_proj(hidden_states), self.spec.num_heads, self.q_norm)
        scale = self.spec.head_dim**-0.5 if self.spec.softmax_scale is None else self.spec.softmax_scale
        query = rotated(query, call.rotation, self.rope)
        mixed = self.reader.attend(query, memory, call.attention_mask, is_causal=call.is_causal, scale=scale)
        out = merge_heads(mixed)
        return out if self.o_proj is None else self.o_proj(out)


def _dropout(config: Any) -> float:
    return float(getattr(config, family_of(config.model_type).dropout) or 0.0)
