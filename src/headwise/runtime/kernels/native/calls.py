"""Call the compiled kernels of attention, and those that encode what a cache stores.

Attention reads keys and values as they are (``attention.cpp``), latents in trellis codes (``codes/coded.cpp``), and
keys and values in trellis codes (``codes/heads.cpp``) or in integer codes (``codes/affine.cpp``). Rows of values get
trellis codes by Viterbi's algorithm, and each token its gains.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, N tokens in codes, D head dim, V value
dim, R latent rank, P rotary dims, F frequencies of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import mask_strides
from headwise.runtime.kernels.native.abi import KERNELS, SINKS, TURN, EncoderArguments, GainsArguments, RowFormat
from headwise.runtime.kernels.native.build import built, call


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Compute `headwise.attend` by ``attention.cpp``.

    The tensors must be supported: `why_not` returns None for them.

    Args:
        query: ``[B, H, S, D]``, with any strides.
        key: ``[B, K, T, D]``; copied if the last dim is not contiguous.
        value: ``[B, K, T, V]``; copied if the last dim is not contiguous.
        mask: bool, broadcastable to ``[B, H, S, T]``; a key or value that no query sees is never read.
        is_causal: apply the bottom-right causal mask.
        window: the number of latest keys that a query sees.
        scale: multiplies the scores.
        key_scale: float32 ``[B, K, T]``, factors of int8 keys; None where keys are not int8.
        value_scale: float32 ``[B, K, T]``, factors of int8 values; required with ``key_scale``.

    Returns:
        ``[B, H, S, V]``, in memory ``[B, S, H, V]``, as the output projection reads it.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    own: dict[str, Any] = {"window": window or 0}
    if key_scale is not None and value_scale is not None:
        own |= {"key_scale": key_scale.data_ptr(), "key_scale_stride": key_scale.stride()}
        own |= {"value_scale": value_scale.data_ptr(), "value_scale_stride": value_scale.stride()}
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    return attend_stored("headwise_attention", (query, key, value), (K, T, V, V), mask, is_causal, scale, own)


def attend_stored(
    kernel: str,
    states: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, int, int, int],
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    own: dict[str, Any],
) -> Tensor:
    """Call a kernel of attention.

    Args:
        kernel: one of `headwise.runtime.kernels.native.abi.KERNELS`.
        states: queries ``[B, H, S, D]``, and what the kernel takes as keys and values.
        sizes: K, T, V, and how many numbers a row of the result has.
        mask: bool, broadcastable to ``[B, H, S, T]``.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.
        own: the arguments that not every kernel of attention has. The tensors whose addresses they hold have to keep
            a name until this returns.

    Returns:
        ``[B, H, S, …]``, in memory ``[B, S, H, …]``.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    query, key, value = map(dense, states)
    B, H, S, D = query.shape
    K, T, V, columns = sizes
    out = query.new_empty(B, S, H, columns).transpose(1, 2)
    if out.numel() == 0:
        return out
    arguments = KERNELS[kernel](
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        out=out.data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        causal=is_causal,
        scale=scale,
        B=B,
        K=K,
        G=H // K,
        S=S,
        T=T,
        D=D,
        V=V,
        threads=torch.get_num_threads(),
        **own,
    )
    arguments.query_stride[:], arguments.out_stride[:] = query.stride()[:3], out.stride()[:3]
    arguments.key_stride[:], arguments.value_stride[:] = key.stride()[:3], value.stride()[:3]
    arguments.mask_stride[:] = mask_strides(mask)
    call(kernel, arguments, query.dtype)
    return out


def dense(states: Tensor) -> Tensor:
    """The same ``[B, K, T, D]`` with a contiguous last dim; copied if need be."""
    return states if states.stride(3) == 1 or states.shape[3] == 1 else states.contiguous()


def can_encode() -> bool:
    """Whether the kernels could be compiled."""
    return built().library is not None


