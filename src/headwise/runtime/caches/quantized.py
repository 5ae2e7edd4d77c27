"""Layers of a transformers cache whose keys and values are quantised.

New tokens are coded first, and attention is given what their codes stand for, in a prompt too. For few new tokens
headwise's attention is given the codes themselves, of the formats that its kernel reads
(`headwise.runtime.quantization.reader`).

A token's codes, scales and zero points lie in one row of bytes, in the place of its key or value in ``[B, K, T, D]``.
So cropping, beams and batches move rows, and need not know the format; only KIVI's blocks of keys have tensors beside
the rows.

Shapes: B batch, K key–value heads, S new tokens, T cached tokens, D width of keys, V width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.caches.growing import GrowingLayer, Room, SlidingLayer, refuse_tokens
from headwise.runtime.kernels import pack
from headwise.runtime.quantization.formats import EngineFormat, TokenwiseFormat
from headwise.runtime.quantization.groups import group_count
from headwise.runtime.quantization.kivi import KiviCode
from headwise.runtime.quantization.reader import can_read, read_kivi, read_rounded, read_tokenwise, stored_keys


def _refuse_latents(values: Tensor, spelling: object) -> None:
    """Refuse the cache of MLA, which is one tensor of latents and has values of width 0.

    Raises:
        ArgumentError: the values have width 0.
    """
    if values.shape[3] == 0:
        raise ArgumentError("quantize", str(spelling), "is for keys and values of heads, not for latents")


class QuantizedLayer(GrowingLayer):
    """Keys and values in int8 for headwise's kernel, each token's codes next to its scale
    (`headwise.runtime.kernels.pack`).

    The first tokens, those of a prompt, attend to their exact keys and values; later ones to the quantised ones.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; see `GrowingLayer.update`.

        Returns:
            Packed keys and values; the exact ones for the first tokens.

        Raises:
            ArgumentError: see `GrowingLayer.update`; or the values have width 0, as latents do.
        """
        _refuse_latents(value_states, "int8")
        is_first = self.get_seq_length() == 0
        packed = super().update(pack(key_states), pack(value_states), *args, **kwargs)
        return (key_states, value_states) if is_first else packed


class TokenwiseLayer(GrowingLayer):
    """Keys and values of single tokens in codes, for any attention.

    ``keys`` and ``values`` are the rows of bytes of `headwise.runtime.quantization.groups.TokenCode`.

    Args:
        code: of keys and values.
        max_length: see `GrowingLayer`.
        is_read: whether attention is headwise's, which reads codes.
    """

    def __init__(self, code: TokenwiseFormat, max_length: int | None = None, *, is_read: bool = False) -> None:
        super().__init__(max_length)
        self.code, self.is_read = code, is_read

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys ``[B, K, S, D]`` and values ``[B, K, S, V]``.

        Returns:
            All keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` as their codes stand for them, in the dtype of the
            new ones; or the rows of both, the keys' as `headwise.runtime.quantization.reader.StoredKeys`.

        Raises:
            ArgumentError: see `GrowingLayer.update`; or the values have width 0, as latents do.
        """
        rows = super().update(*_encoded(self.code, key_states, value_states), *args, **kwargs)
        return _given(self.code, rows, key_states, value_states, is_read=self.is_read)


