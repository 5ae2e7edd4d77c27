"""headwise's layers in the place of a transformers model's attention modules.

Shapes: B batch, S new tokens, T all tokens, E hidden size, W cached values of a token, P rotary dims, F frequencies
of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from headwise.errors import ArgumentError
from headwise.models.checkpoints import family_of
from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpec, RopeSpec
from headwise.runtime.attention import GroupedQueryAttention, MultiHeadLatentAttention
from headwise.runtime.attention.base import (
    Attended,
    AttentionLayer,
    CacheLike,
    Call,
    Weighed,
    constructor_arguments,
    merge_heads,
    rotated,
    split_heads,
)
from headwise.runtime.attention.rope import Rotation, follow, frequencies
from headwise.runtime.caches.layers import GrowingLayer, SlidingLayer
from headwise.runtime.hf.interface import as_bool
from headwise.runtime.kernels.mask import Scoring, causal_mask
from headwise.runtime.kernels.native.abi import TURN
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.codec import Stored
from headwise.runtime.quantization.trellis_format import KeyRotation, TrellisFormat


class LayerCache:
    """One layer of a transformers cache as an `AttentionCache`, or none at all where values have a code.

    A layer that caches one tensor (MLA: the latent and the rotary key) stores it as the "keys", with "values" of
    width 0, so that any transformers cache holds exactly that tensor and attention reads it without a copy.

    Values with a code are rounded whether they are stored as codes, as numbers in another kind of cache, or not at
    all.

    Args:
        past_key_values: the transformers cache; or None, with a codec.
        layer_idx: the index of the layer in that cache.
        trim: whether only cached tokens are returned. A static cache returns all its slots, which needs a mask.
        tensors: the number of tensors that the layer caches: 1, or 2 for keys and values.
        codec: the codec of the layer's values; None where they are cached as they are.
        mask: the call's mask as bool, which says where sequences begin; only a codec needs it.
    """

    def __init__(
        self,
        past_key_values: Any,
        layer_idx: int,
        *,
        trim: bool,
        tensors: int = 1,
        codec: TrellisFormat | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self._past, self._layer_idx, self._trim, self._tensors = past_key_values, layer_idx, trim, tensors
        self._codec, self._mask = codec, mask

    @property
    def length(self) -> int:
        """Tokens that the cache was given."""
        return 0 if self._past is None else int(self._past.get_seq_length(self._layer_idx))

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new tokens.

        Args:
            new: ``[B, heads, S, width]`` for each cached tensor.

        Returns:
            ``[B, heads, T, width]`` for each; or, of a cache of codes, what `TrellisFormat` stores.

        Raises:
            ArgumentError: the cache was made for a model with other codes, or is full.
        """
        keys, values = new if self._tensors == 2 else (new[0], new[0][..., :0])
        if self._codec is None:
            return self._trimmed(self._past.update(keys, values, self._layer_idx))
        layer, begin = self._layer_of_codes(self._codec), self.length
        first = layer.first if begin and layer is not None else None
        if first is None:
            first = first_slots(self._mask, len(keys), keys.device)
        if layer is not None:
            return layer.append(keys, values, first)
        if dropped := dropped_tokens(self._past, keys.shape[2], self._layer_idx):
            # Slots count from the first token on that a window holds, and so does the mask.
            first, begin = torch.where(first == 0, -dropped, first), begin - dropped
        keys = self._codec.rounded(keys, first, begin)
        if self._past is None:
            return (keys,)
        return self._trimmed(self._past.update(keys, values, self._layer_idx))

    def _layer_of_codes(self, codec: TrellisFormat) -> GrowingLayer | SlidingLayer | None:
        """The cache's layer, where it holds codes; one of codes that this model does not read is refused."""
        layer = None if self._past is None else self._past.layers[self._layer_idx]
        if not isinstance(layer, GrowingLayer | SlidingLayer) or not isinstance(layer.codec, TrellisFormat):
            return None
        if layer.codec is not codec:
            if not layer.codec.code.equals(codec.code):
                rule = "was made for another model, whose codes are not this one's; make a new cache"
                raise ArgumentError("past_key_values", f"layer {self._layer_idx}", rule)
            layer.codec = codec  # of a copy of the model
        return layer

    def views(self) -> tuple[Tensor, ...]:
        """Everything in the cache, ``[B, heads, T, width]`` for each cached tensor."""
        layer = self._past.layers[self._layer_idx]
        return self._trimmed((layer.keys, layer.values))

    def _trimmed(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        cached = states[: self._tensors]
        return tuple(tensor[:, :, : self.length] for tensor in cached) if self._trim else cached


def dropped_tokens(past: Any, new: int, layer_idx: int) -> int:
    """How many tokens a sliding window has dropped, before ``new`` ones come; 0 without a window or a cache."""
    return 0 if past is None else int(past.get_mask_sizes(new, layer_idx)[1])


def first_slots(mask: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """The slot of each sequence's first token: the first one that any query sees, int64 ``[B]``.

    Args:
        mask: bool ``[B, 1, S, T]`` or ``[B, T]``; None without padding.
        batch: B.
        device: the device of the result.
    """
    if mask is None:
        return torch.zeros(batch, dtype=torch.int64, device=device)
    seen = mask if mask.dim() == 2 else mask.flatten(1, 2).any(1)
    return (seen != 0).to(torch.int64).argmax(-1).expand(batch)


class SlotRotation:
    """cos and sin of the slots of a cache, at every frequency that a model's rotary embedding has now.

    Where frequencies depend on how long a text is, they are those of the embedding's latest call, which the model
    makes before any of its layers; all keys in the cache are rotated with them.

    Args:
        rotary: the model's rotary embedding, one of transformers'.
        prefix: what stands before the names of its attributes for one kind of layer; "" where all are alike.
    """

    def __init__(self, rotary: nn.Module, prefix: str = "") -> None:
        self._rotary, self._prefix = rotary, prefix
        self._forget()
        follow(rotary, self._forget)

    def _forget(self, first: int = 0) -> None:
        """Forget everything that was computed from frequencies, which have changed."""
        self._tables: tuple[Tensor, Tensor] | None = None
        self._latest: tuple[object, tuple[Tensor, Tensor]] | None = None
        self._turns: dict[object, tuple[Tensor, Tensor]] = {}

    def tables(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 ``[1, count, F]``, of slots 0 … count − 1."""
        kept = self._tables
        if kept is None or kept[0].shape[1] < count or kept[0].device != device:
            # Not by calling the embedding, which would take so many slots for the length of a text.
            own: Any = self._rotary
            inv_freq = frequencies(self._rotary)[self._prefix]
            with torch.inference_mode(False), torch.no_grad():
                slots = torch.arange(max(256, 2 * count), dtype=torch.float32, device=device)
                angles = slots[None, :, None] * inv_freq.to(device=device, dtype=torch.float32)
                scaling = float(getattr(own, f"{self._prefix}attention_scaling"))
                kept = self._tables = angles.cos() * scaling, angles.sin() * scaling
        return kept[0][:, :count], kept[1][:, :count]

    def of_slot(self, slot: int, channels: Tensor, key: object, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin ``[1, 1, P/2]`` of one slot, kept because most layers want the same of a token.

        Args:
            slot: the slot.
            channels: int64 ``[P/2]``, each pair's frequency.
            key: what says that two layers' channels are the same.
            dtype: the dtype of the result.
        """
        wanted, latest = (slot, key, dtype, channels.device), self._latest
        if latest is None or latest[0] != wanted:
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = (
                    table.narrow(1, slot, 1).index_select(2, channels).to(dtype)
                    for table in self.tables(slot + 1, channels.device)
                )
            self._latest = latest = wanted, (cos, sin)
        return latest[1]  # and not what is kept now, which may be of another thread's slot

    def of_keys(self, count: int, channels: Tensor, key: object) -> KeyRotation:
        """How keys in slots 0 … count − 1 are rotated; arguments as for `of_slot`."""
        wanted, turns = (key, channels.device), self._turns
        if (turn := turns.get(wanted)) is None:
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = (table[0, :, channels] for table in self.tables(TURN, channels.device))
                turn = turns.setdefault(wanted, (cos / cos[:1], sin / cos[:1]))
        cos, sin = self.tables(count, channels.device)
        return KeyRotation(cos[0], sin[0], channels, turn)


class HostedAttention(AttentionLayer):
    """A headwise layer that is called like the attention module of a transformers model, which it replaces.

    cos and sin are still computed by the model's rotary embedding, with its scaling; the layer selects the
    frequencies that it kept. The model's mask already includes causality, window and padding.
    """

    def host(self, spec: AttentionSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        """Set the layer's place in the model.

        Args:
            spec: the spec of the layer, from the converted config.
            config: the config of the model; with ``eager`` attention, weights are returned as by transformers' own
                modules.
            layer_idx: index of the layer in the model and in the cache.
            channels: the index of the model's frequency for each rotary pair of the layer; repeats are allowed.

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
        position_embeddings: Rotation | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        layer_past: Any = None,
        key_value_states: Tensor | None = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> Weighed:
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

    def _rotation(self, tables: Rotation | None, states: Tensor, past: Any) -> Rotation | None:
        """cos and sin of the new tokens at the frequencies that the layer kept, each ``[B or 1, S, P/2]``.

        Args:
            tables: the model's, each ``[B or 1, S, dims]``.
            states: ``[B, S, E]``.
            past: the cache.
        """
        return None if self.rope is None or tables is None else self.rotation_of(tables)

    def rotation_of(self, tables: Rotation) -> Rotation:
        """cos and sin ``[B or 1, S, P/2]`` at the frequencies that the layer kept, of the model's."""
        channels = self.channels_of(tables[0])
        cos, sin = (table.index_select(-1, channels) for table in tables)
        return cos, sin

    def channels_of(self, table: Tensor) -> Tensor:
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

    Slots of the cache stand for positions: keys are rotated by the slot they lie in, and so are queries. That differs
    from the model's own positions by one rotation of all, which scores do not depend on. The slots of a sliding
    window count from the first token that it holds.

    Keys are coded before rotation because they vary least then, and rotated when they are read. Where frequencies
    change with the length of a text, all keys in the cache are rotated with those of the latest call; but the states
    that keys and values were computed from are those of a shorter text, so that crossing such a change with a cache
    warns.
    """

    CACHING = ("k_proj", "v_proj", "k_norm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    """The projections and norms that cached values come from, of all mechanisms that can be coded."""

    codec: TrellisFormat | None = None
    slots: SlotRotation | None = None

    @property
    def code(self) -> TransformCode | None:
        """The code of the values that the layer caches; None where they are stored as they are."""
        return None if self.codec is None else self.codec.code

    def set_code(self, code: TransformCode | None, slots: SlotRotation | None) -> None:
        """Code the values that the layer caches; None stores them as they are.

        Args:
            code: the code.
            slots: the rotation of the model's slots, where the layer has rotary dims.
        """
        self.codec, self.slots = None if code is None else TrellisFormat(code), slots

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer, and its code with it: no buffer, because its numbers stay float32 in a narrower layer."""
        super()._apply(fn, recurse)
        if self.code is not None:
            device = fn(self.code.offset).device
            if device != self.code.offset.device:
                self.set_code(self.code.to(device), self.slots)
        return self

    def cache_layer(self, max_length: int | None) -> GrowingLayer | SlidingLayer | None:
        """The layer of a `HeadwiseCache` that stores this one's codes; None where values are stored as they are."""
        if self.codec is None:
            return None
        if self.window is not None:
            return SlidingLayer(self.window, self.codec, max_length)
        return GrowingLayer(self.codec, max_length)

    def _cache(self, past: Any, mask: Tensor | None) -> CacheLike | None:
        if self.codec is None:
            return super()._cache(past, mask)
        return LayerCache(past, self.layer_idx, trim=mask is None, codec=self.codec, mask=mask)

    def _rotation(self, tables: Rotation | None, states: Tensor, past: Any) -> Rotation | None:
        """See `HostedAttention._rotation`; queries are rotated by their slots where keys are coded."""
        if self.codec is None:
            return super()._rotation(tables, states, past)
        S = states.shape[1]
        begin = 0 if past is None else int(past.get_seq_length(self.layer_idx))
        begin -= dropped_tokens(past, S, self.layer_idx)
        return self.slot_rotation(states, begin, begin + S)

    def _can_attend_to_codes(self, states: Tensor, memory: tuple[Tensor, ...], call: Call) -> bool:
        """Whether a kernel attends to codes as they are stored, of new tokens ``[B, S, E]``."""
        if len(memory) == 1 or self.codec is None or call.return_weights or self._dropout_p():
            return False
        if self.backend not in ("auto", "fused") or (self.channels and self.slots is None):
            return False
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (states, *self.parameters()))
        return self.codec.can_attend_to(states, memory, call.attention_mask, needs_grad=needs_grad)

    def _attend_to_codes(
        self, query: Tensor, memory: tuple[Tensor, ...], call: Call, scale: float, *, has_sums: bool = False
    ) -> Tensor:
        """Attend to codes as they are stored; see `TrellisFormat.attend`."""
        assert self.codec is not None
        stored, rotation = Stored(memory, (self.codec.code.width, 0), query.dtype), None
        if self.slots is not None and self.channels:
            channels = self.channels_of(query)
            rotation = self.slots.of_keys(memory[0].shape[2], channels, tuple(self.channels))
        scoring = Scoring(call.attention_mask, call.is_causal, scale)
        return self.codec.attend(query, stored, scoring, rotation, has_sums=has_sums)

    def _cached_values(self, memory: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The values of all tokens ``[B, 1, T, W]``, before rotation, out of codes or as another cache holds them."""
        assert self.codec is not None
        if len(memory) == 1:
            return memory[0]
        return self.codec.decode(Stored(memory, (self.codec.code.width, 0), dtype))[0]

    def slot_rotation(self, states: Tensor, begin: int, end: int) -> Rotation | None:
        """cos and sin ``[1, end − begin, P/2]`` of slots, of the states' dtype; None without rotary dims."""
        if self.slots is None or not self.channels:
            return None
        if end == begin + 1 and type(states) is Tensor and not torch.compiler.is_compiling():
            return self.slots.of_slot(begin, self.channels_of(states), tuple(self.channels), states.dtype)
        cos, sin = (table[:, begin:] for table in self.slots.tables(end, states.device))
        channels = self.channels_of(cos)
        return cos[..., channels].to(states.dtype), sin[..., channels].to(states.dtype)


class HostedLatentAttention(CodedAttention, MultiHeadLatentAttention):
    """MLA in the place of a transformers model's attention; arguments as for `HostedAttention.host`."""

    def __init__(self, spec: LatentSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        # cos and sin come from the model; the two dims of a rotary pair are half a head apart
        rope = RopeSpec(dim=spec.qk_rope_head_dim) if spec.qk_rope_head_dim else None
        norm_eps = {} if spec.qk_norm is None else {"norm_eps": config.rms_norm_eps}
        arguments = constructor_arguments(spec, MultiHeadLatentAttention) | {"rope": rope, **norm_eps}
        super().__init__(**arguments, dropout=_dropout(config))
        self.host(spec, config, layer_idx, channels)

    def _states_to_cache(self, states: Tensor, rotation: Rotation | None) -> tuple[Tensor]:
        return super()._states_to_cache(states, rotation if self.codec is None else None)

    def _attend(self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call) -> Attended:
        if self.codec is None:
            return super()._attend(hidden_states, memory, call)
        if self._can_attend_to_codes(hidden_states, memory, call):
            query = self._absorbed_query(*self._queries(hidden_states, call.rotation))
            mixed = self._attend_to_codes(
                query, memory, call, self._scale(), has_sums=self.kv_b_proj.bias is not None
            )
            out: Tensor = self.o_proj(merge_heads(self._decoded_values(mixed)))
            return out
        values, P = self._cached_values(memory, hidden_states.dtype), self.spec.qk_rope_head_dim
        rotation = self.slot_rotation(values, 0, values.shape[2])
        if rotation is not None:
            values = torch.cat((values[..., :-P], rotated(values[..., -P:], rotation, self.rope)), -1)
        return super()._attend(hidden_states, (values,), call)


class HostedGroupedAttention(CodedAttention, GroupedQueryAttention):
    """GQA, MQA or MHA in a model whose own class has no ``num_key_value_heads``, or with a coded cache."""

    def __init__(self, spec: GroupedSpec, config: Any, layer_idx: int, channels: list[int]) -> None:
        rope = RopeSpec(dim=spec.rope.dim) if spec.rope else None
        norm_eps = {} if spec.qk_norm is None else {"norm_eps": config.rms_norm_eps}
        arguments = constructor_arguments(spec, GroupedQueryAttention) | {"rope": rope, **norm_eps}
        super().__init__(**arguments, dropout=_dropout(config))
        self.host(spec, config, layer_idx, channels)

    def _states_to_cache(self, states: Tensor, rotation: Rotation | None) -> tuple[Tensor, ...]:
        if self.codec is None:
            return super()._states_to_cache(states, rotation)
        key, value = super()._states_to_cache(states, None)
        return (torch.cat((merge_heads(key), merge_heads(value)), -1)[:, None],)  # [B, 1, S, W]

    def _attend(self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call) -> Attended:
        if self.codec is None:
            return super()._attend(hidden_states, memory, call)
        if self._can_attend_to_codes(hidden_states, memory, call):
            query = self._heads(self.q_proj(hidden_states), self.spec.num_heads, self.q_norm)
            scale = self.spec.head_dim**-0.5 if self.spec.softmax_scale is None else self.spec.softmax_scale
            mixed = self._attend_to_codes(rotated(query, call.rotation, self.rope), memory, call, scale)
            out = merge_heads(mixed)
            return out if self.o_proj is None else self.o_proj(out)
        values, K = self._cached_values(memory, hidden_states.dtype), self.spec.num_kv_heads
        widths = (K * self.spec.head_dim, K * self.spec.value_dim)
        key, value = (split_heads(part[:, 0], K) for part in values.split_with_sizes(widths, -1))
        key = rotated(key, self.slot_rotation(values, 0, key.shape[2]), self.rope)
        return super()._attend(hidden_states, (key, value), call)


def _dropout(config: Any) -> float:
    return float(getattr(config, family_of(config.model_type).dropout) or 0.0)