def trellis_encode(
    values: Tensor,
    weights: Tensor,
    bits: Tensor,
    tables: Tensor,
    starts: Tensor,
    *,
    gains: Tensor | None = None,
    codes: Tensor | None = None,
) -> Tensor:
    """Choose the codes of rows of values, each row's together.

    Args:
        values: float32 ``[n, W]``.
        weights: float32 ``[W]``, of squared errors.
        bits: uint8 ``[W]``, 1 to 8.
        tables: float32 ``[9, 256]``, the levels of windows of eight bits that end with a code of so many bits.
        starts: uint8 ``[n]``, the byte of the stream before a row's codes.
        gains: float32 ``[n, W]``, factors of a value's error; 1 when None.
        codes: uint8 ``[n, bytes]`` of zeros, rows whose codes are written.

    Returns:
        The levels that were chosen, float32 ``[n, W]``.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    values, weights, tables = values.contiguous(), weights.contiguous(), tables.contiguous()
    gains = None if gains is None else gains.contiguous()
    levels = torch.empty_like(values)
    arguments = EncoderArguments(
        values=values.data_ptr(),
        gains=None if gains is None else gains.data_ptr(),
        weights=weights.data_ptr(),
        bits=bits.data_ptr(),
        tables=tables.data_ptr(),
        starts=starts.data_ptr(),
        codes=None if codes is None else codes.data_ptr(),
        levels=levels.data_ptr(),
        rows=values.shape[0],
        width=values.shape[1],
        stride=0 if codes is None else codes.stride(0),
        threads=torch.get_num_threads(),
    )
    call("headwise_trellis", arguments)
    return levels


def choose_gains(
    values: Tensor,
    channels: tuple[Tensor, Tensor, Tensor, Tensor],
    parts: tuple[int, ...],
    gains: Tensor,
    *,
    tried: int,
    zero: int,
    step: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the gain of each part of some tokens.

    Args:
        values: float32 ``[n, W]``.
        channels: offset, scale, noise and reach of each channel, float32 ``[W]``.
        parts: the widths of the parts with a gain of their own; two at most, which add up to W.
        gains: float32 ``[16]``, of each number.
        tried: how many numbers are tried, from that of the root mean square on.
        zero: the number of the gain 1.
        step: the factor between neighbouring gains.

    Returns:
        Values over scales and gains, and the gains, each ``[n, W]``; a byte a token: the numbers of its gains.
    """
    values, offset, scale, noise, reach, gains = (x.contiguous() for x in (values, *channels, gains))
    assert all(x.dtype == torch.float32 for x in (values, offset, scale, noise, reach, gains))
    normal, of_channel = torch.empty_like(values), torch.empty_like(values)
    starts = values.new_empty(len(values), dtype=torch.uint8)
    arguments = GainsArguments(
        values=values.data_ptr(),
        offset=offset.data_ptr(),
        scale=scale.data_ptr(),
        noise=noise.data_ptr(),
        reach=reach.data_ptr(),
        gains=gains.data_ptr(),
        parts=_widths(parts).data_ptr(),
        starts=starts.data_ptr(),
        normal=normal.data_ptr(),
        of_channel=of_channel.data_ptr(),
        rows=values.shape[0],
        width=values.shape[1],
        count=len(parts),
        tried=tried,
        zero=zero,
        threads=torch.get_num_threads(),
        step=step,
    )
    call("headwise_gains", arguments)
    return normal, of_channel, starts


