"""A transformers cache that does not copy itself for every token.

Shapes: B batch, K key–value heads, S new tokens, T tokens held, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headwise.errors import ArgumentError
from headwise.hf.interface import NAME
from headwise.kernels import pack

_LEAST_ROOM = 256
"""Tokens a growing cache begins with room for."""


class HeadwiseCache(DynamicCache):
    """Keys and values in memory with room for more, in the place of transformers' own `DynamicCache`.

    That one joins old and new tokens in a new tensor for every token of every layer; this one writes the new ones
    behind the old. Beam search, cropping, batches, sliding windows and left padding work as with transformers' own,
    and a layer of another kind (a recurrent state) is transformers' own.

    Args:
        model: the model it is for, or its config.
        max_length: tokens to make room for at once; more are refused. When None, room is doubled when it runs out.
        quantize: ``int8`` keeps a token's key and value of each head as 8-bit numbers and a scale; for models whose
            attention is ``headwise`` (by name or `headwise.optimize`). Sliding windows stay as they are.

    Raises:
        ArgumentError: ``max_length`` is not a whole number of at least 1, or ``quantize`` is neither None nor int8,
            or is int8 and the model's attention is not headwise's.

    >>> model.generate(**inputs, past_key_values=HeadwiseCache(model))  # doctest: +SKIP
    """

    def __init__(self, model: Any, max_length: int | None = None, *, quantize: Literal["int8"] | None = None) -> None:
        if quantize not in (None, "int8"):
            raise ArgumentError("quantize", quantize, "must be int8 or None")
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ArgumentError("max_length", max_length, "must be a whole number of at least 1, or None")
        config = getattr(model, "config", model)
        if not hasattr(config, "get_text_config"):
            raise ArgumentError("model", type(model).__name__, "must be a transformers model or config")
        attention = getattr(config, "_attn_implementation", None)
        if quantize is not None and attention not in (None, NAME):
            rule = f"is read by attn_implementation={NAME!r} alone, and the model's is {attention!r}"
            raise ArgumentError("quantize", quantize, rule)
        super().__init__(config=config)
        self.max_length = max_length
        self.layers: list[Any] = [_with_room(layer, max_length, quantize) for layer in self.layers]

    @property
    def length(self) -> int:
        """Tokens it has been told of."""
        return int(self.get_seq_length())

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, whether filled or not."""
        tensors = [getattr(layer, name, None) for layer in self.layers for name in ("keys", "values")]
        tensors += [room.memory for layer in self.layers for room in getattr(layer, "rooms", ())]
        storages = (states.untyped_storage() for states in tensors if isinstance(states, Tensor))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def expect(self, tokens: int) -> None:
        """Say how many tokens there will be at most: room that grows goes no further than that."""
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.expected = tokens


def _with_room(layer: Any, max_length: int | None, quantize: str | None) -> Any:
    """The layer that does what a stock one does, without copying."""
    if type(layer) is DynamicLayer:
        return GrowingLayer(max_length) if quantize is None else QuantizedLayer(max_length)
    if type(layer) is DynamicSlidingWindowLayer:
        return SlidingLayer(layer.sliding_window, max_length)
    return layer


