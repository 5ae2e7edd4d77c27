"""`Codec`: how a layer of a cache stores keys and values, in fewer bits than they have.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D width of keys, V width of values.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels.mask import Scoring


class Stored(NamedTuple):
    """What a layer of a cache has stored of all its tokens.

    Attributes:
        tensors: one for each of `Codec.tensors`.
        widths: D and V.
        dtype: the dtype of the keys and values that attention reads.
    """

    tensors: tuple[Tensor, ...]
    widths: tuple[int, int]
    dtype: torch.dtype


class Codec:
    """How a layer of a cache stores keys and values, and how attention reads what is stored.

    What is stored is one tensor for each name in ``tensors``: rows of bytes of the keys and of the values, a token
    in the place of its key or value in ``[B, K, T, D]``, and whatever else the codec needs. So cropping, beams and
    batches move rows, and need not know what they mean.

    Attributes:
        tensors: the names of the stored tensors; rows of keys and of values come first.
        exact_prompt: whether the first tokens, those of a prompt, attend to their keys and values as they were.
        block: how many tokens are coded together; those that do not fill a block yet are kept as they are.
        recent: how many more of the latest tokens are kept as they are.
    """

    tensors: ClassVar[tuple[str, ...]] = ("keys", "values")
    exact_prompt: ClassVar[bool] = False
    block: int = 1
    recent: int = 0

    def coded(self, tokens: int) -> int:
        """How many of a sequence's tokens are coded, in whole blocks.

        For example ``KiviCode(4).coded(200)`` is 192.
        """
        return max(tokens - self.recent, 0) // self.block * self.block

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """What is stored of tokens.

        Args:
            keys: ``[B, K, S, D]``; S is a multiple of ``block``.
            values: ``[B, K, S, V]``.

        Returns:
            Rows of the keys and of the values, ``[B, K, S, bytes]``; and, where blocks have scales of their own,
            those, ``[B, K, S / block, …]``.

        Raises:
            ArgumentError: the codec does not store keys and values of these widths.
        """
        raise NotImplementedError

    def decode(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """The keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` that what is stored stands for."""
        raise NotImplementedError

    def can_attend(self, keys: Tensor, values: Tensor) -> bool:
        """Whether `attend` applies, and is the fastest way, for new ``[B, K, S, D]`` and ``[B, K, S, V]``."""
        return False

    def attend(self, query: Tensor, stored: Stored, scoring: Scoring) -> Tensor:
        """Compute `headwise.attend` from what is stored, without decoding all of it.

        Args:
            query: ``[B, H, S, D]``.
            stored: what the layer has stored of all tokens.
            scoring: which tokens queries attend to, and the factor of their scores; the mask may also be of 0/1
                integers.

        Returns:
            ``[B, H, S, V]``.
        """
        raise NotImplementedError


class StoredKeys(Tensor):
    """Rows of keys ``[B, K, T, bytes]`` in the place of the keys, for attention that reads what is stored.

    No model looks into keys between its cache and its attention, so that headwise's attention can be given rows in
    their place. It does not know how they are coded, and has them attend.

    Attributes:
        codec: the codec that attends to the rows, or decodes them.
        stored: what the layer has stored of all tokens.
    """

    codec: Codec
    stored: Stored

    # Operations on it are those of its rows.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(codec: Codec, stored: Stored) -> StoredKeys:
        """The rows of the keys, with what is needed to read them."""
        keys = stored.tensors[0].as_subclass(StoredKeys)
        keys.codec, keys.stored = codec, stored
        return keys

    def attend(self, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
        """`Codec.attend`; the scale is ``1/sqrt(D)`` when None."""
        scale = query.shape[3] ** -0.5 if scale is None else scale
        return self.codec.attend(query, self.stored, Scoring(mask, is_causal, scale))

    def decode(self) -> tuple[Tensor, Tensor]:
        """`Codec.decode`."""
        return self.codec.decode(self.stored)


def refuse_latents(values: Tensor, spelling: object) -> None:
    """Refuse the cache of MLA, which is one tensor of latents and has values of width 0.

    Raises:
        ArgumentError: the values have width 0.
    """
    if values.shape[3] == 0:
        raise ArgumentError("quantize", str(spelling), "is for keys and values of heads, not for latents")
