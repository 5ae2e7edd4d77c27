"""Call the Triton kernels of trellis codes: attend to them, decode them, and choose them.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim, R latent rank,
P rotary dims, F frequencies of the model; W cached values of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.runtime.kernels.gpu.codes import WIDEST, why_not_plain
from headwise.runtime.kernels.gpu.split import (
    LOG2_E,
    ROWS,
    join,
    must_widen,
    new_parts,
    on_device_of,
    part_count,
    part_strides,
)
from headwise.runtime.kernels.mask import Scoring, mask_strides
from headwise.runtime.kernels.pages import Pages

_MEMORY = 2**27
"""Bytes of predecessors of the tokens that are coded at a time; each has 128 a value."""

TILE = 16
"""Tokens of a tile; the compiled kernel keeps a tile of more in registers for narrow latents only."""

_PARTS_OF_PAGES = 32
"""Parts of a sequence in pages, whose length the host does not know."""

_CHANNELS = 64
"""Channels that a program decodes."""


@dataclass(frozen=True, eq=False)
class ChannelLayout:
    """How the kernels read a layer's codes, channel by channel, with all tensors on the GPU.

    Channels are those of the latent and, behind them, those of the rotary key's two halves; or those of all heads'
    keys and, behind them, all values. The two dims of a rotary pair are P/2 apart.

    Attributes:
        value_dim: R of latents, V of heads.
        heads: K; 0 of latents.
        rotary: P.
        ends: int32 ``[W]``, the last bit of each channel's code, counted from the first code on.
        bits: int32 ``[W]``, of each channel's code.
        tables: int8 ``[9, 256]``, whole levels of the windows of codes of so many bits.
        gains: float32 ``[16]``, the gain of each number.
        scale: float32 ``[W]``, of a whole level.
        offset: float32 ``[W]``.
        turn: float32 ``[2, slots, P/2]``, cos and sin of the first slots, without a factor.
        frequency: int32 ``[P/2]``, each rotary pair's index among the model's frequencies.
    """

    value_dim: int
    heads: int
    rotary: int
    ends: Tensor
    bits: Tensor
    tables: Tensor
    gains: Tensor
    scale: Tensor
    offset: Tensor
    turn: Tensor
    frequency: Tensor

    @property
    def content(self) -> int:
        """The channels of a key that are not rotated: R of latents, D − P of heads."""
        if not self.heads:
            return self.value_dim
        return len(self.ends) // self.heads - self.value_dim - self.rotary

    @property
    def first_part(self) -> int:
        """The channels that have a token's first gain: R of latents, K · D of heads."""
        return self.heads * (self.content + self.rotary) if self.heads else self.value_dim


def why_not_trellis(
    states: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, widths: tuple[int, ...]
) -> str | None:
    """The reason why the kernel does not support a call without gradients, or None if it does.

    Args:
        states: ``[B, S, hidden size]`` of the new tokens.
        stored: codes, unquantised values and first slots; see `attend_trellis`.
        mask: the mask of the call; None for none.
        widths: R; or D and V.
    """
    if (width := max(widths)) > WIDEST:
        return f"what is cached is {width} wide, and it takes {WIDEST} at most"
    return why_not_plain(*(x for x in (states, *stored, mask) if x is not None))