@lru_cache
def _widths(parts: tuple[int, ...]) -> Tensor:
    return torch.tensor(parts, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class TrellisLayout:
    """How a kernel reads a layer's trellis codes.

    Attributes:
        rotary: P.
        token_bytes: the bytes of a token's codes.
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
    multiple of `headwise.runtime.kernels.native.abi.CHANNELS`.

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
        wide: bfloat16 ``[B, SINKS, R + P]``, unquantised values of each sequence's first tokens, which replace their
            codes.
        first: int64 ``[B]``, the slot of each sequence's first token.
        layout: the layout of the codes.
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
    given = query, (codes, wide, first), layout, rotation, frequency, mask, is_causal, scale
    return _attend_trellis("headwise_coded", layout.rank, layout.rank + has_sums, *given, own={"has_sums": has_sums})


def _attend_trellis(
    kernel: str,
    value_dim: int,
    columns: int,
    query: Tensor,
    stored: tuple[Tensor, Tensor, Tensor],
    layout: TrellisLayout,
    rotation: tuple[Tensor, Tensor],
    frequency: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    *,
    own: dict[str, int],
) -> Tensor:
    """Call a kernel of trellis codes; see `attend_coded` and `attend_heads`.

    Args:
        kernel: the name of the kernel.
        value_dim: V.
        columns: how many numbers a row of the result has.
        query: ``[B, H, S, D]``.
        stored: codes ``[B, 1, T, bytes]``, unquantised values and first slots.
        layout: the layout of the codes.
        rotation: cos and sin ``[slots, F]``.
        frequency: int64 ``[P/2]``, of each rotary pair.
        mask: bool ``[B, H, S, T]``, or None.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.
        own: arguments that this kernel alone has.

    Returns:
        ``[B, H, S, columns]``.
    """
    codes, wide, first = stored
    wide, first = wide.contiguous(), first.contiguous()
    assert wide.shape[1] == SINKS
    assert layout.turn.shape[1] == TURN
    cos, sin = (table.contiguous() for table in rotation)
    turn_cos, turn_sin = layout.turn
    tensors = {
        "first": first,
        "blocks": layout.blocks,
        "tables": layout.tables,
        "gains": layout.gains,
        "level_scale": layout.scale,
        "level_offset": layout.offset,
        "turn_cos": turn_cos,
        "turn_sin": turn_sin,
        "cos": cos,
        "sin": sin,
        "frequency": frequency,
    }
    counts = {
        "count": len(layout.blocks),
        "P": layout.rotary,
        "bytes": layout.token_bytes,
        "frequencies": cos.shape[-1],
    }
    own |= counts | {name: tensor.data_ptr() for name, tensor in tensors.items()}
    # To the kernel, the codes are the keys of one head, and the unquantised values its values.
    sizes = 1, codes.shape[2], value_dim, columns
    return attend_stored(kernel, (query, codes, wide[:, None]), sizes, mask, is_causal, scale, own)


@dataclass(frozen=True, eq=False)
class HeadsLayout(TrellisLayout):
    """How the kernel reads the codes of a layer's keys and values.

    Levels lie in rows of columns: all heads' keys, then all values, each padded to a multiple of
    `headwise.runtime.kernels.native.abi.CHANNELS`. The two dims of a rotary pair are P/2 apart.

    Attributes:
        heads: K.
        head_dim: D.
        value_dim: V.
    """

    heads: int
    head_dim: int
    value_dim: int


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
        wide: bfloat16 ``[B, SINKS, K · (D + V)]``, keys and values of each sequence's first tokens, which replace
            their codes.
        first: int64 ``[B]``, the slot of each sequence's first token.
        layout: the layout of the codes.
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
    given = query, (codes, wide, first), layout, rotation, frequency, mask, is_causal, scale
    return _attend_trellis("headwise_heads", layout.value_dim, layout.value_dim, *given, own={"heads": layout.heads})


@dataclass(frozen=True, eq=False)
class AffineRows:
    """Keys or values as rows of integer codes, the lowest bit of a byte first; a code of 8 bits stands for itself.

    Attributes:
        rows: uint8 ``[B, K, N, bytes]``, of each token the codes, and then the scales and the zero points of its
            groups of channels in float16.
        width: D or V.
        bits: the bits of a code, 1 to 8.
        groups: the number of groups, each of as many channels: several only of a multiple of 16; 0 for keys without
            scales in their rows.
    """

    rows: Tensor
    width: int
    bits: int
    groups: int

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return -(-self.width * self.bits // 8)

    @property
    def format(self) -> RowFormat:
        """The arguments by which the kernel finds the rows."""
        return RowFormat(self.bits, self.width // max(self.groups, 1), self.groups, self.code_bytes)


@dataclass(frozen=True, eq=False)
class KeyBlocks:
    """Scales of keys for each channel and block of tokens.

    Attributes:
        scales: float16 ``[B, K, N / tokens, 2 · D]``, scales and then zero points.
        tokens: the number of tokens in a block, a multiple of 16.
    """

    scales: Tensor
    tokens: int


def attend_affine(
    query: Tensor,
    key: AffineRows,
    value: AffineRows,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    *,
    blocks: KeyBlocks | None = None,
    late: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `headwise.attend` with keys and values that are read as they are stored.

    Args:
        query: ``[B, H, S, D]``.
        key: the keys of the first N tokens.
        value: their values.
        mask: bool, broadcastable to ``[B, H, S, T]``, True where a query attends.
        is_causal: apply the bottom-right causal mask.
        scale: multiplies the scores.
        blocks: scales of the keys; None where they are in their rows.
        late: keys ``[B, K, T - N, D]`` and values ``[B, K, T - N, V]`` of the other tokens, of the query's dtype.

    Returns:
        ``[B, H, S, V]``, in memory ``[B, S, H, V]``; zeros where a query sees nothing.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    K, N = key.rows.shape[1:3]
    T = N
    own: dict[str, Any] = {"key_rows": key.format, "value_rows": value.format, "coded": N}
    # Blocks of KIVI have scales of their own, and behind them come tokens that wait for a block to fill.
    if blocks is not None:
        scales = blocks.scales.contiguous()
        own |= {"block": blocks.tokens, "block_scale": scales.data_ptr(), "block_scale_stride": scales.stride()[:3]}
    if late is not None:
        keys, values = map(dense, late)
        T += keys.shape[2]
        own |= {"late_key": keys.data_ptr(), "late_key_stride": keys.stride()[:3]}
        own |= {"late_value": values.data_ptr(), "late_value_stride": values.stride()[:3]}
    states = query, key.rows, value.rows
    return attend_stored("headwise_affine", states, (K, T, value.width, value.width), mask, is_causal, scale, own)