class TokenwiseSlidingLayer(SlidingLayer):
    """A sliding window of keys and values in codes; see `TokenwiseLayer` and `SlidingLayer`.

    Args:
        code: of keys and values.
        sliding_window: the tokens of the window.
        max_length: see `SlidingLayer`.
        is_read: see `TokenwiseLayer`.
    """

    def __init__(
        self,
        code: TokenwiseFormat,
        sliding_window: int,
        max_length: int | None = None,
        *,
        is_read: bool = False,
    ) -> None:
        super().__init__(sliding_window, max_length)
        self.code, self.is_read = code, is_read

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys ``[B, K, S, D]`` and values ``[B, K, S, V]``.

        Returns:
            The keys and values that the new tokens may attend to; see `TokenwiseLayer.update`.

        Raises:
            ArgumentError: see `TokenwiseLayer.update`.
        """
        rows = super().update(*_encoded(self.code, key_states, value_states), *args, **kwargs)
        return _given(self.code, rows, key_states, value_states, is_read=self.is_read)


def _encoded(code: TokenwiseFormat, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    _refuse_latents(values, code)
    return code.keys.encode(keys), code.values.encode(values)


def _given(
    code: TokenwiseFormat, rows: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, *, is_read: bool
) -> tuple[Tensor, Tensor]:
    """What attention is given of all tokens, when ``keys`` and ``values`` are new."""
    widths, dtype = (keys.shape[3], values.shape[3]), keys.dtype

    def decode() -> tuple[Tensor, Tensor]:
        return code.keys.decode(rows[0], widths[0], dtype), code.values.decode(rows[1], widths[1], dtype)

    if isinstance(code, EngineFormat):
        return (stored_keys(rows[0], read_rounded(code, rows, widths), decode), rows[1]) if is_read else decode()
    if is_read and can_read(code, keys, values):
        return stored_keys(rows[0], read_tokenwise(code, rows, widths), decode), rows[1]
    return decode()


class KiviLayer(GrowingLayer):
    """Keys coded in blocks of tokens and values coded token by token, for any attention; the latest ones as they are.

    What is coded of a sequence does not depend on how many tokens came at once. Cropping into a block decodes what is
    left of it, so that attention goes on reading the same; its tokens are coded again when the block is full again.

    Attributes:
        keys: rows of codes of the first N tokens, N a whole number of blocks; uint8 ``[B, K, N, bytes]``.
        key_scales: scales and zero points of their blocks, float16 ``[B, K, N / block, 2 · D]``.
        values: rows of bytes of the first N tokens' values, uint8 ``[B, K, N, bytes]``.
        recent_keys: the keys of the other tokens, ``[B, K, T - N, D]``, in the model's dtype.
        recent_values: the values of the other tokens, ``[B, K, T - N, V]``.

    Args:
        code: of keys and values.
        max_length: see `GrowingLayer`.
        is_read: see `TokenwiseLayer`.
    """

    tensor_names: ClassVar[tuple[str, ...]] = ("keys", "key_scales", "values", "recent_keys", "recent_values")

    def __init__(self, code: KiviCode, max_length: int | None = None, *, is_read: bool = False) -> None:
        super().__init__(max_length)
        self.code, self.is_read = code, is_read
        self.rooms = tuple(Room() for _ in self.tensor_names)
        self.key_scales = self.recent_keys = self.recent_values = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype, device and sizes of the first tokens, without storing any."""
        _refuse_latents(value_states, self.code)
        group_count(value_states.shape[3], self.code.block, str(self.code))
        super().lazy_initialization(key_states, value_states)
        no_keys, no_values = (states[:, :, :0].detach().clone() for states in (key_states, value_states))
        self.keys, self.key_scales = self.code.encode_keys(no_keys)
        self.values = self.code.values.encode(no_values)
        self.recent_keys, self.recent_values = no_keys, no_values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys ``[B, K, S, D]`` and values ``[B, K, S, V]``.

        Returns:
            All keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` as the cache has them, in the dtype of the new ones;
            or the rows of both; see `TokenwiseLayer.update`.

        Raises:
            ArgumentError: see `GrowingLayer.update`; or the values have width 0, as latents do.
        """
        if not self.get_seq_length():
            self.lazy_initialization(key_states, value_states)
        total = self.get_seq_length() + key_states.shape[2]
        refuse_tokens(self.keys, key_states, total, self.max_length)
        keys, values = key_states.detach(), value_states.detach()
        count = max(self.code.coded(total) - self.keys.shape[2], 0)  # tokens to code now
        if count:
            keys, values = torch.cat((self.recent_keys, keys), 2), torch.cat((self.recent_values, values), 2)
            rows, scales = self.code.encode_keys(keys[:, :, :count])
            self._extend("keys", rows, self._room_for)
            self._extend(
                "key_scales", scales, lambda blocks: self._room_for(blocks * self.code.block) // self.code.block
            )
            self._extend("values", self.code.values.encode(values[:, :, :count]), self._room_for)
            keys, values = keys[:, :, count:], values[:, :, count:]
            self.recent_keys, self.recent_values = keys[:, :, :0].clone(), values[:, :, :0].clone()
        if keys.shape[2]:
            self._extend("recent_keys", keys, self._recent_room)
            self._extend("recent_values", values, self._recent_room)
        if self.is_read and can_read(self.code, key_states, value_states):
            recent = self.recent_keys, self.recent_values
            read = read_kivi(self.code, (self.keys, self.key_scales, self.values), recent)
            return stored_keys(self.keys, read, self._states), self.values
        return self._states()

    def get_seq_length(self) -> int:
        """T, the number of cached tokens."""
        return int(self.keys.shape[2] + self.recent_keys.shape[2]) if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the latest tokens.

        Args:
            tokens_to_remove: the number of tokens to remove, negated.
        """
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
        keys, values = self._states()
        whole = total // self.code.block * self.code.block
        self.keys, self.values = self.keys[:, :, :whole], self.values[:, :, :whole]
        self.key_scales = self.key_scales[:, :, : whole // self.code.block]
        self.recent_keys, self.recent_values = (states[:, :, whole:total].clone() for states in (keys, values))

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.key_scales = self.recent_keys = self.recent_values = torch.empty(0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        for name in self.tensor_names if self.get_seq_length() else ():
            setattr(self, name, getattr(self, name).repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows of the batch only."""
        for name in self.tensor_names if self.get_seq_length() else ():
            setattr(self, name, getattr(self, name)[indices, ...])

    def _states(self) -> tuple[Tensor, Tensor]:
        """All keys and values as the cache has them."""
        keys = self.code.decode_keys(self.keys, self.key_scales, self.recent_keys.dtype)
        values = self.code.values.decode(self.values, self.recent_values.shape[3], self.recent_values.dtype)
        return torch.cat((keys, self.recent_keys), 2), torch.cat((values, self.recent_values), 2)

    def _extend(self, name: str, new: Tensor, room: Callable[[int], int]) -> None:
        """Append to one of the tensors along its third dimension."""
        memory = self.rooms[self.tensor_names.index(name)]
        setattr(self, name, memory.append(getattr(self, name), new, room))

    def _room_for(self, total: int) -> int:
        if self.max_length is not None:
            return self.code.coded(self.max_length)
        return -(-super()._room_for(total) // self.code.block) * self.code.block

    def _recent_room(self, total: int) -> int:
        """Tokens for which the recent ones have memory: as many as ever wait for a block to fill."""
        most = self.code.recent + self.code.block - 1
        return max(total, most if self.max_length is None else min(most, self.max_length))
