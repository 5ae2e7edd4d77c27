"""Codes of tokens: integers with a scale and a zero point for each group of channels, 8-bit floats, and KIVI.

Codes of fewer than eight bits lie in bytes: code i of a row takes the bits from ``b·i`` on, the lowest bit first.
Kernels attend to integers as they are stored; results differ from those of decoded ones by rounding alone.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T tokens, D channels of a head, G groups of channels.

KIVI codes keys per channel over blocks of tokens, and values per token: Z. Liu et al., "KIVI: A Tuning-Free
Asymmetric 2bit Quantization for KV Cache", ICML 2024, arXiv:2402.02750.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from headwise.costs.formulas.target import GROUP, GROUPS
from headwise.errors import ArgumentError
from headwise.runtime.kernels.gpu import attend_codes, why_not_codes
from headwise.runtime.kernels.mask import Scoring, as_bool_mask
from headwise.runtime.kernels.native import are_plain, why_not
from headwise.runtime.kernels.native.calls import AffineRows, KeyBlocks, attend_affine
from headwise.runtime.kernels.sdpa import FEW_TOKENS
from headwise.runtime.quantization.codec import Codec, Stored, refuse_latents


def packed_bytes(count: int, bits: int) -> int:
    """The bytes of ``count`` codes: ``packed_bytes(16, 3)`` is 6."""
    return -(-count * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes.

    For example ``pack_bits(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2)`` is one byte, ``0b00_11_10_01``.

    Args:
        codes: uint8 ``[…, n]``, each below ``2**bits``.
        bits: 1 to 8.

    Returns:
        uint8 ``[…, packed_bytes(n, bits)]``; unused bits at the end are 0.
    """
    if bits == 8:
        return codes
    n = codes.shape[-1]
    if bits in (2, 4) and n * bits % 8 == 0:
        parts = torch.unflatten(codes, -1, (-1, 8 // bits))
        packed = parts[..., 0].clone()
        for place in range(1, 8 // bits):
            packed |= parts[..., place] << (bits * place)
        return packed
    width = packed_bytes(n, bits)
    padded = torch.nn.functional.pad(codes, (0, -n % 8))
    groups = torch.unflatten(padded, -1, (-1, 8)).to(torch.int64)  # 8 codes fill ``bits`` bytes
    shifts = bits * torch.arange(8, device=codes.device)
    words = (groups << shifts).sum(-1, keepdim=True)
    out = (words >> (8 * torch.arange(bits, device=codes.device))) & 255
    return out.flatten(-2).to(torch.uint8)[..., :width]


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Recover the codes from bytes of `pack_bits`.

    For example ``unpack_bits(pack_bits(codes, 3), 3, codes.shape[-1])`` equals ``codes``.

    Args:
        packed: uint8 ``[…, packed_bytes(count, bits)]``.
        bits: 1 to 8.
        count: n.

    Returns:
        uint8 ``[…, n]``.
    """
    if bits == 8:
        return packed
    if bits in (2, 4) and count * bits % 8 == 0:
        shifts = bits * torch.arange(8 // bits, device=packed.device, dtype=torch.uint8)
        parts: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
        return parts.flatten(-2)
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    groups = torch.unflatten(padded, -1, (-1, bits)).to(torch.int64)
    words = (groups << (8 * torch.arange(bits, device=packed.device))).sum(-1, keepdim=True)
    codes = (words >> (bits * torch.arange(8, device=packed.device))) & (2**bits - 1)
    numbers: Tensor = codes.flatten(-2)
    return numbers.to(torch.uint8)[..., :count]


BITS = (8, 4, 3, 2)
"""The numbers of bits that an integer code may have."""

HADAMARD = "+hadamard"
"""The end of the spelling of a code whose channels are rotated first."""

_FLOAT8 = torch.float8_e4m3fn
_HALF = 2  # bytes of a scale or a zero point, which are float16


class TokenCode(Protocol):
    """A code of the keys or values of single tokens, each row of bytes a token's in one head."""

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row, for heads of ``width`` channels."""
        ...

    def encode(self, states: Tensor) -> Tensor:
        """Rows of bytes, uint8 ``[B, K, T, token_bytes(D)]``, of keys or values ``[B, K, T, D]``."""
        ...

    def decode(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The keys or values ``[B, K, T, width]`` that rows stand for."""
        ...


@dataclass(frozen=True)
class GroupCode:
    """Integers with a scale and a zero point for each group of a token's channels.

    A number is decoded as ``zero + scale · code``. A row holds the packed codes of all channels, then the groups'
    scales and then their zero points in float16. Numbers are within half a scale of what they are decoded as; a
    group with NaN or an infinity, or with numbers beyond float16, is decoded as NaN.

    Attributes:
        bits: one of `BITS`.
        group: the channels of a group, one of `headwise.costs.formulas.target.GROUPS`; heads with fewer channels
            have one group.
        hadamard: whether a head's channels are multiplied by a Hadamard matrix before they are coded and after they
            are decoded, so that a large channel is spread over all. D must then be a power of two.
    """

    bits: int
    group: int = GROUP
    hadamard: bool = False

    def __str__(self) -> str:
        group = "" if self.group == GROUP else f":{self.group}"
        return f"int{self.bits}{group}{HADAMARD * self.hadamard}"

    def groups(self, width: int) -> int:
        """G, the number of groups of a head.

        Args:
            width: D.

        Raises:
            ArgumentError: the group does not divide D, or D is no power of two and is to be rotated.
        """
        if self.hadamard and width & (width - 1):
            rule = f"needs heads whose width is a power of two, and this model's have {width} channels"
            raise ArgumentError("quantize", str(self), rule)
        return group_count(width, self.group, str(self))

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row: codes, scales and zero points.

        For example ``GroupCode(4).token_bytes(64)`` is 36.

        Args:
            width: D.
        """
        return packed_bytes(width, self.bits) + 2 * _HALF * self.groups(width)

    def encode(self, states: Tensor) -> Tensor:
        """Rows of bytes, uint8 ``[B, K, T, token_bytes(D)]``, of keys or values ``[B, K, T, D]``."""
        groups = self.groups(states.shape[-1])
        turned = rotated(states.float()) if self.hadamard else states.float()
        codes, scale, zero = affine_codes(torch.unflatten(turned, -1, (groups, -1)), self.bits)
        return torch.cat(
            (pack_bits(codes.flatten(-2), self.bits), as_bytes(scale, torch.float16), as_bytes(zero, torch.float16)),
            -1,
        )

    def decode(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The keys or values ``[B, K, T, width]`` that rows stand for."""
        groups, end = self.groups(width), packed_bytes(width, self.bits)
        codes = torch.unflatten(unpack_bits(rows[..., :end], self.bits, width), -1, (groups, -1))
        scale, zero = from_bytes(rows[..., end:], torch.float16).float().chunk(2, -1)
        states = (codes.float() * scale[..., None] + zero[..., None]).flatten(-2)
        return (rotated(states) if self.hadamard else states).to(dtype)

    def as_affine(self, rows: Tensor, width: int) -> AffineRows:
        """The rows of heads of ``width`` channels as `attend_to_codes` takes them."""
        return AffineRows(rows, width, self.bits, self.groups(width))


@dataclass(frozen=True)
class Float8Code:
    """Numbers of 8 bits with 4 bits of exponent and 3 of mantissa (e4m3), without a scale.

    Numbers beyond ±448 become ±448; infinities become NaN.
    """

    def __str__(self) -> str:
        return "fp8"

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row: one for each of its ``width`` channels."""
        return width

    def encode(self, states: Tensor) -> Tensor:
        """Rows of bytes, uint8 ``[B, K, T, D]``, of keys or values ``[B, K, T, D]``."""
        numbers = states.float()
        most = torch.finfo(_FLOAT8).max
        return numbers.clamp(-most, most).masked_fill(numbers.isinf(), torch.nan).to(_FLOAT8).view(torch.uint8)

    def decode(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The keys or values ``[B, K, T, width]`` that rows stand for."""
        assert rows.shape[-1] == width
        return rows.view(_FLOAT8).to(dtype)


def group_count(width: int, group: int, spelling: str) -> int:
    """The number of groups of a head; one where the head has fewer channels than a group.

    Args:
        width: D.
        group: the channels of a group.
        spelling: the spelling of the format, for the error.

    Raises:
        ArgumentError: the group does not divide D.
    """
    if width <= group:
        return 1
    if width % group:
        fitting = ", ".join(str(size) for size in GROUPS if width % size == 0 or size >= width)
        rule = f"has groups of {group} channels, which do not divide the {width} of this model's heads"
        raise ArgumentError("quantize", spelling, f"{rule}; groups of {fitting} do" if fitting else rule)
    return width // group


def can_attend_to_codes(keys: Tensor, values: Tensor) -> bool:
    """Whether a kernel attends to integer codes, and is the fastest way: for few new tokens.

    Args:
        keys: the keys of the new tokens, ``[B, K, S, D]``.
        values: the values of the new tokens, ``[B, K, S, V]``.
    """
    if keys.shape[2] > FEW_TOKENS:
        return False
    if is_on_gpu(keys):
        return why_not_codes(keys, values) is None
    needs_grad = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
    return are_plain(keys, values) and why_not(keys.dtype, keys.device, needs_grad=needs_grad) is None


def attend_to_codes(
    query: Tensor,
    keys: AffineRows,
    values: AffineRows,
    scoring: Scoring,
    *,
    blocks: KeyBlocks | None = None,
    recent: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `headwise.attend` by a kernel that reads integer codes; see `can_attend_to_codes`.

    Args:
        query: ``[B, H, S, D]``.
        keys: the codes of the older tokens' keys.
        values: the codes of the older tokens' values.
        scoring: that of `headwise.runtime.quantization.codec.Codec.attend`.
        blocks: scales of the keys; None where they are in their rows.
        recent: keys and values of the tokens behind those in codes.

    Returns:
        ``[B, H, S, V]``.
    """
    B, H, S, _ = query.shape
    if scoring.mask is not None:
        total = keys.rows.shape[2] + (0 if recent is None else recent[0].shape[2])
        scoring = scoring._replace(mask=as_bool_mask(scoring.mask, (B, H, S, total)))
    attend = attend_codes if is_on_gpu(query) else attend_affine
    return attend(query, keys, values, scoring, blocks=blocks, late=recent)


def is_on_gpu(states: Tensor) -> bool:
    """Whether Triton's kernels attend to states of any shape, and not the compiled ones."""
    return states.is_cuda


def affine_codes(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integer codes of groups of numbers, each group with a scale and a zero point.

    The zero point is rounded down to float16 and the scale up, so that all numbers of the group lie within the codes'
    range, and each within half a scale of ``zero + scale · code``.

    Args:
        values: float32 ``[…, n]``, the groups in the last dimension.
        bits: the bits of a code.

    Returns:
        Codes, uint8 ``[…, n]``; scales and zero points, float16 ``[…]``. A group that holds anything but finite
        numbers has codes of 0 and a scale that is not finite, which decodes as NaN.
    """
    most = 2**bits - 1
    zero = _float16_below(values.amin(-1))
    exact_zero = zero.float()
    scale = -_float16_below((exact_zero - values.amax(-1)) / most)
    codes = ((values - exact_zero[..., None]) / scale.float()[..., None]).round()
    return codes.nan_to_num(0.0).clamp(0, most).to(torch.uint8), scale, zero


def rotated(states: Tensor) -> Tensor:
    """Each row ``[…, D]`` times the Hadamard matrix over √D, which is its own inverse.

    Args:
        states: ``[…, D]``; D is a power of two.
    """
    width = states.shape[-1]
    step = 1
    # Sums of pairs, as the rounding of a matrix product may depend on how many tokens are rotated at once.
    while step < width:
        first, second = torch.unflatten(states, -1, (-1, 2, step)).unbind(-2)
        states = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return states / math.sqrt(width)


def _float16_below(values: Tensor) -> Tensor:
    """The largest float16 that is not above each number; NaN where it is NaN."""
    nearest = values.half()
    bits = nearest.view(torch.int16)  # as integers, negative numbers fall as their bits rise
    below = torch.where(bits < 0, bits + 1, bits - 1)
    return torch.where(nearest.float() > values, below, bits).view(torch.float16)


def as_bytes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of numbers in a dtype: uint8 ``[…, n · bytes]`` of ``[…, n]``."""
    # A copy, because numbers of no token count as contiguous however their strides are.
    return numbers.to(dtype).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers ``[…, n]`` of `as_bytes`, in their dtype."""
    # A copy, because a view in a wider dtype would need rows that begin at multiples of its bytes.
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


KIVI_BITS = (4, 3, 2)
"""The numbers of bits that a code may have."""

KIVI_BLOCK = GROUP
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
        bits: one of `KIVI_BITS`.
        block: the tokens of a block of keys; also the channels of a value's group (`GroupCode`).
        recent: the number of latest tokens that are never coded.
    """

    tensors: ClassVar[tuple[str, ...]] = ("keys", "values", "key_scales", "recent_keys", "recent_values")

    bits: int
    block: int = KIVI_BLOCK
    recent: int = 0

    def __str__(self) -> str:
        block = "" if (self.block, self.recent) == (KIVI_BLOCK, 0) else f":{self.block}"
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

    def attend(self, query: Tensor, stored: Stored, scoring: Scoring) -> Tensor:
        """See `Codec.attend`."""
        (key_rows, value_rows, scales, *recent), (D, V), _ = stored
        keys, values = AffineRows(key_rows, D, self.bits, 0), self.values.as_affine(value_rows, V)
        latest, blocks = (recent[0], recent[1]), KeyBlocks(scales, self.block)
        return attend_to_codes(query, keys, values, scoring, blocks=blocks, recent=latest)

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
