"""Call the Triton kernel of attention to latents in trellis codes; the sequence is split as in `split`.

Shapes: B batch, H query heads, S new tokens, T all tokens, R latent rank, P rotary dims, F frequencies of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.runtime.kernels.gpu.codes import WIDEST, why_not_plain
from headwise.runtime.kernels.gpu.split import (
    LOG2_E,
    ROWS,
    is_interpreted,
    join,
    on_device_of,
    part_count,
    part_strides,
)
from headwise.runtime.kernels.mask import mask_strides


@dataclass(frozen=True, eq=False)
class LatentLayout:
    """How the kernel reads a layer's codes, with all tensors on the GPU.

    Channels are those of the latent and, behind them, those of the rotary key's two halves.

    Attributes:
        rank: R.
        rotary: P.
        ends: int32 ``[R + P]``, the last bit of each channel's code, counted from the first code on.
        bits: int32 ``[R + P]``, of each channel's code.
        tables: int8 ``[9, 256]``, whole levels of the windows of codes of so many bits.
        gains: float32 ``[16]``, the gain of each number.
        scale: float32 ``[R + P]``, of a whole level.
        offset: float32 ``[R + P]``.
        turn: float32 ``[2, slots, P/2]``, cos and sin of the first slots, without a factor.
        frequency: int32 ``[P/2]``, each rotary pair's index among the model's frequencies.
    """

    rank: int
    rotary: int
    ends: Tensor
    bits: Tensor
    tables: Tensor
    gains: Tensor
    scale: Tensor
    offset: Tensor
    turn: Tensor
    frequency: Tensor


def why_not_latents(states: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, rank: int) -> str | None:
    """The reason why the kernel does not support a call without gradients, or None if it does.

    Args:
        states: ``[B, S, hidden size]`` of the new tokens.
        stored: codes, wide values and first slots; see `attend_latents`.
        mask: of the call.
        rank: R.
    """
    if rank > WIDEST:
        return f"latents are {rank} wide, and it takes {WIDEST} at most"
    return why_not_plain(*(x for x in (states, *stored, mask) if x is not None))


def attend_latents(
    query: Tensor,
    codes: Tensor,
    wide: Tensor,
    first: Tensor,
    layout: LatentLayout,
    rotation: tuple[Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    *,
    has_sums: bool = False,
) -> Tensor:
    """Attend to latents that are stored as codes; `why_not_latents` returns None for them.

    Args:
        query: absorbed and rotated, ``[B, H, S, R + P]``, or ``[B, H, S, P]`` where it has no content.
        codes: uint8 ``[B, 1, T, bytes]``.
        wide: bfloat16 ``[B, sinks, R + P]``, values of each sequence's first tokens, which replace their codes.
        first: int64 ``[B]``, the slot of each sequence's first token.
        layout: of the codes.
        rotation: cos and sin of at least T slots, float32 ``[slots, F]``.
        mask: bool, broadcastable to ``[B, H, S, T]``, True where a query attends.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.
        has_sums: add the sum of each row's weights, 1 or 0, as a last column.

    Returns:
        The mixed latents ``[B, H, S, R]``, or ``R + 1``; zeros where a query sees nothing.
    """
    query, codes, wide = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, codes, wide))
    B, H, S, _ = query.shape
    T, R = codes.shape[2], layout.rank
    out = query.new_empty(B, S, H, R + has_sums).transpose(1, 2)
    if out.numel() == 0:
        return out
    tiles = -(-H * S // ROWS)
    parts = part_count(B * tiles, T, query.device) if T else 0
    mixtures = torch.empty(parts, B, H * S, R, dtype=torch.float32, device=query.device)
    weights = torch.empty(2, parts, B, H * S, dtype=torch.float32, device=query.device)
    with on_device_of(query):
        if parts:
            tensors = query, codes, wide, first, mask
            _fill_parts(tensors, layout, rotation, mixtures, weights, is_causal=is_causal, scale=scale)
        join(mixtures, weights, out[..., :R])
    if has_sums:
        out[..., R] = (weights[1].sum(0) > 0).view(B, H, S)
    return out


def _fill_parts(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    layout: LatentLayout,
    rotation: tuple[Tensor, Tensor],
    mixtures: Tensor,
    weights: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> None:
    """Fill ``mixtures`` and ``weights``; see `headwise.runtime.kernels.gpu.split.fill_parts`.

    Args:
        tensors: query, codes, wide values, first slots and mask, as for `attend_latents`.
        layout: of the codes.
        rotation: as for `attend_latents`.
        mixtures: ``[parts, B, H·S, R]``.
        weights: ``[2, parts, B, H·S]``.
        is_causal: as for `attend_latents`.
        scale: as for `attend_latents`.
    """
    import triton

    from headwise.runtime.kernels.gpu.code_kernels import attend_part_of_latents

    query, codes, wide, first, mask = tensors
    B, H, S, D = query.shape
    T, R, half, parts = codes.shape[2], layout.rank, layout.rotary // 2, len(mixtures)
    width = max(16, triton.next_power_of_2(R))
    tokens = 16  # the compiled kernel keeps a tile of more in registers for narrow latents only
    cos, sin = (table.contiguous() for table in rotation)
    tiles = triton.cdiv(H * S, ROWS)
    attend_part_of_latents[(B * tiles, parts)](
        *(query, codes, wide, first.contiguous(), query if mask is None else mask),
        *(layout.ends, layout.bits, layout.tables, layout.gains, layout.scale, layout.offset, layout.turn),
        *(cos, sin, layout.frequency, mixtures, weights, scale * LOG2_E),
        *(H, S, T, cos.shape[-1], triton.cdiv(triton.cdiv(T, parts), tokens) * tokens, tiles),
        *query.stride()[:3],
        *(codes.stride(0), wide.stride(0), wide.stride(1)),
        *mask_strides(mask),
        *part_strides(mixtures, weights),
        ROWS=ROWS,
        CAUSAL=is_causal,
        R=R,
        HALF=half,
        TURN=layout.turn.shape[1],
        SINKS=wide.shape[1],
        ROW=codes.stride(2),
        TOKENS=tokens,
        WIDTH=width,
        PAIRS=max(16, triton.next_power_of_2(half)),
        HAS_CONTENT=layout.rotary < D,
        HAS_MASK=mask is not None,
        WIDEN=is_interpreted() and query.dtype == torch.bfloat16,
        num_warps=4 if width <= 64 else 8,
    )
