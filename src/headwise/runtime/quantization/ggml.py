"""llama.cpp's types of cached keys and values: blocks of 32 channels, bit by bit as ggml stores them.

Source: ggml's ``quantize_row_*_ref`` and ``dequantize_row_*`` (ggml-quants.c), and llama.cpp's rotation of queries,
keys and values (llama-kv-cache.cpp), both read in 2026-11.

Shapes: B batch, K key–value heads, T tokens, D channels of a head, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.models.specs.gguf_header import TYPES
from headwise.runtime.quantization.engine_code import EngineCode
from headwise.runtime.quantization.groups import rotated

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
_OPERANDS = {"f32": "f32", "f16": "f16", "bf16": "bf16"}
"""What queries are rounded to before they are multiplied with keys of a type; eight bits for all others."""


@dataclass(frozen=True)
class GgmlCode:
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

    def encode(self, states: Tensor) -> Tensor:
        """Rows of bytes, uint8 ``[B, K, T, token_bytes(D)]``, of keys or values ``[B, K, T, D]``."""
        self.token_bytes(states.shape[-1])
        if self.kind in _WIDE:
            return states.to(_WIDE[self.kind]).contiguous().view(torch.uint8)
        parts = _ENCODERS[self.kind](torch.unflatten(states.float(), -1, (-1, BLOCK)))
        return torch.cat(parts, -1).flatten(-2)

    def decode(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The keys or values ``[B, K, T, width]`` that rows stand for."""
        if self.kind in _WIDE:
            return rows.contiguous().view(_WIDE[self.kind])[..., :width].to(dtype)
        blocks = torch.unflatten(rows, -1, (-1, _BYTES[self.kind]))
        return _DECODERS[self.kind](blocks).flatten(-2).to(dtype)

    def steps(self, states: Tensor) -> Tensor:
        """How far apart the codes of each block lie, ``[…, blocks]``, but for a factor that all blocks share.

        For example ``GgmlCode("q4_0").steps(torch.tensor([[3.0, -1.0] * 16]))`` is ``[[3.0]]``.

        Args:
            states: ``[…, D]`` of a type with blocks.
        """
        blocks = torch.unflatten(states, -1, (-1, BLOCK))
        return (blocks.amax(-1) - blocks.amin(-1)) / 2 if self.kind in _AFFINE else blocks.abs().amax(-1)

    @property
    def has_blocks(self) -> bool:
        """Whether it stores codes in blocks, and not numbers."""
        return self.kind not in _WIDE

    def rounded_queries(self, queries: Tensor) -> Tensor:
        """Queries ``[…, D]`` as ggml's CPU backend multiplies them with keys of this type, in float32."""
        kind = _OPERANDS.get(self.kind, "q8_0")
        width = queries.shape[-1]
        code = GgmlCode(kind)
        return code.decode(code.encode(queries), width, torch.float32)


@dataclass(frozen=True)
class LlamaCppCode(EngineCode):
    """One side of llama.cpp's cache: a ggml type, behind llama.cpp's order and rotation of a head's channels.

    Where the type has blocks and D is a multiple of 64, llama.cpp multiplies what it stores by a Hadamard matrix
    first: keys, and queries with them, by the largest one that divides D, values by one of 64.

    Attributes:
        type: how rows are stored.
        is_keys: whether it is the side of the keys.
        is_interleaved: whether a GGUF file keeps the two channels of a rotary pair side by side, where transformers
            has them half a head apart; of keys alone.
    """

    type: GgmlCode
    is_keys: bool
    is_interleaved: bool = False

    def __str__(self) -> str:
        return str(self.type)

    def token_bytes(self, width: int) -> int:
        """Bytes of a token's row; see `GgmlCode.token_bytes`."""
        return self.type.token_bytes(width)

    @property
    def rounds(self) -> bool:
        """Whether it stores codes, and not numbers."""
        return self.type.has_blocks

    def block(self, width: int) -> int:
        """How many channels share a scale: 32.

        Raises:
            ArgumentError: the blocks do not divide a head.
        """
        self.token_bytes(width)
        return BLOCK

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

    def stored(self, turned: Tensor) -> Tensor:
        """Rows of bytes of turned states ``[…, D]``."""
        return self.type.encode(turned)

    def as_read(self, rows: Tensor, width: int) -> Tensor:
        """The turned states ``[…, width]`` that rows stand for, in float32."""
        return self.type.decode(rows, width, torch.float32)

    def rounded_queries(self, turned: Tensor) -> Tensor:
        """Turned queries ``[…, D]`` as ggml's CPU backend multiplies them with keys of this type, in float32."""
        return self.type.rounded_queries(turned)

    def steps(self, turned: Tensor) -> Tensor:
        """How far apart the codes of each block of turned states lie; see `GgmlCode.steps`."""
        return self.type.steps(turned)

    def _rotated(self, states: Tensor) -> Tensor:
        """Times the symmetric Hadamard matrix, which is its own inverse."""
        width = states.shape[-1]
        if self.type.kind in _WIDE or width % _ROTATED:
            return states
        size = width & -width if self.is_keys else _ROTATED
        return rotated(torch.unflatten(states, -1, (-1, size))).flatten(-2)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, 1 / scale, 0.0)


