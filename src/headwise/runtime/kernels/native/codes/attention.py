"""Call the compiled kernel of attention to coded latents, ``coded.cpp``.

Shapes: B batch, H query heads, S new tokens, T all tokens, R latent rank, P rotary dims, F frequencies of the model.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import mask_strides
from headwise.runtime.kernels.native.build import TYPES, built
from headwise.runtime.kernels.native.codes.sizes import SINKS, TURN

# `CodedArguments` of coded.cpp and `HeadsArguments` of heads.cpp: `Arguments` of sight.h, then
# eleven pointers, five numbers.
_ARGUMENTS = struct.Struct("@7P7q 6q6q6q 4q 3q d 11P 5q")


@dataclass(frozen=True, eq=False)
class TrellisLayout:
    """How a kernel reads a layer's trellis codes.

    Attributes:
        rotary: P.
        token_bytes: bytes of a token's codes.
        blocks: int32 ``[blocks, 4]``, of each its first column, its channels, their bits, and the bit of the
            stream with which the window of the first begins.
        tables: int8 ``[9, 256]``, whole levels of the windows of codes of so many bits.
        gains: float32 ``[16]``, the gain of each number.
        scale: float32 ``[columns]``, of a whole level.
        offset: float32 ``[columns]``.
        turn: float32 ``[2, TURN, P/2]``, padded, cos and sin of the first slots.
    """

    rotary: int
    token_bytes: int
    blocks: Tensor
    tables: Tensor
    gains: Tensor
    scale: Tensor
    offset: Tensor
    turn: Tensor


@dataclass(frozen=True, eq=False)
class CodedLayout(TrellisLayout):
    """How the kernel reads latents.

    Levels lie in rows of columns: the latent's channels, then the two halves of the rotary key, each padded to a
    multiple of `headwise.runtime.kernels.native.codes.sizes.CHANNELS`.

    Attributes:
        rank: R.
    """

    rank: int


def attend_coded(
    query: Tensor,
    codes: Tensor,
    wide: Tensor,
    first: Tensor,
    layout: CodedLayout,
    rotation: tuple[Tensor, Tensor],
    frequency: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    *,
    has_sums: bool = False,
) -> Tensor:
    """Attend to latents that are stored as codes.

    Args:
        query: absorbed and rotated, ``[B, H, S, R + P]``, or ``[B, H, S, P]`` where it has no content.
        codes: uint8 ``[B, 1, T, bytes]``.
        wide: bfloat16 ``[B, SINKS, R + P]``, values of each sequence's first tokens, which replace their codes.
        first: int64 ``[B]``, the slot of each sequence's first token.
        layout: of the codes.
        rotation: cos and sin of at least T slots, float32 ``[slots, F]``.
        frequency: int64 ``[P/2]``, each rotary pair's index among the model's frequencies.
        mask: bool, broadcastable to ``[B, H, S, T]``, True where a query attends.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.
        has_sums: add the sum of each row's weights, 1 or 0, as a last column.

    Returns:
        The mixed latents ``[B, H, S, R]``, or ``R + 1``; zeros where a query sees nothing.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    sizes = layout.rank, layout.rank + has_sums, int(has_sums)
    stored = codes, wide, first
    return call_on_codes("headwise_coded", query, stored, layout, rotation, frequency, mask, is_causal, scale, sizes)


def call_on_codes(
    kernel: str,
    query: Tensor,
    stored: tuple[Tensor, Tensor, Tensor],
    layout: TrellisLayout,
    rotation: tuple[Tensor, Tensor],
    frequency: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    sizes: tuple[int, int, int],
) -> Tensor:
    """Call a kernel of trellis codes; `CodedArguments` and `HeadsArguments` differ in their last number alone.

    Args:
        kernel: its name in the library.
        query: ``[B, H, S, D]``.
        stored: codes ``[B, 1, T, bytes]``, wide values and first slots; see `attend_coded`.
        layout: of the codes.
        rotation: cos and sin ``[slots, F]``.
        frequency: int64 ``[P/2]``, of each rotary pair.
        mask: bool ``[B, H, S, T]``, or None.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.
        sizes: V; the width of a row of the result; and the number that the kernels read differently, whether sums of
            weights are returned, or how many key–value heads there are.

    Returns:
        ``[B, H, S, width]``.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    library = built().library
    assert library is not None
    codes, wide, first = stored
    value_dim, columns, last = sizes
    B, H, S, D = query.shape
    T = codes.shape[2]
    query = query if query.stride(3) == 1 else query.contiguous()
    codes = codes if codes.stride(3) == 1 else codes.contiguous()
    wide, first = wide.contiguous(), first.contiguous()
    assert wide.shape[1] == SINKS
    assert layout.turn.shape[1] == TURN
    cos, sin = (table.contiguous() for table in rotation)
    out = query.new_empty(B, S, H, columns).transpose(1, 2)
    if out.numel() == 0:
        return out
    layout_tensors = (layout.blocks, layout.tables, layout.gains, layout.scale, layout.offset, *layout.turn)
    arguments = _ARGUMENTS.pack(
        *(query.data_ptr(), codes.data_ptr(), wide.data_ptr(), out.data_ptr()),
        *(0 if mask is None else mask.data_ptr(), 0, 0),
        *(B, 1, H, S, T, D, value_dim),
        *query.stride()[:3],
        *out.stride()[:3],
        *codes.stride()[:3],
        *(0,) * 9,
        *mask_strides(mask),
        *(is_causal, 0, torch.get_num_threads()),
        scale,
        first.data_ptr(),
        *(tensor.data_ptr() for tensor in layout_tensors),
        *(cos.data_ptr(), sin.data_ptr(), frequency.data_ptr()),
        *(len(layout.blocks), layout.rotary, layout.token_bytes, cos.shape[-1], last),
    )
    status = getattr(library, kernel)(arguments, TYPES[query.dtype])
    if status == 1:
        raise MemoryError("no memory to attend in")
    assert status == 0
    return out
