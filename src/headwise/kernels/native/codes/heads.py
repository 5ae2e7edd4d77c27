"""Call the compiled kernel of attention to keys and values in trellis codes, ``heads.cpp``.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim, P rotary dims,
F frequencies of the model.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.native.build import TYPES, built
from headwise.kernels.native.codes.attention import mask_strides

# `HeadsArguments` of heads.cpp: `Arguments` of sight.h, eleven pointers, five sizes.
_ARGUMENTS = struct.Struct("@7P7q 6q6q6q 4q 3q d 11P 5q")


@dataclass(frozen=True, eq=False)
class HeadsLayout:
    """How the kernel reads the codes of a layer's keys and values.

    Levels lie in rows of columns: all heads' keys, then all values, each padded to a multiple of
    `headwise.kernels.native.codes.attention.CHANNELS`. The two dims of a rotary pair are P/2 apart.

    Attributes:
        heads: K.
        head_dim: D.
        value_dim: V.
        rotary: P.
        token_bytes: bytes of a token's codes.
        blocks: see `headwise.kernels.native.codes.attention.CodedLayout`; so are the other tensors.
        tables: int8 ``[9, 256]``.
        gains: float32 ``[16]``.
        scale: float32 ``[columns]``.
        offset: float32 ``[columns]``.
        turn: float32 ``[2, TURN, P/2]``, padded, cos and sin of the first slots.
    """

    heads: int
    head_dim: int
    value_dim: int
    rotary: int
    token_bytes: int
    blocks: Tensor
    tables: Tensor
    gains: Tensor
    scale: Tensor
    offset: Tensor
    turn: Tensor


def attend_heads(
    query: Tensor,
    codes: Tensor,
    wide: Tensor,
    first: Tensor,
    layout: HeadsLayout,
    rotation: tuple[Tensor, Tensor],
    frequency: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Attend to keys and values of heads that are stored as codes.

    Args:
        query: rotated, ``[B, H, S, D]``.
        codes: uint8 ``[B, 1, T, bytes]``.
        wide: bfloat16 ``[B, sinks, K · (D + V)]``, keys and values of each sequence's first tokens, which replace
            their codes.
        first: int64 ``[B]``, the slot of each sequence's first token.
        layout: of the codes.
        rotation: cos and sin of at least T slots, float32 ``[slots, F]``.
        frequency: int64 ``[P/2]``, each rotary pair's index among the model's frequencies.
        mask: bool, broadcastable to ``[B, H, S, T]``, True where a query attends.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.

    Returns:
        The mixed values ``[B, H, S, V]``; zeros where a query sees nothing.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    library = built().library
    assert library is not None
    B, H, S, D = query.shape
    T = codes.shape[2]
    query = query if query.stride(3) == 1 else query.contiguous()
    codes = codes if codes.stride(3) == 1 else codes.contiguous()
    wide, first = wide.contiguous(), first.contiguous()
    cos, sin = (table.contiguous() for table in rotation)
    out = query.new_empty(B, S, H, layout.value_dim).transpose(1, 2)
    if out.numel() == 0:
        return out
    layout_tensors = (layout.blocks, layout.tables, layout.gains, layout.scale, layout.offset, *layout.turn)
    arguments = _ARGUMENTS.pack(
        *(query.data_ptr(), codes.data_ptr(), wide.data_ptr(), out.data_ptr()),
        *(0 if mask is None else mask.data_ptr(), 0, 0),
        *(B, 1, H, S, T, D, layout.value_dim),
        *query.stride()[:3],
        *out.stride()[:3],
        *codes.stride()[:3],
        *(0,) * 9,
        *((0,) * 4 if mask is None else mask_strides(mask)),
        *(is_causal, 0, torch.get_num_threads()),
        scale,
        first.data_ptr(),
        *(tensor.data_ptr() for tensor in layout_tensors),
        *(cos.data_ptr(), sin.data_ptr(), frequency.data_ptr()),
        *(len(layout.blocks), layout.rotary, layout.token_bytes, cos.shape[-1], layout.heads),
    )
    status = library.headwise_heads(arguments, TYPES[query.dtype])
    if status == 1:
        raise MemoryError("no memory to attend in")
    assert status == 0
    return out
