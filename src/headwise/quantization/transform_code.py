"""Static codes of a layer's cached values: an offset, a scale and a number of bits for each channel, fixed at
conversion, and a gain or two for each token.

Shapes: W cached values of a token, in sections (for MLA the latent and the two halves of the rotary key).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.quantization.levels import WIDTHS, levels, thresholds
from headwise.quantization.packing import pack_bits, packed_bytes, unpack_bits

BLOCK = 16
"""Channels that share a number of bits, so that a kernel decodes them together; a section's last block may be
smaller."""

SINKS = 4
"""The first tokens of a sequence, which are stored without codes: attention rests on them, and their values are
unlike any others."""

_GAIN_STEP = 1.25
_GAIN_ZERO = 5
_GAIN_COUNT = 16


class Run(NamedTuple):
    """Neighbouring channels with one number of bits: channels ``start`` to ``stop``, at bytes ``first`` to ``last``."""

    bits: int
    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class TransformCode:
    """How a layer's cached values are coded.

    A value is decoded as ``offset + scale · gain · level``, where the level belongs to its code (`levels`) and the
    gain to its token and part. The rotary part is coded before it is rotated.

    Attributes:
        offset: float32 ``[W]``.
        scale: float32 ``[W]``, positive.
        bits: the number of bits of each block of `BLOCK` channels, section after section.
        sections: the widths of the sections; blocks do not reach over their ends.
        parts: the widths of the parts of a token that have a gain of their own; two at most.
    """

    offset: Tensor
    scale: Tensor
    bits: tuple[int, ...]
    sections: tuple[int, ...]
    parts: tuple[int, ...]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Runs of blocks that have the same number of bits, in the order of channels and bytes."""
        runs: list[Run] = []
        byte = 1  # the first byte holds the gains
        for bits, (start, stop) in zip(self.bits, blocks(self.sections), strict=True):
            size = packed_bytes(stop - start, bits)
            last = runs[-1] if runs else None
            # A partial block ends at a whole byte, so that it can only be the last one of a run.
            if last is not None and last.bits == bits and (last.stop - last.start) % BLOCK == 0:
                runs[-1] = Run(bits, last.start, stop, last.first, byte + size)
            else:
                runs.append(Run(bits, start, stop, byte, byte + size))
            byte += size
        return tuple(runs)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: the gains and all codes."""
        return self.runs[-1].last

    @property
    def width(self) -> int:
        """W."""
        return len(self.offset)

    def to(self, device: torch.device) -> TransformCode:
        """The code with its tensors on a device."""
        return replace(self, offset=self.offset.to(device), scale=self.scale.to(device))

    def encode(self, states: Tensor) -> Tensor:
        """Codes of some tokens: uint8 ``[…, token_bytes]`` of values ``[…, W]``."""
        normal = (states.float() - self.offset) / self.scale
        gains, divided = self._divided(normal)
        places = (gains << (4 * torch.arange(len(self.parts), device=gains.device))).sum(-1, keepdim=True)
        rows = [places.to(torch.uint8)]
        for run in self.runs:
            edges = thresholds(run.bits).to(states.device)
            codes = torch.bucketize(divided[..., run.start : run.stop].contiguous(), edges, out_int32=True)
            rows.append(pack_bits(codes.to(torch.uint8), run.bits))
        return torch.cat(rows, -1)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values ``[…, W]`` that codes stand for; see `encode`."""
        parts = []
        for run in self.runs:
            packed = codes[..., run.first : run.last]
            numbers = unpack_bits(packed, run.bits, run.stop - run.start)
            parts.append(levels(run.bits).to(codes.device)[numbers.int()])
        places = 4 * torch.arange(len(self.parts), device=codes.device, dtype=torch.uint8)
        gains = _gain((codes[..., :1] >> places) & 15)  # […, parts]
        return (torch.cat(parts, -1) * self._spread(gains) * self.scale + self.offset).to(dtype)

    def rounded(self, states: Tensor) -> Tensor:
        """What becomes of values ``[…, W]`` when they are coded: `decode` of `encode`, without the bytes."""
        normal = (states.float() - self.offset) / self.scale
        gains, divided = self._divided(normal)
        pieces = []
        for run in self.runs:
            part = divided[..., run.start : run.stop].contiguous()
            pieces.append(levels(run.bits)[torch.bucketize(part, thresholds(run.bits), out_int32=True)])
        values = torch.cat(pieces, -1) * self._spread(_gain(gains)) * self.scale + self.offset
        return values.to(states.dtype)

    def gains(self, normal: Tensor) -> Tensor:
        """The numbers of the gains of tokens, ``[…, parts]``, by the root mean square of each part's values.

        Args:
            normal: ``[…, W]``, values less their offset over their scale.
        """
        squares = torch.stack([part.square().mean(-1) for part in normal.split_with_sizes(self.parts, -1)], -1)
        exponent = 0.5 * squares.clamp_min(1e-12).log() / torch.tensor(_GAIN_STEP).log()
        return (exponent.round() + _GAIN_ZERO).clamp(0, _GAIN_COUNT - 1).to(torch.int64)

    def _divided(self, normal: Tensor) -> tuple[Tensor, Tensor]:
        gains = self.gains(normal)
        return gains, normal / self._spread(_gain(gains))

    def _spread(self, gains: Tensor) -> Tensor:
        """A gain for every channel, ``[…, W]``, from one for every part."""
        widths = torch.tensor(self.parts, device=gains.device)
        return gains.repeat_interleave(widths, -1, output_size=self.width)


def blocks(sections: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and last channel, exclusive, of each block: ``list(blocks((20,)))`` is ``[(0, 16), (16, 20)]``."""
    start = 0
    for width in sections:
        for first in range(start, start + width, BLOCK):
            yield first, min(first + BLOCK, start + width)
        start += width


def _gain(number: Tensor) -> Tensor:
    return _GAIN_STEP ** (number.float() - _GAIN_ZERO)


__all__ = ["BLOCK", "SINKS", "WIDTHS", "Run", "TransformCode", "blocks"]
