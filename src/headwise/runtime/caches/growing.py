"""Layers of a transformers cache that append tokens without copying, and caches that stand for others.

Only growing is headwise's: what a layer shows is a view of its memory, which transformers' own methods may cut or
replace. The next token finds out which, so that everything else of a cache stays transformers'.

The caches that stand for others give attention, and show masks, what the caller says.

Shapes: B batch, K key–value heads, S new tokens, T cached tokens, D width of keys, V width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headwise.errors import ArgumentError

_LEAST_ROOM = 256
"""Tokens for which a growing cache has memory at first."""


class Room:
    """Memory ``[B, K, room, D]`` for the tokens of a cache layer, with spare room at the end.

    The layer's tensor is a view of this memory as long as transformers' own methods only slice it. Where they have
    made another tensor, its tokens are copied back when the next one is appended.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def append(self, cached: Tensor | None, new: Tensor, room: Callable[[int], int]) -> Tensor:
        """Append new tokens to the cached ones, in place where that is possible.

        Args:
            cached: ``[B, K, T, D]``; None for none.
            new: ``[B, K, S, D]``.
            room: the tokens to allocate memory for, given the number there will be.

        Returns:
            ``[B, K, T + S, D]``, a view of this memory.
        """
        count = 0 if cached is None else cached.shape[2]
        total = count + new.shape[2]
        memory = self.memory
        start = self._start(cached, new)
        if memory is None or start is None or start + total > memory.shape[2]:
            B, K, _, D = new.shape
            memory = new.new_empty(B, K, room(total), D)
            if cached is not None:
                memory[:, :, :count] = cached
            self.memory, start = memory, 0
        memory[:, :, start + count : start + total] = new
        return memory[:, :, start : start + total]

    def _start(self, cached: Tensor | None, new: Tensor) -> int | None:
        """The position in this memory of the first cached token; None where new ones cannot be appended in place."""
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
        if cached is None or cached.shape[2] == 0:
            return 0
        if cached.shape[:2] != memory.shape[:2] or cached.stride() != memory.stride():
            return None
        if cached.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            return None
        return (cached.storage_offset() - memory.storage_offset()) // memory.stride(2)


def _must_concatenate(cached: Tensor | None, new: Tensor) -> bool:
    """Whether tokens are concatenated as transformers does it: for gradients, and where the width is 0."""
    requires_grad = new.requires_grad or (cached is not None and cached.requires_grad)
    return new.shape[3] == 0 or (torch.is_grad_enabled() and requires_grad)


def refuse_tokens(cached: Tensor, new: Tensor, total: int, most: int | None) -> None:
    """Refuse tokens that cannot be appended.

    Args:
        cached: ``[B, …]``, what is held.
        new: ``[B, …]``.
        total: the number of tokens there would be.
        most: the number of tokens that there may be; None for no limit.

    Raises:
        ArgumentError: there would be too many, or they are of another batch size.
    """
    if most is not None and total > most:
        raise ArgumentError("cache length", total, f"is over max_length = {most}")
    if cached.shape[0] != new.shape[0]:
        rule = f"must be {cached.shape[0]}, the batch size of the tokens held; begin another batch with a new cache"
        raise ArgumentError("batch", new.shape[0], rule)


