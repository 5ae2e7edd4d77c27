"""Codes as the compiled attention kernels read them (`headwise.runtime.kernels.native.codes`).

Shapes: R latent rank, P rotary dims, K key–value heads, D head dim, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.runtime.kernels.gpu import LatentLayout
from headwise.runtime.kernels.native.codes.attention import CodedLayout
from headwise.runtime.kernels.native.codes.heads import HeadsLayout
from headwise.runtime.kernels.native.codes.sizes import CHANNELS, TURN
from headwise.runtime.quantization.transform_code import (
    GAIN_STEP,
    GAIN_ZERO,
    TransformCode,
    blocks,
    heads_shape,
    latent_shape,
)
from headwise.runtime.quantization.trellis import UNIT, tables


def kernel_layout(code: TransformCode, rank: int, rotation: tuple[Tensor, Tensor] | None) -> CodedLayout | None:
    """How the kernel reads a code; None where it cannot.

    Args:
        code: of a latent and, behind it, a rotary key whose halves are sections.
        rank: R.
        rotation: cos and sin of the first `TURN` slots, each ``[TURN, P/2]``; None where P is 0.
    """
    if not _is_latent(code, rank) or (code.width > rank) != (rotation is not None):
        return None
    return CodedLayout(code.width - rank, code.token_bytes, *_tensors(code, rotation), rank)


def latent_layout(
    code: TransformCode, rank: int, rotation: tuple[Tensor, Tensor] | None, frequency: Tensor
) -> LatentLayout | None:
    """How the GPU's kernel reads a code, on the device of ``frequency``; None where it cannot.

    Args:
        code: of a latent and, behind it, a rotary key whose halves are sections.
        rank: R.
        rotation: cos and sin of the first `TURN` slots, each ``[TURN, P/2]``; None where P is 0.
        frequency: ``[P/2]``, each rotary pair's index among the model's frequencies.
    """
    if not _is_latent(code, rank) or (code.width > rank) != (rotation is not None):
        return None
    bits = code.channel_bits.int()
    tensors = (
        bits.cumsum(0, dtype=torch.int32) - 1,
        bits,
        *_levels(),
        code.scale * UNIT,
        code.offset,
        torch.zeros(2, TURN, 0) if rotation is None else torch.stack(rotation),
        frequency.int(),
    )
    device = frequency.device
    return LatentLayout(rank, code.width - rank, *(tensor.to(device).contiguous() for tensor in tensors))


def _is_latent(code: TransformCode, rank: int) -> bool:
    """Whether a code is of a latent and a rotary key, as MLA caches them."""
    return (code.sections, code.parts) == latent_shape(rank, code.width - rank)


def _levels() -> tuple[Tensor, Tensor]:
    """Whole levels of all windows, int8 ``[9, 256]``, and the gain of each number, float32 ``[16]``."""
    return (tables() / UNIT).round().to(torch.int8), GAIN_STEP ** (torch.arange(16, dtype=torch.float32) - GAIN_ZERO)


def heads_layout(
    code: TransformCode, shapes: tuple[tuple[int, int], ...], rotation: tuple[Tensor, Tensor] | None
) -> HeadsLayout | None:
    """How the kernel reads a code of keys and values; None where it cannot.

    Args:
        code: of all heads' keys and, behind them, all values; each head's are a section.
        shapes: ``(K, D)`` of the keys and ``(K, V)`` of the values.
        rotation: cos and sin of the first `TURN` slots, each ``[TURN, P/2]``; None where P is 0.
    """
    (K, D), (_, V) = shapes
    if (code.sections, code.parts) != heads_shape(K, D, V):
        return None
    rotary = 0 if rotation is None else 2 * rotation[0].shape[-1]
    return HeadsLayout(rotary, code.token_bytes, *_tensors(code, rotation), K, D, V)


def _tensors(
    code: TransformCode, rotation: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tensors of a layout, from ``blocks`` to ``turn``."""
    return (
        _blocks(code),
        *_levels(),
        _columns(code.scale * UNIT, code.sections),
        _columns(code.offset, code.sections),
        torch.zeros(2, TURN, 0) if rotation is None else torch.stack([_padded(table) for table in rotation]),
    )


def _blocks(code: TransformCode) -> Tensor:
    """`CodedLayout.blocks`."""
    rows: list[tuple[int, int, int, int]] = []
    column = first = 0
    for bits, (begin, end) in zip(code.bits, blocks(code.sections), strict=True):
        rows.append((column, end - begin, bits, first + bits))
        column += CHANNELS
        first += (end - begin) * bits
    return torch.tensor(rows, dtype=torch.int32)


def _columns(channels: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Numbers of channels at the columns of their levels."""
    return torch.cat([_padded(section) for section in channels.float().split_with_sizes(sections)])


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % CHANNELS)).contiguous()