def attend_trellis(
    query: Tensor,
    codes: Tensor,
    wide: Tensor,
    first: Tensor,
    layout: ChannelLayout,
    rotation: tuple[Tensor, Tensor],
    scoring: Scoring,
    *,
    has_sums: bool = False,
    pages: Pages | None = None,
) -> Tensor:
    """Attend to latents or heads that are stored as codes; `why_not_trellis` returns None for them.

    Arguments and result are those of `headwise.runtime.kernels.native.calls.attend_trellis`; the layout has the
    frequency of each rotary pair. With ``pages``, codes are ``[pages, 1, tokens of a page, bytes]``, of a multiple of
    16 tokens, and the number of programs depends on the batch alone, so that a CUDA graph may hold the call.
    """
    query, codes, wide = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, codes, wide))
    B, H, S, _ = query.shape
    V, K = layout.value_dim, layout.heads or 1
    out = query.new_empty(B, S, H, V + has_sums).transpose(1, 2)
    if out.numel() == 0:
        return out
    tiles = -(-(H // K) * S // ROWS)
    if pages is None:
        parts = part_count(B * K * tiles, codes.shape[2], query.device) if codes.shape[2] else 0
    else:
        assert codes.shape[2] % TILE == 0
        parts = _PARTS_OF_PAGES
    mixtures, weights = new_parts(parts, B, H * S, V, query.device)
    with on_device_of(query):
        if parts:
            _fill_parts((query, codes, wide, first), layout, rotation, scoring, (mixtures, weights), pages)
        join(mixtures, weights, out[..., :V])
    if has_sums:
        # Weights of a row are divided by their sum: it is 1, or 0 where the row sees nothing.
        out[..., V] = (weights[1].sum(0) > 0).view(B, H, S)
    return out


def _fill_parts(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: ChannelLayout,
    rotation: tuple[Tensor, Tensor],
    scoring: Scoring,
    parts: tuple[Tensor, Tensor],
    pages: Pages | None,
) -> None:
    """Fill the parts' mixtures and weights; see `headwise.runtime.kernels.gpu.split.fill_parts`.

    Args:
        tensors: query, codes, unquantised values and first slots, as for `attend_trellis`.
        layout: the layout of the codes.
        rotation: the tables of cos and sin of `attend_trellis`.
        scoring: that of `attend_trellis`.
        parts: ``[parts, B, H·S, V]`` and ``[2, parts, B, H·S]``.
        pages: where the tokens lie; None where ``codes`` has those of each sequence.
    """
    import triton

    from headwise.runtime.kernels.gpu.trellis_kernels import attend_part_of_trellis

    (query, codes, wide, first), (mask, is_causal, scale, window) = tensors, scoring
    B, H, S, D = query.shape
    K, V, half, content = layout.heads or 1, layout.value_dim, layout.rotary // 2, layout.content
    cos, sin = (table.contiguous() for table in rotation)
    tiles = triton.cdiv(H // K * S, ROWS)
    widths = [max(16, triton.next_power_of_2(width)) for width in (content, half, V)]
    sizes = {"CONTENT": content, "HALF": half, "V": V, "TURN": layout.turn.shape[1], "SINKS": wide.shape[1]}
    sizes |= {"ROW": codes.stride(2), "PAGE": 0 if pages is None else codes.shape[2]}
    sizes |= {"ROWS": ROWS, "TOKENS": TILE} | dict(zip(("MAIN", "PAIRS", "WIDTH"), widths, strict=True))
    flags = {"SHARED": not layout.heads, "HAS_CONTENT": content > 0 and layout.rotary < D}
    flags |= {"HAS_MASK": mask is not None, "CAUSAL": is_causal, "WIDEN": must_widen(query)}
    table, lengths = (first, first) if pages is None else (pages.table, pages.lengths)
    attend_part_of_trellis[(B * K * tiles, len(parts[0]))](
        *(query, codes, wide, first.contiguous(), query if mask is None else mask),
        *(layout.ends, layout.bits, layout.tables, layout.gains, layout.scale, layout.offset, layout.turn),
        *(cos, sin, layout.frequency, lengths, table, *parts, scale * LOG2_E),
        *(K, H // K, S, 0 if pages is not None else codes.shape[2], cos.shape[-1], tiles, window or 0),
        *query.stride()[:3],
        *(codes.stride(0), wide.stride(0), wide.stride(1), table.stride(0)),
        *mask_strides(mask),
        *part_strides(*parts),
        **sizes,
        **flags,
        num_warps=4 if max(widths) <= 64 else 8,
    )


def decode_trellis(codes: Tensor, places: Tensor, layout: ChannelLayout, dtype: torch.dtype) -> Tensor:
    """The values that the codes of some tokens stand for, before rotation: ``[n, W]``.

    Args:
        codes: uint8, the cache, in any shape.
        places: int64 ``[n]``, where each token's bytes begin in the cache's memory, counted from its first byte.
        layout: the layout of the codes.
        dtype: the dtype of the values.
    """
    import triton

    from headwise.runtime.kernels.gpu.trellis_kernels import decode_tokens

    n, W = len(places), len(layout.ends)
    out = torch.empty(n, W, dtype=dtype, device=codes.device)
    tensors = codes, places.contiguous(), out, layout.ends, layout.bits, layout.tables, layout.gains
    sizes = {"PART": layout.first_part, "TOKENS": TILE, "WIDTH": _CHANNELS}
    if n:
        with on_device_of(codes):
            programs = triton.cdiv(n, TILE), triton.cdiv(W, _CHANNELS)
            decode_tokens[programs](*tensors, layout.scale, layout.offset, n, W, **sizes)
    return out


def encode_windows(values: Tensor, squares: Tensor, bits: Tensor, tables: Tensor, starts: Tensor) -> Tensor:
    """The windows of the best path of each row: uint8 ``[n, W]``.

    Each row is a program that takes W steps, one after another. `headwise.runtime.kernels.gpu.why_not_plain` returns
    None for the tensors.

    Args:
        values: float32 ``[n, W]``.
        squares: float32 ``[n, W]``, the cost of a squared error of each value.
        bits: uint8 ``[W]``, 1 to 8.
        tables: float32 ``[9, 256]``, the levels of windows by the number of bits.
        starts: uint8 ``[n]``, the window before a row's first code.
    """
    from headwise.runtime.kernels.gpu.trellis_kernels import walk_trellis

    n, W = values.shape
    windows = torch.empty(n, W, dtype=torch.uint8, device=values.device)
    rows = max(1, _MEMORY // (128 * W))
    sources = torch.empty(min(n, rows), W, 128, dtype=torch.uint8, device=values.device)
    values, squares, starts = values.contiguous(), squares.contiguous(), starts.contiguous()
    with on_device_of(values):
        for begin in range(0, n, rows):
            part = slice(begin, begin + rows)
            given = (values[part], squares[part], bits, tables, starts[part], sources, windows[part])
            walk_trellis[(len(values[part]),)](*given, W, num_warps=1)
    return windows