class GrowingLayer(DynamicLayer):
    """transformers' `DynamicLayer` with spare memory behind the tokens.

    Args:
        max_length: allocate memory for so many tokens, and refuse more; when None, memory is doubled as needed.
    """

    tensor_names: ClassVar[tuple[str, ...]] = ("keys", "values")
    """The attributes that hold what is cached, each ``[B, K, …]``."""

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()
        self.max_length = max_length
        self.expected: int | None = None
        """The most tokens that there will be, where that is known."""
        self.rooms: tuple[Room, ...] = (Room(), Room())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device of the first tokens, as transformers does, without storing any."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, each ``[B, K, S, D]``.

        Returns:
            All cached keys and values, each ``[B, K, T, D]``, as views.

        Raises:
            ArgumentError: there would be more than ``max_length`` tokens, or the batch size is another one.
        """
        if not self.get_seq_length():  # an empty cache accepts any batch size
            self.lazy_initialization(key_states, value_states)
        refuse_tokens(self.keys, key_states, self.keys.shape[2] + key_states.shape[2], self.max_length)
        self.keys = self._append(self.rooms[0], self.keys, key_states)
        self.values = self._append(self.rooms[1], self.values, value_states)
        return self.keys, self.values

    def _append(self, room: Room, cached: Tensor, new: Tensor) -> Tensor:
        if _must_concatenate(cached, new):
            return torch.cat((cached, new), dim=2)
        return room.append(cached, new, self._room_for)

    def _room_for(self, total: int) -> int:
        if self.max_length is not None:
            return self.max_length
        room = max(2 * total, _LEAST_ROOM)
        return min(room, self.expected) if self.expected is not None and self.expected >= total else room

    def get_max_length(self) -> int:
        """``max_length``, or -1 for no limit."""
        return -1 if self.max_length is None else self.max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Copy row ``beam_idx[b]`` to row b of the batch, for every b where they differ.

        Args:
            beam_idx: ``[B]``.
        """
        if self.get_seq_length() == 0:
            return
        beam_idx = beam_idx.to(self.keys.device)
        tensors = {name: getattr(self, name) for name in self.tensor_names}
        can_infer = torch.is_inference_mode_enabled()
        frozen = any(states.requires_grad or (states.is_inference() and not can_infer) for states in tensors.values())
        if frozen or len(beam_idx) != self.keys.shape[0]:
            for name, states in tensors.items():
                setattr(self, name, states.index_select(0, beam_idx))
            return
        changed = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero()[:, 0]
        if len(changed):
            for states in tensors.values():
                states[changed] = states[beam_idx[changed]]


class SlidingLayer(DynamicSlidingWindowLayer):
    """transformers' `DynamicSlidingWindowLayer` with spare memory: its window is copied when that is used up."""

    def __init__(self, sliding_window: int, max_length: int | None = None) -> None:
        super().__init__(sliding_window=sliding_window)
        self.max_length = max_length
        self.rooms = (Room(), Room())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device of the first tokens, as transformers does, without storing any."""
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, each ``[B, K, S, D]``.

        Returns:
            The keys and values that the new tokens may attend to: the window before them, and themselves.

        Raises:
            ArgumentError: see `GrowingLayer.update`.
        """
        if not self.cumulative_length:
            self.lazy_initialization(key_states, value_states)
        refuse_tokens(self.keys, key_states, self.cumulative_length + key_states.shape[2], self.max_length)
        if self.record_past:  # nothing is dropped then until `crop`
            states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        self.cumulative_length += key_states.shape[2]
        visible_keys, self.keys = self._append(self.rooms[0], self.keys, key_states)
        visible_values, self.values = self._append(self.rooms[1], self.values, value_states)
        return visible_keys, visible_values

    def _append(self, room: Room, cached: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that the new ones may attend to, ``[B, K, T + S, D]``, and the last of them, which are kept."""
        S, kept = new.shape[2], self.sliding_window - 1
        if _must_concatenate(cached, new):
            visible = torch.cat((cached, new), dim=2)
            return visible, visible[:, :, max(0, visible.shape[2] - kept) :]
        spare = max(64, self.sliding_window // 4)
        if spare >= S:
            visible = room.append(cached, new, lambda total: total + spare)
            return visible, visible[:, :, max(0, visible.shape[2] - kept) :]
        # A prompt: most of its tokens are dropped at once, and their memory with them.
        visible = torch.cat((cached, new), dim=2)
        window = visible[:, :, max(0, visible.shape[2] - kept) :]
        return visible, room.append(None, window, lambda total: total + spare)


Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gives attention keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` for those that it computed of S tokens."""


class GivenCache(DynamicCache):
    """A cache that gives attention what a function returns.

    Args:
        update: the function.
    """

    def __init__(self, update: Update) -> None:
        super().__init__()
        self._update = update

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` in place of those given."""
        return self._update(key_states, value_states)


class OneTokenCache(DynamicCache):
    """A cache as masks see it that holds one token."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Its tokens."""
        return 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the next token."""
        return 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens there are with ``query_length`` more, and the position of their first."""
        return 1 + query_length, 0
