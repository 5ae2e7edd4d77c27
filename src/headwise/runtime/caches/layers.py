"""The two kinds of layer of a transformers cache, growing and sliding, which append tokens without copying.

A layer stores keys and values as they are, or as its codec (`headwise.runtime.quantization.codec`) codes them. New
tokens are coded first, and attention is given what their codes stand for, in a prompt too. Where attention is
headwise's and the codec can attend to what is stored, it is given that itself.

Only appending is headwise's: what a layer shows is a view of its memory, which transformers' own methods may cut or
replace. The next token finds out which, so that everything else of a cache stays transformers'.

Shapes: B batch, K key–value heads, S new tokens, T cached tokens, D width of keys, V width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headwise.errors import ArgumentError
from headwise.runtime.quantization.codec import Codec, Stored, StoredKeys
from headwise.runtime.quantization.trellis_format import TrellisFormat, keep_first_tokens

_LEAST_TOKENS = 256
"""Tokens for which a growing cache has memory at first."""


class _Layer(DynamicLayer):
    """What growing and sliding layers do alike: encode, and move the rows of a batch.

    The tensors that a codec names (`Codec.tensors`) are attributes of the layer.
    """

    # Of codecs that have them.
    key_scales: Tensor
    recent_keys: Tensor
    recent_values: Tensor
    unquantised: Tensor | None = None
    first: Tensor | None = None

    def _store_as(self, codec: Codec | None) -> None:
        """Begin without tokens; ``codec`` says how keys and values are stored."""
        self.codec = codec
        self.tensor_names = ("keys", "values") if codec is None else codec.tensors
        """The attributes that hold what is cached, each ``[B, …]``."""
        for name in self.tensor_names[2:]:
            setattr(self, name, None)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """What is cached; see `Codec`."""
        return tuple(getattr(self, name) for name in self.tensor_names)

    def _encoded(self, states: Tensor, values: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of keys and values; those of each sequence's first tokens by another rule than the others'.

        Args:
            states: the keys, ``[B, K, S, D]``.
            values: the values, ``[B, K, S, V]``.
            first: see `GrowingLayer.append`.
        """
        codec = self.codec
        if codec is None:
            return states, values
        if isinstance(codec, TrellisFormat) and first is not None:
            begin, wide = int(self.get_seq_length()), codec.code.wide_tokens
            if begin == 0 or self.first is None or self.unquantised is None:
                self.first = first.clone()
                self.unquantised = states.new_zeros(len(states), wide, states.shape[-1], dtype=torch.bfloat16)
                self._last_first = int(first.max()) + max(wide, 1) - 1  # the last slot that may hold such a token
            if not self.holds_first_tokens():
                self.unquantised = keep_first_tokens(self.unquantised, states, self.first, begin)
                keys, values = codec.encode(states, values, self.first, begin)
                return keys, values
        keys, values = codec.encode(states, values)
        return keys, values

    def holds_first_tokens(self) -> bool:
        """Whether a `TrellisFormat` has coded every sequence's first tokens, so that no later token is one."""
        return self.first is not None and int(self.get_seq_length()) > self._last_first

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        super().reset()
        for name in self.tensor_names[2:]:
            setattr(self, name, None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Copy row ``beam_idx[b]`` to row b of the batch, for every b where they differ.

        Args:
            beam_idx: ``[B]``.
        """
        if self.get_seq_length() == 0:
            return
        beam_idx = beam_idx.to(self.keys.device)
        tensors = dict(zip(self.tensor_names, self.stored, strict=True))
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

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch so many times."""
        for name in self.tensor_names if self.get_seq_length() else ():
            setattr(self, name, getattr(self, name).repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows of the batch only."""
        for name in self.tensor_names if self.get_seq_length() else ():
            setattr(self, name, getattr(self, name)[indices, ...])


class GrowingLayer(_Layer):
    """transformers' `DynamicLayer` with spare memory behind the tokens.

    What is coded of a sequence does not depend on how many tokens came at once. Where a codec codes blocks of tokens,
    those that fill none yet are kept as they are; cropping into a block decodes what is left of it, so that attention
    goes on reading the same, and its tokens are coded again when the block is full again.

    Args:
        codec: how keys and values are stored; as they are when None.
        max_length: allocate memory for so many tokens, and refuse more; when None, memory is doubled as needed.
        reads_stored: whether attention is headwise's, which reads what is stored.
    """

    def __init__(
        self, codec: Codec | None = None, max_length: int | None = None, *, reads_stored: bool = False
    ) -> None:
        super().__init__()
        self.max_length, self.reads_stored = max_length, reads_stored
        self.expected: int | None = None
        """The most tokens that there will be, where that is known."""
        self.memory: dict[str, Tensor] = {}
        """The memory of each tensor, with spare memory at the end."""
        self._store_as(codec)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device of the first tokens, as transformers does, without storing any."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys ``[B, K, S, D]`` and values ``[B, K, S, V]``.

        Returns:
            All keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` that attention reads: as views; or decoded, in the
            dtype of the new ones; or, where the codec attends, the rows of both, the keys' as `StoredKeys`.

        Raises:
            ArgumentError: there would be more than ``max_length`` tokens, the batch size is another one, or the codec
                does not store keys and values of these widths.
        """
        codec = self.codec
        is_exact = codec is not None and codec.exact_prompt and not self.get_seq_length()
        stored = self.append(key_states, value_states)
        if codec is None:
            return self.keys, self.values
        if is_exact:
            return key_states, value_states
        return _attended_states(codec, stored, key_states, value_states, reads_stored=self.reads_stored)

    def append(self, key_states: Tensor, value_states: Tensor, first: Tensor | None = None) -> tuple[Tensor, ...]:
        """Store keys ``[B, K, S, D]`` and values ``[B, K, S, V]``.

        Args:
            key_states: the keys.
            value_states: the values.
            first: int64 ``[B]``, the slot of each sequence's first token, for a `TrellisFormat`; later calls need
                not repeat it.

        Returns:
            What is stored of all tokens; see `Codec`.

        Raises:
            ArgumentError: see `update`.
        """
        codec = self.codec
        if codec is not None and codec.block > 1:
            self._append_blocks(codec, key_states, value_states)
        else:
            self.append_rows(*self._encoded(key_states, value_states, first))
        return self.stored

    def append_rows(self, keys: Tensor, values: Tensor) -> None:
        """Store keys and values that are coded already, a row ``[B, K, S, …]`` for each token.

        Raises:
            ArgumentError: see `update`.
        """
        if not self.get_seq_length():  # an empty cache accepts any batch size
            self.lazy_initialization(keys, values)
        _refuse_tokens(self.keys, keys, self.keys.shape[2] + keys.shape[2], self.max_length)
        self._extend("keys", keys, self._tokens_of_memory)
        self._extend("values", values, self._tokens_of_memory)

    def lengthen(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Make room for new tokens, which the caller writes; without gradients.

        Args:
            keys: ``[B, K, S, D]``, as what is stored of the keys will be; its numbers are not read.
            values: ``[B, K, S, V]``, as what is stored of the values will be, likewise.

        Returns:
            What is stored of all keys ``[B, K, T, D]`` and values ``[B, K, T, V]``; the last S are to be written.

        Raises:
            ArgumentError: see `update`.
        """
        if not self.get_seq_length():
            self.lazy_initialization(keys, values)
        _refuse_tokens(self.keys, keys, self.keys.shape[2] + keys.shape[2], self.max_length)
        self.keys = _lengthened(self.memory, "keys", self.keys, keys, self._tokens_of_memory)
        if isinstance(self.codec, TrellisFormat):
            self.values = self.keys[..., :0]
        else:
            self.values = _lengthened(self.memory, "values", self.values, values, self._tokens_of_memory)
        return self.keys, self.values

    def _append_blocks(self, codec: Codec, keys: Tensor, values: Tensor) -> None:
        """Code the tokens that fill blocks now, and keep the other new ones as they are."""
        if not self.get_seq_length():
            no_keys, no_values = (states[:, :, :0].detach().clone() for states in (keys, values))
            rows = codec.encode(no_keys, no_values)
            self.lazy_initialization(keys, values)
            for name, states in zip(self.tensor_names, (*rows, no_keys, no_values), strict=True):
                setattr(self, name, states)
        total = self.get_seq_length() + keys.shape[2]
        _refuse_tokens(self.keys, keys, total, self.max_length)
        keys, values = keys.detach(), values.detach()
        count = max(codec.coded(total) - self.keys.shape[2], 0)  # tokens to code now
        block = codec.block
        if count:
            keys, values = torch.cat((self.recent_keys, keys), 2), torch.cat((self.recent_values, values), 2)
            rows = codec.encode(keys[:, :, :count], values[:, :, :count])
            self._extend("keys", rows[0], self._tokens_of_memory)
            self._extend("values", rows[1], self._tokens_of_memory)
            self._extend("key_scales", rows[2], lambda blocks: self._tokens_of_memory(blocks * block) // block)
            # Cloned, because an empty view would keep the memory of all these tokens.
            keys, values = keys[:, :, count:], values[:, :, count:]
            self.recent_keys, self.recent_values = keys[:, :, :0].clone(), values[:, :, :0].clone()
        if keys.shape[2]:
            most = codec.recent + block - 1  # as many as ever wait for a block to fill
            most = most if self.max_length is None else min(most, self.max_length)
            self._extend("recent_keys", keys, lambda tokens: max(tokens, most))
            self._extend("recent_values", values, lambda tokens: max(tokens, most))

    def _extend(self, name: str, new: Tensor, size: Callable[[int], int]) -> None:
        """Append to one of the tensors; ``size`` gives the tokens to have memory for, of the number there will be."""
        cached = getattr(self, name)
        if _must_concatenate(cached, new):
            states = torch.cat((cached, new), dim=2)
        else:
            states = _append_in_place(self.memory, name, cached, new, size)
        setattr(self, name, states)

    def _tokens_of_memory(self, total: int) -> int:
        """The tokens to have memory for when there will be ``total``, in whole blocks."""
        most, codec = self.max_length, self.codec
        if most is None:
            most = max(2 * total, _LEAST_TOKENS)
            if self.expected is not None and self.expected >= total:
                most = min(most, self.expected)
            return most if codec is None else -(-most // codec.block) * codec.block
        return most if codec is None else codec.coded(most)

    def get_seq_length(self) -> int:
        """T, the number of cached tokens."""
        if self.codec is None or self.codec.block == 1:
            return int(super().get_seq_length())
        return int(self.keys.shape[2] + self.recent_keys.shape[2]) if self.is_initialized else 0

    def get_max_length(self) -> int:
        """``max_length``, or -1 for no limit."""
        return -1 if self.max_length is None else self.max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the latest tokens.

        Args:
            tokens_to_remove: the number of tokens to remove, negated.

        Raises:
            ArgumentError: the number is not negated.
        """
        codec = self.codec
        if codec is None or codec.block == 1:
            super().crop(tokens_to_remove)
            return
        if tokens_to_remove > 0:
            raise ArgumentError("tokens_to_remove", tokens_to_remove, "must be negative, or 0 for none")
        total = max(self.get_seq_length() + tokens_to_remove, 0)
        if not self.is_initialized or tokens_to_remove == 0:
            return
        coded = self.keys.shape[2]
        if total >= coded:
            self.recent_keys = self.recent_keys[:, :, : total - coded]
            self.recent_values = self.recent_values[:, :, : total - coded]
            return
        # Tokens of a block that is cut wait for a full one again; as their exact values are gone, decoded ones do.
        keys, values = _attended_states(codec, self.stored, self.recent_keys, self.recent_values, reads_stored=False)
        kept = total // codec.block * codec.block
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        self.key_scales = self.key_scales[:, :, : kept // codec.block]
        self.recent_keys, self.recent_values = (states[:, :, kept:total].clone() for states in (keys, values))


class SlidingLayer(_Layer, DynamicSlidingWindowLayer):
    """transformers' `DynamicSlidingWindowLayer` with spare memory: its window is copied when that is used up.

    Args:
        sliding_window: the tokens of the window.
        codec: how keys and values are stored, each token by itself; as they are when None.
        max_length: the most tokens that it can be given; None for no limit.
        reads_stored: see `GrowingLayer`.
    """

    def __init__(
        self,
        sliding_window: int,
        codec: Codec | None = None,
        max_length: int | None = None,
        *,
        reads_stored: bool = False,
    ) -> None:
        super().__init__(sliding_window=sliding_window)
        self.max_length, self.reads_stored = max_length, reads_stored
        self._store_as(codec)
        self.memory: dict[str, Tensor] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device of the first tokens, as transformers does, without storing any."""
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys ``[B, K, S, D]`` and values ``[B, K, S, V]``.

        Returns:
            The keys and values that the new tokens may attend to, the window before them and themselves; see
            `GrowingLayer.update`.

        Raises:
            ArgumentError: see `GrowingLayer.update`.
        """
        visible, codec = self.append(key_states, value_states), self.codec
        if codec is None:
            return visible[0], visible[1]
        return _attended_states(codec, visible, key_states, value_states, reads_stored=self.reads_stored)

    def append(self, key_states: Tensor, value_states: Tensor, first: Tensor | None = None) -> tuple[Tensor, ...]:
        """Store keys and values, and forget what no later token may attend to; see `GrowingLayer.append`.

        Returns:
            What is stored of the tokens that the new ones may attend to. A `TrellisFormat`'s slots of first tokens
            count from the first of these on; they are below 0 where a window has moved on.

        Raises:
            ArgumentError: see `GrowingLayer.update`.
        """
        keys, values = self._encoded(key_states, value_states, first)
        if not self.cumulative_length:
            self.lazy_initialization(keys, values)
        _refuse_tokens(self.keys, keys, self.cumulative_length + keys.shape[2], self.max_length)
        if self.record_past:  # nothing is dropped then until `crop`
            visible: tuple[Tensor, Tensor] = super().update(keys, values)
        else:
            self.cumulative_length += keys.shape[2]
            visible = self._slide("keys", keys), self._slide("values", values)
        if self.first is None or self.unquantised is None:
            return visible
        return *visible, self.unquantised, self.first - (self.cumulative_length - visible[0].shape[2])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the latest tokens, if the ones before them that a new token sees are held.

        Args:
            tokens_to_remove: the number of tokens to remove, negated.

        Raises:
            ArgumentError: the window has dropped some of those.
            RuntimeError: it does not record the past, as transformers has it.
        """
        left = self.cumulative_length + min(tokens_to_remove, 0)
        held = self.keys.shape[2] if self.is_initialized else 0
        needed = min(max(left, 0), self.sliding_window - 1)
        if self.record_past and held - (self.cumulative_length - left) < needed:
            rule = f"leaves fewer than the {needed} tokens that the window sees, of the {held} that it holds"
            raise ArgumentError("tokens_to_remove", tokens_to_remove, rule)
        super().crop(tokens_to_remove)

    def _slide(self, name: str, new: Tensor) -> Tensor:
        """Append to one of the tensors, and keep the last tokens.

        Returns:
            The tokens that the new ones may attend to, ``[B, K, T + S, D]``.
        """
        cached, S, kept = getattr(self, name), new.shape[2], self.sliding_window - 1
        spare = max(64, self.sliding_window // 4)
        must_concatenate = _must_concatenate(cached, new)
        if must_concatenate or spare < S:
            visible = torch.cat((cached, new), dim=2)
        else:
            visible = _append_in_place(self.memory, name, cached, new, lambda total: total + spare)
        window = visible[:, :, max(0, visible.shape[2] - kept) :]
        if not must_concatenate and spare < S:
            # A prompt: most of its tokens are dropped at once, and their memory with them.
            window = _append_in_place(self.memory, name, None, window, lambda total: total + spare)
        setattr(self, name, window)
        return visible


def _attended_states(
    codec: Codec, tensors: tuple[Tensor, ...], new_keys: Tensor, new_values: Tensor, *, reads_stored: bool
) -> tuple[Tensor, Tensor]:
    """What attention is given of what is stored: that itself, where it attends to it, or what it stands for."""
    stored = Stored(tensors, (new_keys.shape[3], new_values.shape[3]), new_keys.dtype)
    if reads_stored and codec.can_attend(new_keys, new_values):
        return StoredKeys.of(codec, stored), tensors[1]
    return codec.decode(stored)


def _append_in_place(
    memory: dict[str, Tensor], name: str, cached: Tensor | None, new: Tensor, size: Callable[[int], int]
) -> Tensor:
    """Append new tokens to the cached ones, in place where that is possible.

    The cached tokens are a view of the memory as long as transformers' own methods only slice them. Where they have
    made another tensor, it is copied back.

    Args:
        memory: the allocated tensors of a layer by name, each ``[B, K, tokens, D]``.
        name: the name of the tensor in ``memory``.
        cached: ``[B, K, T, D]``; None for none.
        new: ``[B, K, S, D]``.
        size: gives, for the number of tokens there will be, the number to allocate memory for.

    Returns:
        ``[B, K, T + S, D]``, a view of the memory.
    """
    states = _lengthened(memory, name, cached, new, size)
    states[:, :, states.shape[2] - new.shape[2] :] = new
    return states


def _lengthened(
    memory: dict[str, Tensor], name: str, cached: Tensor | None, new: Tensor, size: Callable[[int], int]
) -> Tensor:
    """Make room behind the cached tokens for new ones, which are not written; see `_append_in_place`."""
    count = 0 if cached is None else cached.shape[2]
    total = count + new.shape[2]
    own = memory.get(name)
    start = None if own is None else _place_in_memory(own, cached, new)
    if own is None or start is None or start + total > own.shape[2]:
        B, K, _, D = new.shape
        own, start = new.new_empty(B, K, size(total), D), 0
        if cached is not None:
            own[:, :, :count] = cached
        memory[name] = own
    return own[:, :, start : start + total]


def _place_in_memory(memory: Tensor, cached: Tensor | None, new: Tensor) -> int | None:
    """The position in memory of the first cached token; None where new ones cannot be appended in place."""
    if (
        memory.shape[:2] != new.shape[:2]
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


def _refuse_tokens(cached: Tensor, new: Tensor, total: int, most: int | None) -> None:
    """Refuse tokens that cannot be appended.

    Args:
        cached: the tokens held, ``[B, …]``.
        new: the tokens to append, ``[B, …]``.
        total: the number of tokens there would be.
        most: the number of tokens that there may be; None for no limit.

    Raises:
        ArgumentError: the tokens would be too many, or are of another batch size.
    """
    if most is not None and total > most:
        raise ArgumentError("cache length", total, f"is over max_length = {most}")
    if cached.shape[0] != new.shape[0]:
        rule = f"must be {cached.shape[0]}, the batch size of the tokens held; begin another batch with a new cache"
        raise ArgumentError("batch", new.shape[0], rule)