class _Room:
    """Memory ``[B, K, room, D]`` that a stretch of tokens lies in, with room behind it.

    The stretch itself is whatever tensor the cache layer holds: a view of this memory, as long as transformers' own
    methods only cut it; when they have made another tensor of it, it is copied back at the next token.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def append(self, held: Tensor | None, new: Tensor, room: Callable[[int], int]) -> Tensor:
        """``held`` and ``new`` side by side, as a view of this memory; ``room(tokens)`` long if made anew."""
        count = 0 if held is None else held.shape[2]
        total = count + new.shape[2]
        memory = self.memory
        start = self._start(held, new)
        if memory is None or start is None or start + total > memory.shape[2]:
            B, K, _, D = new.shape
            memory = new.new_empty(B, K, room(total), D)
            if held is not None:
                memory[:, :, :count] = held
            self.memory, start = memory, 0
        memory[:, :, start + count : start + total] = new
        return memory[:, :, start : start + total]

    def _start(self, held: Tensor | None, new: Tensor) -> int | None:
        """The token of this memory at which the stretch begins; None where it cannot be added to."""
        memory = self.memory
        if (
            memory is None
            or memory.shape[:2] != new.shape[:2]
            or memory.shape[3] != new.shape[3]
            or memory.dtype != new.dtype
            or memory.device != new.device
            or (memory.is_inference() and not torch.is_inference_mode_enabled())
        ):
            return None
        if held is None or held.shape[2] == 0:
            return 0
        if held.shape[:2] != memory.shape[:2] or held.stride() != memory.stride():
            return None
        if held.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            return None
        return (held.storage_offset() - memory.storage_offset()) // memory.stride(2)


def _joins(held: Tensor | None, new: Tensor) -> bool:
    """Whether tokens are joined as transformers does: for gradients, and where there is nothing to store."""
    wanting = new.requires_grad or (held is not None and held.requires_grad)
    return new.shape[3] == 0 or (torch.is_grad_enabled() and wanting)


def _refuse(held: Tensor, new: Tensor, total: int, most: int | None) -> None:
    """Raise an `ArgumentError` for tokens that cannot be appended to those held: too many, or of another batch."""
    if most is not None and total > most:
        raise ArgumentError("cache length", total, f"is over max_length = {most}")
    if held.shape[0] != new.shape[0]:
        rule = f"must be {held.shape[0]}, the batch size of the tokens held; begin another batch with a new cache"
        raise ArgumentError("batch", new.shape[0], rule)


class GrowingLayer(DynamicLayer):
    """transformers' `DynamicLayer` with room behind the tokens.

    Args:
        max_length: tokens to make room for at once, and to refuse more than; doubling when None.
    """

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()
        self.max_length = max_length
        self.expected: int | None = None
        """Tokens there will be at most, where that is known."""
        self.rooms = (_Room(), _Room())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """As transformers': takes dtype and device of the first tokens, and holds none."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[B, K, S, D]`` keys and values; all that is held, as views.

        Raises:
            ArgumentError: there would be more than ``max_length`` tokens, or of another batch size than is held.
        """
        if not self.get_seq_length():  # an empty cache takes any batch
            self.lazy_initialization(key_states, value_states)
        _refuse(self.keys, key_states, self.keys.shape[2] + key_states.shape[2], self.max_length)
        self.keys = self._append(self.rooms[0], self.keys, key_states)
        self.values = self._append(self.rooms[1], self.values, value_states)
        return self.keys, self.values

    def _append(self, room: _Room, held: Tensor, new: Tensor) -> Tensor:
        if _joins(held, new):
            return torch.cat((held, new), dim=2)
        return room.append(held, new, self._room_for)

    def _room_for(self, total: int) -> int:
        if self.max_length is not None:
            return self.max_length
        room = max(2 * total, _LEAST_ROOM)
        return min(room, self.expected) if self.expected is not None and self.expected >= total else room

    def get_max_length(self) -> int:
        """``max_length``, or -1 for no limit."""
        return -1 if self.max_length is None else self.max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row b hold what row ``beam_idx[b]`` held; rows that stay are not touched."""
        if self.get_seq_length() == 0:
            return
        beam_idx = beam_idx.to(self.keys.device)
        frozen = self.keys.requires_grad or (self.keys.is_inference() and not torch.is_inference_mode_enabled())
        if frozen or len(beam_idx) != self.keys.shape[0]:
            super().reorder_cache(beam_idx)
            return
        moved = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero()[:, 0]
        if len(moved):
            for states in (self.keys, self.values):
                states[moved] = states[beam_idx[moved]]


class QuantizedLayer(GrowingLayer):
    """Keys and values in int8, a token's codes and its scale side by side (`headwise.kernels.pack`).

    The first tokens, a prompt's, attend to what they are; what comes after them to what is kept.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `GrowingLayer.update`; what is returned is packed, once something was held before."""
        if value_states.shape[3] == 0:
            raise ArgumentError("quantize", "int8", "is for keys and values of heads, not for latents")
        is_first = self.get_seq_length() == 0
        packed = super().update(pack(key_states), pack(value_states), *args, **kwargs)
        return (key_states, value_states) if is_first else packed


class SlidingLayer(DynamicSlidingWindowLayer):
    """transformers' `DynamicSlidingWindowLayer`, which moves its window only when the room behind it runs out."""

    def __init__(self, sliding_window: int, max_length: int | None = None) -> None:
        super().__init__(sliding_window=sliding_window)
        self.max_length = max_length
        self.rooms = (_Room(), _Room())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """As transformers'."""
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[B, K, S, D]``; what the new tokens may see: the window before them, and themselves.

        Raises:
            ArgumentError: as `GrowingLayer.update`.
        """
        if not self.cumulative_length:
            self.lazy_initialization(key_states, value_states)
        _refuse(self.keys, key_states, self.cumulative_length + key_states.shape[2], self.max_length)
        if self.record_past:  # nothing is forgotten then until `crop`
            kept: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return kept
        self.cumulative_length += key_states.shape[2]
        seen_keys, self.keys = self._append(self.rooms[0], self.keys, key_states)
        seen_values, self.values = self._append(self.rooms[1], self.values, value_states)
        return seen_keys, seen_values

    def _append(self, room: _Room, held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """What is seen, and what is held of it."""
        S, keep = new.shape[2], self.sliding_window - 1
        if _joins(held, new):
            seen = torch.cat((held, new), dim=2)
            return seen, seen[:, :, max(0, seen.shape[2] - keep) :]
        spare = max(64, self.sliding_window // 4)
        if spare >= S:
            seen = room.append(held, new, lambda total: total + spare)
            return seen, seen[:, :, max(0, seen.shape[2] - keep) :]
        # A prompt: most of it is forgotten at once, and its memory with it.
        seen = torch.cat((held, new), dim=2)
        latest = seen[:, :, max(0, seen.shape[2] - keep) :]
        return seen, room.append(None, latest, lambda total: total + spare)