def _half(values: Tensor) -> Tensor:
    """Bytes of numbers as float16, ``[…]`` → ``[…, 2]``."""
    return values.half()[..., None].contiguous().view(torch.uint8)


def _from_half(parts: Tensor) -> Tensor:
    """Numbers ``[…, 1]`` of their bytes as float16, ``[…, 2]``."""
    return parts.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


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
    return _half(scale[..., 0]), codes.view(torch.uint8)


def _decode_eight(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].contiguous().view(torch.int8).float() * _from_half(blocks[..., :2])


def _encode_symmetric(bits: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    middle = 2 ** (bits - 1)

    def encode(blocks: Tensor) -> tuple[Tensor, ...]:
        scale = _largest(blocks) / -middle
        codes = (blocks * _reciprocal(scale) + (middle + 0.5)).clamp(0, 2 * middle - 1).to(torch.uint8)
        high = (_fifth_bits(codes),) if bits > 4 else ()
        return (_half(scale[..., 0]), *high, _nibbles(codes))

    return encode


def _decode_symmetric(bits: int) -> Callable[[Tensor], Tensor]:
    def decode(blocks: Tensor) -> Tensor:
        codes = _from_nibbles(blocks[..., -16:])
        if bits > 4:
            codes = codes | _from_fifth_bits(blocks[..., 2:6])
        middle: int = 2 ** (bits - 1)
        return (codes.float() - middle) * _from_half(blocks[..., :2])

    return decode


def _encode_affine(bits: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    most = 2**bits - 1

    def encode(blocks: Tensor) -> tuple[Tensor, ...]:
        least = blocks.amin(-1, keepdim=True)
        scale = (blocks.amax(-1, keepdim=True) - least) / most
        codes = ((blocks - least) * _reciprocal(scale) + 0.5).clamp(0, most).to(torch.uint8)
        high = (_fifth_bits(codes),) if bits > 4 else ()
        return (_half(scale[..., 0]), _half(least[..., 0]), *high, _nibbles(codes))

    return encode


def _decode_affine(bits: int) -> Callable[[Tensor], Tensor]:
    def decode(blocks: Tensor) -> Tensor:
        codes = _from_nibbles(blocks[..., -16:])
        if bits > 4:
            codes = codes | _from_fifth_bits(blocks[..., 4:8])
        return codes.float() * _from_half(blocks[..., :2]) + _from_half(blocks[..., 2:4])

    return decode


def _encode_levels(blocks: Tensor) -> tuple[Tensor, ...]:
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device=blocks.device)
    # The largest number gets the first level. Codes stay as they are; the scale is then fitted to them by least
    # squares, each number weighed by its square.
    codes = _nearest_level(blocks * _reciprocal(_largest(blocks) / _LEVELS[0]), levels)
    guess, weight = levels[codes.long()], blocks * blocks
    below = (weight * guess * guess).sum(-1, keepdim=True)
    scale = torch.where(below > 0, (weight * guess * blocks).sum(-1, keepdim=True) / below, 0.0)
    return _half(scale[..., 0]), _nibbles(codes)


def _nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """Codes of the nearest levels; of two equally near, the upper."""
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2, right=True).to(torch.uint8)


def _decode_levels(blocks: Tensor) -> Tensor:
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device=blocks.device)
    return levels[_from_nibbles(blocks[..., 2:]).long()] * _from_half(blocks[..., :2])


_ENCODERS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "q8_0": _encode_eight,
    **{kind: _encode_symmetric(bits) for kind, bits in _SYMMETRIC.items()},
    **{kind: _encode_affine(bits) for kind, bits in _AFFINE.items()},
    "iq4_nl": _encode_levels,
}
_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q8_0": _decode_eight,
    **{kind: _decode_symmetric(bits) for kind, bits in _SYMMETRIC.items()},
    **{kind: _decode_affine(bits) for kind, bits in _AFFINE.items()},
    "iq4_nl": _decode_levels,
}
