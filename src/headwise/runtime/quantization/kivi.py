"""KIVI: keys coded per channel over blocks of tokens, values per token.

Source: Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024, arXiv:2402.02750.

Shapes: B batch, K key–value heads, T tokens, N blocks of tokens, D channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headwise.costs.formulas.target import GROUP
from headwise.runtime.kernels.native.calls import AffineRows, KeyBlocks
from headwise.runtime.quantization.codec import Codec, Stored, refuse_latents
from headwise.runtime.quantization.groups import (
    GroupCode,
    affine_codes,
    attend_to_codes,
    can_attend_to_codes,
    group_count,
    pack_bits,
    packed_bytes,
    unpack_bits,
)

BITS = (4, 3, 2)
"""The numbers of bits that a code may have."""

BLOCK = GROUP
"""The tokens of a block where the user names no other number."""


@dataclass(frozen=True)
class KiviCode(Codec):
    """Integers for keys and values; each channel of the keys has a scale and a zero point for each block of tokens.

    Keys have a few channels that are large in every token, so that a channel's numbers are alike and a token's are
    not. Only whole blocks are coded. The latest tokens are kept as they are: those that fill no block yet, and
    ``recent`` more.

    What is stored are rows of codes of the keys; rows of the values; for each block the scales and then the zero
    points of the keys' channels, float16 ``[B, K, N, 2 · D]``; and keys and values of the latest tokens.

    Attributes:
        bits: one of `BITS`.
        block: the tokens of a block of keys; also the channels of a value's group (`GroupCode`).
        recent: the number of latest tokens that are never coded.
    """

    tensors: ClassVar[tuple[str, ...]] = ("keys", "values", "key_scales", "recent_keys", "recent_values")

    bits: int
    block: int = BLOCK
    recent: int = 0

    def __str__(self) -> str:
        block = "" if (self.block, self.recent) == (BLOCK, 0) else f":{self.block}"
        return f"kivi{self.bits}{block}{f':{self.recent}' if self.recent else ''}"

    @property
    def values(self) -> GroupCode:
        """The code of the values."""
        return GroupCode(self.bits, self.block)

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Rows of whole blocks' keys and values, and scales of the keys; see `Codec.encode`."""
        refuse_latents(values, self)
        group_count(values.shape[3], self.block, str(self))
        rows, scales = self.encode_keys(keys)
        return rows, self.values.encode(values), scales

    def decode(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """All keys and values, in the dtype of the latest ones, which are kept as they are; see `Codec.decode`."""
        key_rows, value_rows, scales, keys, values = stored.tensors
        first = self.decode_keys(key_rows, scales, keys.dtype)
        return (
            torch.cat((first, keys), 2),
            torch.cat((self.values.decode(value_rows, values.shape[3], values.dtype), values), 2),
        )

    def can_attend(self, keys: Tensor, values: Tensor) -> bool:
        """See `Codec.can_attend`."""
        return can_attend_to_codes(keys, values)

    def attend(self, query: Tensor, stored: Stored, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
        """See `Codec.attend`."""
        (key_rows, value_rows, scales, *recent), (D, V), _ = stored
        keys, values = AffineRows(key_rows, D, self.bits, 0), self.values.as_affine(value_rows, V)
        latest, blocks = (recent[0], recent[1]), KeyBlocks(scales, self.block)
        return attend_to_codes(query, keys, values, mask, is_causal, scale, blocks=blocks, recent=latest)

    def encode_keys(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of blocks of keys.

        Args:
            keys: ``[B, K, N · block, D]``.

        Returns:
            Packed codes, a row for each token, uint8 ``[B, K, N · block, packed_bytes(D, bits)]``; and for each block
            the channels' scales and then their zero points, float16 ``[B, K, N, 2 · D]``.
        """
        channels = torch.unflatten(keys.float(), -2, (-1, self.block)).transpose(-1, -2)  # [B, K, N, D, block]
        codes, scale, zero = affine_codes(channels, self.bits)
        tokens = codes.transpose(-1, -2).flatten(-3, -2)
        return pack_bits(tokens.contiguous(), self.bits), torch.cat((scale, zero), -1)

    def decode_keys(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The keys ``[B, K, N · block, D]`` that the codes and scales of `encode_keys` stand for."""
        scale, zero = scales.float().chunk(2, -1)
        codes = torch.unflatten(unpack_bits(rows, self.bits, scale.shape[-1]), -2, (-1, self.block))
        keys = codes.float() * scale[..., None, :] + zero[..., None, :]
        return keys.flatten(-3, -2).to(dtype)

    def block_bytes(self, key_width: int, value_width: int) -> int:
        """Bytes of a block of tokens in one head: keys and values, with all scales and zero points.

        For example ``KiviCode(4).block_bytes(64, 64)`` is 4608.

        Args:
            key_width: D of the keys.
            value_width: D of the values.
        """
        keys = self.block * packed_bytes(key_width, self.bits) + 2 * 2 * key_width
        return keys + self.block * self.values.token_bytes(value_width)
