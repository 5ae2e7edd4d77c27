"""llama.cpp's types of cached keys and values: blocks of 32 channels, bit by bit as ggml stores them.

Source: ggml's ``quantize_row_*_ref`` and ``dequantize_row_*`` (ggml-quants.c), and llama.cpp's rotation of queries,
keys and values (llama-kv-cache.cpp), both read in 2026-11.

Shapes: B batch, K key–value heads, T tokens, D channels of a head, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.models.specs.gguf_header import TYPES
from headwise.runtime.quantization.engine_code import EngineCode
from headwise.runtime.quantization.groups import as_bytes, from_bytes, rotated

BLOCK = 32
"""The number of channels of a block."""

_ROTATED = 64
"""Heads are rotated whose number of channels is a multiple of this."""

_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of ``iq4_nl`` stand for."""

_SYMMETRIC = {"q4_0": 4, "q5_0": 5}
_AFFINE = {"q4_1": 4, "q5_1": 5}
_WIDE = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_BYTES = {name.lower(): size for name, values, size in TYPES.values() if values == BLOCK}


@dataclass(frozen=True)
class GgmlCode(EngineCode):
    """Rows of keys or values as ggml stores them: blocks of 32 channels with a float16 scale each.

    For example ``GgmlCode("q4_0").token_bytes(64)`` is 36.

    Attributes:
        kind: one of `GGML_TYPES`.
    """

    kind: str

    def __str__(self) -> str:
        return self.kind

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row.

        Args:
            width: D.

        Raises:
            ArgumentError: the type has blocks, and D is no whole number of them.
        """
        if self.kind in _WIDE:
            return width * _WIDE[self.kind].itemsize
        if width % BLOCK:
            rule = f"has blocks of {BLOCK} channels, which do not divide the {width} of this model's heads"
            raise ArgumentError("quantize", self.kind, rule)
        return width // BLOCK * _BYTES[self.kind]

    @property
    def rounds(self) -> bool:
        """Whether it stores codes in blocks, and not numbers."""
        return self.kind not in _WIDE

    def block(self, width: int) -> int:
        """How many channels share a scale: 32.

        Raises:
            ArgumentError: the blocks do not divide a head.
        """
        self.token_bytes(width)
        return BLOCK

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes, uint8 ``[…, token_bytes(D)]``, of states ``[…, D]``."""
        self.token_bytes(turned.shape[-1])
        if self.kind in _WIDE:
            return turned.to(_WIDE[self.kind]).contiguous().view(torch.uint8)
        encode, _ = _CODES[self.kind]
        return torch.cat(encode(torch.unflatten(turned.float(), -1, (-1, BLOCK))), -1).flatten(-2)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The states ``[…, width]`` that rows stand for, in float32."""
        if self.kind in _WIDE:
            return rows.contiguous().view(_WIDE[self.kind])[..., :width].float()
        _, decode = _CODES[self.kind]
        return decode(torch.unflatten(rows, -1, (-1, _BYTES[self.kind]))).flatten(-2)

    @property
    def spread(self) -> Literal["size", "range"]:
        """What the step of a block follows from: the range of its numbers for types that have an offset."""
        return "range" if self.kind in _AFFINE else "size"

    def rounded_queries(self, turned: Tensor) -> Tensor:
        """Queries ``[…, D]`` as ggml's CPU backend multiplies them with keys of this type, in float32."""
        operand = GgmlCode(self.kind if self.kind in _WIDE else "q8_0")
        return operand.as_read(operand.stored(turned), turned.shape[-1])


@dataclass(frozen=True)
class LlamaCppCode(GgmlCode):
    """One side of llama.cpp's cache: a ggml type, behind llama.cpp's order and rotation of a head's channels.

    Where the type has blocks and D is a multiple of 64, llama.cpp multiplies what it stores by a Hadamard matrix
    first: keys, and queries with them, by the largest one that divides D, values by one of 64.

    Attributes:
        is_keys: whether it is the side of the keys.
        is_interleaved: whether a GGUF file keeps the two channels of a rotary pair side by side, where transformers
            has them half a head apart; of keys alone.
    """

    is_keys: bool
    is_interleaved: bool = False

    def __str__(self) -> str:
        return self.kind

    def interleaved(self) -> LlamaCppCode:
        """The code for a model whose file keeps the two channels of a rotary pair side by side."""
        return replace(self, is_interleaved=self.is_keys)

    def turned(self, states: Tensor) -> Tensor:
        """Queries, keys or values ``[…, D]`` in the order and rotation that rows are stored in."""
        if self.is_interleaved:
            states = torch.unflatten(states, -1, (2, -1)).transpose(-1, -2).flatten(-2)
        return self._rotated(states)

    def turned_back(self, states: Tensor) -> Tensor:
        """Undo `turned` for sums of values ``[…, D]``."""
        states = self._rotated(states)
        if self.is_interleaved:
            states = torch.unflatten(states, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return states

    def _rotated(self, states: Tensor) -> Tensor:
        """Times the symmetric Hadamard matrix, which is its own inverse."""
        width = states.shape[-1]
        if self.kind in _WIDE or width % _ROTATED:
            return states
        size = width & -width if self.is_keys else _ROTATED
        return rotated(torch.unflatten(states, -1, (-1, size))).flatten(-2)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, 1 / scale, 0.0)


