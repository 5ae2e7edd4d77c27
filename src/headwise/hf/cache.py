"""A transformers cache that appends tokens without copying those it has.

Shapes: B batch, K key–value heads, S new tokens, T cached tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headwise.errors import ArgumentError
from headwise.hf.interface import NAME
from headwise.kernels import pack

_LEAST_ROOM = 256
"""Tokens for which a growing cache has memory at first."""


class HeadwiseCache(DynamicCache):
    """A `DynamicCache` with spare memory, to which tokens are appended in place.

    transformers' `DynamicCache` concatenates all tokens into a new tensor for every token and layer. Beam search,
    cropping, batches, sliding windows and left padding work as with that; layers of other kinds (recurrent states)
    are transformers' own.

    Args:
        model: the model to be run with the cache, or its config.
        max_length: allocate memory for so many tokens, and refuse more. When None, memory is doubled as needed.
        quantize: ``int8`` stores each head's key and value of a token as 8-bit numbers and a scale, for models whose
            attention is ``headwise`` (by name or `headwise.optimize`). Sliding windows are not quantised.

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
        for module in model.modules() if isinstance(model, nn.Module) else ():
            new_layer = getattr(module, "cache_layer", None)
            coded = None if new_layer is None else new_layer(max_length)
            if coded is not None:
                self.layers[int(module.layer_idx)] = coded  # type: ignore[arg-type]  # a number, of such modules

    @property
    def length(self) -> int:
        """Tokens that the cache has been given, also where a sliding window has dropped them."""
        return int(self.get_seq_length())

    @property
    def nbytes(self) -> int:
        """Bytes of memory allocated for keys and values, used or not."""
        tensors = [getattr(layer, name, None) for layer in self.layers for name in ("keys", "values")]
        tensors += [room.memory for layer in self.layers for room in getattr(layer, "rooms", ())]
        storages = (states.untyped_storage() for states in tensors if isinstance(states, Tensor))
        more = sum(getattr(layer, "more_bytes", 0) for layer in self.layers)
        return more + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def expect(self, tokens: int) -> None:
        """Limit the memory that a growing cache allocates in advance.

        Args:
            tokens: the most tokens that the cache will hold; it still grows beyond them if it must.
        """
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.expected = tokens


def _with_room(layer: Any, max_length: int | None, quantize: str | None) -> Any:
    """The layer of this file that replaces one of transformers' own; other kinds are returned as they are."""
    if type(layer) is DynamicLayer:
        return GrowingLayer(max_length) if quantize is None else QuantizedLayer(max_length)
    if type(layer) is DynamicSlidingWindowLayer:
        return SlidingLayer(layer.sliding_window, max_length)
    return layer


class _Room:
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


def _refuse(cached: Tensor, new: Tensor, total: int, most: int | None) -> None:
    """Refuse tokens that cannot be appended.

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

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()
        self.max_length = max_length
        self.expected: int | None = None
        """The most tokens that there will be, where that is known."""
        self.rooms = (_Room(), _Room())

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
        _refuse(self.keys, key_states, self.keys.shape[2] + key_states.shape[2], self.max_length)
        self.keys = self._append(self.rooms[0], self.keys, key_states)
        self.values = self._append(self.rooms[1], self.values, value_states)
        return self.keys, self.values

    def _append(self, room: _Room, cached: Tensor, new: Tensor) -> Tensor:
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
        frozen = self.keys.requires_grad or (self.keys.is_inference() and not torch.is_inference_mode_enabled())
        if frozen or len(beam_idx) != self.keys.shape[0]:
            super().reorder_cache(beam_idx)
            return
        changed = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero()[:, 0]
        if len(changed):
            for states in (self.keys, self.values):
                states[changed] = states[beam_idx[changed]]


class QuantizedLayer(GrowingLayer):
    """Keys and values in int8, each token's codes next to its scale (`headwise.kernels.pack`).

    The first tokens, those of a prompt, attend to their exact keys and values; later ones to the quantised ones.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; see `GrowingLayer.update`.

        Returns:
            Packed keys and values; the exact ones for the first tokens.

        Raises:
            ArgumentError: see `GrowingLayer.update`; or the values have width 0, as latents do.
        """
        if value_states.shape[3] == 0:
            raise ArgumentError("quantize", "int8", "is for keys and values of heads, not for latents")
        is_first = self.get_seq_length() == 0
        packed = super().update(pack(key_states), pack(value_states), *args, **kwargs)
        return (key_states, value_states) if is_first else packed


class SlidingLayer(DynamicSlidingWindowLayer):
    """transformers' `DynamicSlidingWindowLayer` with spare memory: its window is copied when that is used up."""

    def __init__(self, sliding_window: int, max_length: int | None = None) -> None:
        super().__init__(sliding_window=sliding_window)
        self.max_length = max_length
        self.rooms = (_Room(), _Room())

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
        _refuse(self.keys, key_states, self.cumulative_length + key_states.shape[2], self.max_length)
        if self.record_past:  # nothing is dropped then until `crop`
            states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        self.cumulative_length += key_states.shape[2]
        visible_keys, self.keys = self._append(self.rooms[0], self.keys, key_states)
        visible_values, self.values = self._append(self.rooms[1], self.values, value_states)
        return visible_keys, visible_values

    def _append(self, room: _Room, cached: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
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
