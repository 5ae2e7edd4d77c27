"""The cache of one layer: preallocated, filled in place, read as views.

Shapes: B batch, S new tokens, T tokens held. `AttentionLayer.new_cache` makes the cache that fits a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import ArgumentError


class AttentionCache:
    """Past tokens of one layer, in tensors ``[B, heads, max_length, width]``.

    For example ``AttentionCache(1, [(2, 64), (2, 64)], 1024, dtype=torch.float32)`` holds keys and values of two
    heads; a layer's `new_cache` makes the one that fits it.

    Keys and values are two such tensors; MLA's latent and rotary key are one, so that reading both is one pass.
    Slots beyond the tokens held are uninitialised and never read. With a sliding window there is memory for the
    window's tokens only, and older ones are forgotten.

    Args:
        batch_size: B.
        shapes: (heads, width) of each tensor.
        max_length: the most tokens it can be given.
        dtype: the dtype of the tensors.
        device: the device of the tensors.
        window: how many of the latest tokens are kept; all when None.

    Raises:
        ArgumentError: a size is not a whole number of at least 1.
    """

    def __init__(
        self,
        batch_size: int,
        shapes: Sequence[tuple[int, int]],
        max_length: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        window: int | None = None,
    ) -> None:
        sizes = (("batch_size", batch_size), ("max_length", max_length), ("window", 1 if window is None else window))
        for name, value in sizes:
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(name, value, "must be a whole number of at least 1")
        self.max_length = max_length
        """The most tokens it can be given."""
        self.length = 0
        """Tokens it has been given, including those that a window has forgotten."""
        capacity = max_length if window is None else min(max_length, window)
        self.buffers = [
            torch.empty(batch_size, heads, capacity, width, dtype=dtype, device=device) for heads, width in shapes
        ]

    @property
    def held(self) -> int:
        """Tokens it still holds: all of them, or the window's."""
        return min(self.length, self.buffers[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes allocated, whether filled or not."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new tokens, and return all tokens that they may attend to.

        These are all tokens held, as views, or, where a window is full, the window before each new token: at most
        ``window − 1 + S`` tokens, copied.

        Args:
            new: ``[B, heads, S, width]`` for each tensor of the cache.

        Returns:
            ``[B, heads, tokens, width]`` for each tensor of the cache.

        Raises:
            ArgumentError: the cache is full, or a batch size, shape or dtype does not fit.
        """
        S = new[0].shape[2]
        end = self.length + S
        if end > self.max_length:
            raise ArgumentError("cache length", end, f"is over max_length = {self.max_length}")
        for buffer, states in zip(self.buffers, new, strict=True):
            B, heads, _, width = buffer.shape
            if states.shape[0] != B:
                raise ArgumentError("batch", states.shape[0], f"must be {B}, the batch size the cache was made for")
            if states.shape != (B, heads, S, width) or states.dtype != buffer.dtype:
                rule = f"must be {(B, heads, S, width)} {buffer.dtype}"
                raise ArgumentError("cached states", (tuple(states.shape), states.dtype), rule)
        capacity, stored = self.buffers[0].shape[2], self.held
        if end <= capacity:
            for buffer, states in zip(self.buffers, new, strict=True):
                buffer[:, :, stored:end] = states
            self.length = end
            return self.views()
        kept = min(stored, capacity - 1)  # older tokens that the first new token still sees
        attended = tuple(
            torch.cat((buffer[:, :, stored - kept : stored], states), dim=2)  # [B, heads, kept + S, width]
            for buffer, states in zip(self.buffers, new, strict=True)
        )
        if S == 1:  # the new token sees exactly the tokens that stay in the cache
            self.buffers = [states.detach() for states in attended]
        else:
            for buffer, states in zip(self.buffers, attended, strict=True):
                buffer[:] = states[:, :, -capacity:]
        self.length = end
        return attended

    def views(self) -> tuple[Tensor, ...]:
        """All cached tokens, as views ``[B, heads, held, width]``."""
        return tuple(buffer[:, :, : self.held] for buffer in self.buffers)

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens.

        Raises:
            ArgumentError: fewer tokens are held, or a window has forgotten some of them.
        """
        if not 0 <= length <= self.length:
            raise ArgumentError("length", length, f"must be between 0 and the {self.length} tokens held")
        if length < self.length > self.held:
            capacity = self.buffers[0].shape[2]
            raise ArgumentError("length", length, f"cannot be cropped to: only the last {capacity} tokens are held")
        self.length = length

    def reorder(self, indices: Tensor) -> None:
        """Give sequence b the tokens of sequence ``indices[b]``, as beam search needs.

        Raises:
            ArgumentError: ``indices`` is not one row number for each sequence.
        """
        if indices.shape != (self.buffers[0].shape[0],) or indices.dtype == torch.bool:
            rule = f"must be one row number for each of {self.buffers[0].shape[0]} rows"
            raise ArgumentError("indices shape", tuple(indices.shape), rule)
        for buffer in self.buffers:
            buffer[:, :, : self.held] = buffer[indices, :, : self.held]

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.length = 0