def _half(values: Tensor) -> Tensor:
    """Bytes of numbers ``[…, 1]`` as float16, ``[…, 2]``."""
    return as_bytes(values, torch.float16)


def _from_half(parts: Tensor) -> Tensor:
    """Numbers ``[…, 1]`` of their bytes as float16, ``[…, 2]``."""
    return from_bytes(parts, torch.float16).float()


def _largest(blocks: Tensor) -> Tensor:
    """The number of largest magnitude in each block ``[…, 32]``, the first of equal ones."""
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))


def _nibbles(codes: Tensor) -> Tensor:
    """Low nibbles of the first half of a block beside those of the second half."""
    first, second = (codes & 15).chunk(2, -1)
    return first | (second << 4)


def _from_nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(codes: Tensor) -> Tensor:
    """The fifth bit of each code of a block, in four bytes."""
    bits = torch.unflatten(codes >> 4, -1, (4, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def _from_fifth_bits(packed: Tensor) -> Tensor:
    return (((packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1) << 4).flatten(-2)


def _encode_eight(blocks: Tensor) -> tuple[Tensor, ...]:
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = largest / 127
    # As ggml does on x86: rounded to even, by 127 over the largest; elsewhere half a code is rounded away from zero.
    codes = (blocks * torch.where(largest != 0, 127 / largest, 0.0)).round().to(torch.int8)
    return _half(scale), codes.view(torch.uint8)


def _decode_eight(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].contiguous().view(torch.int8).float() * _from_half(blocks[..., :2])


def _packed(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Codes of four or five bits: the fifth bits, where there are some, and the nibbles."""
    return (_fifth_bits(codes), _nibbles(codes)) if bits > 4 else (_nibbles(codes),)


def _unpacked(blocks: Tensor, bits: int, at: int) -> Tensor:
    """Codes of four or five bits; a block ends with the nibbles, and its fifth bits begin with byte ``at``."""
    codes = _from_nibbles(blocks[..., -16:])
    return codes | _from_fifth_bits(blocks[..., at : at + 4]) if bits > 4 else codes


def _encode_symmetric(blocks: Tensor, *, bits: int) -> tuple[Tensor, ...]:
    middle = 2 ** (bits - 1)
    scale = _largest(blocks) / -middle
    codes = (blocks * _reciprocal(scale) + (middle + 0.5)).clamp(0, 2 * middle - 1).to(torch.uint8)
    return _half(scale), *_packed(codes, bits)


def _decode_symmetric(blocks: Tensor, *, bits: int) -> Tensor:
    return (_unpacked(blocks, bits, 2).float() - 2.0 ** (bits - 1)) * _from_half(blocks[..., :2])


def _encode_affine(blocks: Tensor, *, bits: int) -> tuple[Tensor, ...]:
    most, least = 2**bits - 1, blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - least) / most
    codes = ((blocks - least) * _reciprocal(scale) + 0.5).clamp(0, most).to(torch.uint8)
    return _half(scale), _half(least), *_packed(codes, bits)


def _decode_affine(blocks: Tensor, *, bits: int) -> Tensor:
    return _unpacked(blocks, bits, 4).float() * _from_half(blocks[..., :2]) + _from_half(blocks[..., 2:4])


def _encode_levels(blocks: Tensor) -> tuple[Tensor, ...]:
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device=blocks.device)
    # The largest number gets the first level. Codes stay as they are; the scale is then fitted to them by least
    # squares, each number weighed by its square.
    codes = _nearest_level(blocks * _reciprocal(_largest(blocks) / _LEVELS[0]), levels)
    guess, weight = levels[codes.long()], blocks * blocks
    below = (weight * guess * guess).sum(-1, keepdim=True)
    scale = torch.where(below > 0, (weight * guess * blocks).sum(-1, keepdim=True) / below, 0.0)
    return _half(scale), _nibbles(codes)


def _nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """Codes of the nearest levels; of two equally near, the upper."""
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2, right=True).to(torch.uint8)


def _decode_levels(blocks: Tensor) -> Tensor:
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device=blocks.device)
    return levels[_from_nibbles(blocks[..., 2:]).long()] * _from_half(blocks[..., :2])


_CODES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], Callable[[Tensor], Tensor]]] = {
    "q8_0": (_encode_eight, _decode_eight),
    **{k: (partial(_encode_symmetric, bits=n), partial(_decode_symmetric, bits=n)) for k, n in _SYMMETRIC.items()},
    **{k: (partial(_encode_affine, bits=n), partial(_decode_affine, bits=n)) for k, n in _AFFINE.items()},
    "iq4_nl": (_encode_levels, _decode_levels),
}
"""How blocks ``[…, 32]`` of each type become bytes, in parts, and how bytes ``[…, bytes]`` become blocks."""
