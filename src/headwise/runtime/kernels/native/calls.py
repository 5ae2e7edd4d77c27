"""Call the compiled kernels of attention, and those that encode what a cache stores.

Attention reads keys and values as they are (``attention.cpp``), latents in trellis codes (``codes/coded.cpp``), and
keys and values in trellis codes (``codes/heads.cpp``) or in integer codes (``codes/affine.cpp``). Rows of values get
trellis codes by Viterbi's algorithm, and each token its gains.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, N tokens in codes, D head dim, V value
dim, R latent rank, P rotary dims, F frequencies of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import Scoring, mask_strides
from headwise.runtime.kernels.native.abi import TURN, RowFormat
from headwise.runtime.kernels.native.build import built, call
from headwise.runtime.kernels.pages import Pages


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
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
        scoring: which tokens queries attend to, and the factor of their scores.
        key_scale: float32 ``[B, K, T]``, factors of int8 keys; None where keys are not int8.
        value_scale: float32 ``[B, K, T]``, factors of int8 values; required with ``key_scale``.

    Returns:
        ``[B, H, S, V]``, in memory ``[B, S, H, V]``, as the output projection reads it.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    tensors, own = {"query": query, "key": key, "value": value}, dict[str, Any]()
    if key_scale is not None and value_scale is not None:
        tensors |= {"key_scale": key_scale, "value_scale": value_scale}
        own |= {"key_scale_stride": key_scale.stride(), "value_scale_stride": value_scale.stride()}
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    return attend_stored("headwise_attention", tensors, own, (K, T, V, V), scoring)


def attend_stored(
    kernel: str, tensors: dict[str, Tensor], own: dict[str, Any], sizes: tuple[int, int, int, int], scoring: Scoring
) -> Tensor:
    """Call a kernel of attention.

    Args:
        kernel: one of `headwise.runtime.kernels.native.abi.KERNELS`.
        tensors: queries ``[B, H, S, D]``, what the kernel takes as keys and values, and tensors that not every kernel
            of attention has, by the names of its arguments.
        own: the numbers that not every kernel of attention has, by name.
        sizes: K, T, V, and how many numbers a row of the result has.
        scoring: which tokens queries attend to, and the factor of their scores.

    Returns:
        ``[B, H, S, …]``, in memory ``[B, S, H, …]``.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    states = {name: dense(tensors[name]) for name in ("query", "key", "value")}
    query = states["query"]
    B, H, S, D = query.shape
    K, T, V, columns = sizes
    out = query.new_empty(B, S, H, columns).transpose(1, 2)
    if out.numel() == 0:
        return out
    states |= {"out": out}
    strides = {f"{name}_stride": tensor.stride()[:3] for name, tensor in states.items()}
    letters = dict(zip("BKGSTDV", (B, K, H // K, S, T, D, V), strict=True))
    numbers = own | letters | strides | {"mask_stride": mask_strides(scoring.mask)}
    numbers |= {"causal": scoring.is_causal, "window": scoring.window or 0, "scale": scoring.scale}
    call(kernel, tensors | states | {"mask": scoring.mask}, numbers, query.dtype)
    return out


def dense(states: Tensor) -> Tensor:
    """The same ``[B, K, T, D]`` with a contiguous last dim; copied if need be."""
    return states if states.stride(3) == 1 or states.shape[3] == 1 else states.contiguous()


def can_encode() -> bool:
    """Whether the kernels could be compiled."""
    return built().library is not None


def moved_steps(
    keys: Tensor, pairs: Tensor, steps: Tensor, rows: Tensor, *, block: int, spread: Literal["size", "range"]
) -> Tensor:
    """Mean squares over tokens of the steps of blocks of keys after each of several moves, ``[moves, K, D / block]``.

    It is ``code.steps((keys + rows.T @ (steps[:, None] @ pairs)).mT).square().mean(-2)``, without the moved keys in
    memory. It is fastest where many channels of a block have the same numbers in ``rows``.

    Args:
        keys: float32 ``[K, D, T]``, finite.
        pairs: float32 ``[K, channels, T]``, the one or two channels that are moved.
        steps: float32 ``[moves, channels, channels]``, the matrices that each move multiplies them by, less 1.
        rows: float32 ``[channels, D]``, what a format makes of these channels.
        block: the number of channels that share a step.
        spread: ``size`` where a step is the largest size of a block's numbers, ``range`` where it is their range.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    keys, pairs, steps, rows = (tensor.contiguous() for tensor in (keys, pairs, steps, rows))
    (moves, count, _), (K, D, T) = steps.shape, keys.shape
    out = keys.new_empty(moves, K, D // block)
    sizes = {"moves": moves, "K": K, "channels": count, "D": D, "T": T, "block": block}
    tensors = {"keys": keys, "pairs": pairs, "steps": steps, "rows": rows, "out": out}
    call("headwise_moved", tensors, sizes | {"range": spread == "range"})
    return out


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
    tensors = {"values": values, "weights": weights, "bits": bits, "tables": tables, "starts": starts}
    sizes = {"rows": len(values), "width": values.shape[1], "stride": 0 if codes is None else codes.stride(0)}
    call("headwise_trellis", tensors | {"gains": gains, "codes": codes, "levels": levels}, sizes)
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
    names = ("values", "offset", "scale", "noise", "reach", "gains")
    tensors = {name: x.contiguous() for name, x in zip(names, (values, *channels, gains), strict=True)}
    assert all(x.dtype == torch.float32 for x in tensors.values())
    normal, of_channel = torch.empty_like(tensors["values"]), torch.empty_like(tensors["values"])
    starts = values.new_empty(len(values), dtype=torch.uint8)
    tensors |= {"parts": _widths(parts), "starts": starts, "normal": normal, "of_channel": of_channel}
    sizes = {"rows": len(values), "width": values.shape[1], "count": len(parts), "tried": tried, "zero": zero}
    call("headwise_gains", tensors, sizes | {"step": step})
    return normal, of_channel, starts


@dataclass(frozen=True, eq=False)
class Coder:
    """How a kernel chooses the gains and the codes of tokens.

    Attributes:
        channels: offset, scale, noise and reach of each channel, float32 ``[W]``; see `choose_gains`.
        parts: see `choose_gains`.
        gains: see `choose_gains`.
        bits: see `trellis_encode`.
        tables: see `trellis_encode`.
        tried: see `choose_gains`.
        zero: see `choose_gains`.
        step: see `choose_gains`.
    """

    channels: tuple[Tensor, Tensor, Tensor, Tensor]
    parts: tuple[int, ...]
    gains: Tensor
    bits: Tensor
    tables: Tensor
    tried: int
    zero: int
    step: float

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names of the kernel's arguments."""
        names = ("offset", "scale", "noise", "reach", "gains")
        tensors = {name: x.contiguous() for name, x in zip(names, (*self.channels, self.gains), strict=True)}
        return tensors | {"parts": _widths(self.parts), "bits": self.bits, "tables": self.tables}

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The numbers by the names of the kernel's arguments."""
        own = {"width": len(self.bits), "count": len(self.parts), "tried": self.tried, "zero": self.zero}
        return own | {"step": self.step}


def code_tokens(values: Tensor, coder: Coder, codes: Tensor, slots: Tensor) -> None:
    """Choose the gains and the codes of some tokens, and write both to pages; see `choose_gains`, `trellis_encode`.

    Args:
        values: float32 ``[n, W]``.
        coder: the code.
        codes: uint8 ``[pages, tokens of a page, bytes]``, with pages and tokens any number of bytes apart.
        slots: int64 ``[n]``, of each token the number of a page times its tokens, plus the place in it; below 0 for
            one that is not written.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    assert values.dtype == torch.float32
    assert codes.stride(2) == 1
    tensors = coder.tensors | {"values": values.contiguous(), "codes": codes, "slots": slots.contiguous()}
    sizes = coder.numbers | {"rows": len(values), "page": codes.shape[1], "bytes": codes.shape[2]}
    call("headwise_code", tensors, sizes | {"page_stride": codes.stride(0), "token_stride": codes.stride(1)})


@lru_cache
def _widths(parts: tuple[int, ...]) -> Tensor:
    return torch.tensor(parts, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class TrellisLayout:
    """How a kernel reads a layer's trellis codes: of latents, or of the keys and values of heads.

    Levels lie in rows of columns: the latent's channels, then the two halves of the rotary key; or all heads' keys,
    then all values. Each section is padded to a multiple of `headwise.runtime.kernels.native.abi.CHANNELS`. The two
    dims of a rotary pair are P/2 apart.

    Attributes:
        value_dim: R of latents, V of heads.
        heads: K; 0 of latents.
        rotary: P.
        token_bytes: the bytes of a token's codes.
        blocks: int32 ``[blocks, 4]``, of each its first column, its channels, their bits, and the bit of the
            stream with which the window of the first begins.
        tables: int8 ``[9, 256]``, whole levels of the windows of codes of so many bits.
        pairs: int8 ``[2**17, 2]``, those of two neighbouring channels of b bits by the 8 + b bits of both windows,
            from row ``2 ** (8 + b)`` on.
        gains: float32 ``[16]``, the gain of each number.
        scale: float32 ``[columns]``, of a whole level.
        offset: float32 ``[columns]``.
        turn: float32 ``[2, TURN, P/2]``, padded, cos and sin of the first slots.
        first: of the code of a sequence's first token; None where it has none of its own.
    """

    value_dim: int
    heads: int
    rotary: int
    token_bytes: int
    blocks: Tensor
    tables: Tensor
    pairs: Tensor
    gains: Tensor
    scale: Tensor
    offset: Tensor
    turn: Tensor
    first: TrellisLayout | None = None

    @property
    def kernel(self) -> str:
        """The kernel that attends to the codes."""
        return "headwise_heads" if self.heads else "headwise_coded"

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The numbers by the names of the kernel's arguments."""
        own = {"count": self.blocks.shape[0], "P": self.rotary, "bytes": self.token_bytes}
        return own | {"heads": self.heads} if self.heads else own

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names of the kernels' arguments."""
        tensors = {"blocks": self.blocks, "tables": self.tables, "pairs": self.pairs, "gains": self.gains}
        tensors |= {"level_scale": self.scale, "level_offset": self.offset}
        tensors |= {"turn_cos": self.turn[0], "turn_sin": self.turn[1]}
        if (first := self.first) is not None:
            tensors |= {"first_blocks": first.blocks, "first_scale": first.scale, "first_offset": first.offset}
        return tensors


def attend_trellis(
    query: Tensor,
    codes: Tensor,
    wide: Tensor,
    first: Tensor,
    layout: TrellisLayout,
    rotation: tuple[Tensor, Tensor],
    frequency: Tensor,
    scoring: Scoring,
    *,
    has_sums: bool = False,
    pages: Pages | None = None,
) -> Tensor:
    """Attend to latents, or to keys and values of heads, that are stored as trellis codes.

    Args:
        query: rotated. Of latents absorbed, ``[B, H, S, R + P]``, or ``[B, H, S, P]`` where it has no content; of
            heads ``[B, H, S, D]``.
        codes: uint8 ``[B, 1, T, bytes]``; or, in pages, ``[all pages, 1, tokens of a page, bytes]``.
        wide: bfloat16 ``[B, n, W]``, values of each sequence's first n tokens, which replace their codes; W is R + P
            of latents, and K · (D + V) of heads. n is 0 where a first token has a code of its own.
        first: int64 ``[B]``, the slot of each sequence's first token.
        layout: the layout of the codes.
        rotation: cos and sin of at least T slots, float32 ``[slots, F]``.
        frequency: int64 ``[P/2]``, each rotary pair's index among the model's frequencies.
        scoring: which tokens queries attend to, and the factor of their scores.
        has_sums: add the sum of each row's weights, 1 or 0, as a last column; of latents.
        pages: where the sequences' codes lie in pages; None where each one's lie in a row.

    Returns:
        The mixed latents ``[B, H, S, R]``, or ``R + 1``; of heads the mixed values ``[B, H, S, V]``. Zeros where a
        query sees nothing.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    assert layout.turn.shape[1] == TURN
    cos, sin = (table.contiguous() for table in rotation)
    own = layout.numbers | {"frequencies": cos.shape[-1], "wide": wide.shape[1]}
    own |= {} if layout.heads else {"has_sums": has_sums}
    # To the kernel, the codes are the keys of one head, and the values of first tokens its values.
    tensors = {"query": query, "key": codes, "value": wide.contiguous()[:, None], "first": first.contiguous()}
    tensors |= layout.tensors | {"cos": cos, "sin": sin, "frequency": frequency}
    if layout.first is not None:
        assert wide.shape[1] == 0
        own["wide"] = 1
    T = codes.shape[2]
    if pages is not None:
        T = pages.table.shape[1] * codes.shape[2]  # at most; each sequence has a length of its own
        tensors |= {"table": pages.table.contiguous(), "lengths": pages.lengths.contiguous()}
        own |= {"table_stride": pages.table.shape[1], "page": codes.shape[2], "pages": codes.shape[0]}
    return attend_stored(layout.kernel, tensors, own, (1, T, layout.value_dim, layout.value_dim + has_sums), scoring)


def decode_trellis(codes: Tensor, layout: TrellisLayout, dtype: torch.dtype, width: int, first_part: int) -> Tensor:
    """The values that the codes of some tokens stand for, before rotation: ``[n, W]``, float32 or bfloat16.

    Args:
        codes: uint8 ``[n, bytes]``, with rows any number of bytes apart.
        layout: the layout of the codes; its rotation is not read.
        dtype: the dtype of the values.
        width: W.
        first_part: the channels that have a token's first gain.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    out = torch.empty(codes.shape[0], width, dtype=dtype)
    tensors = {"codes": codes, "out": out, "blocks": layout.blocks, "tables": layout.tables, "pairs": layout.pairs}
    tensors |= {"gains": layout.gains, "level_scale": layout.scale, "level_offset": layout.offset}
    sizes = {"rows": codes.shape[0], "width": width, "count": layout.blocks.shape[0], "bytes": layout.token_bytes}
    call("headwise_decode", tensors, sizes | {"stride": codes.stride(0), "part": first_part}, dtype)
    return out


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
    scoring: Scoring,
    *,
    blocks: KeyBlocks | None = None,
    late: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `headwise.attend` with keys and values that are read as they are stored.

    Args:
        query: ``[B, H, S, D]``.
        key: the keys of the first N tokens.
        value: their values.
        scoring: which tokens queries attend to, and the factor of their scores.
        blocks: scales of the keys; None where they are in their rows.
        late: keys ``[B, K, T - N, D]`` and values ``[B, K, T - N, V]`` of the other tokens, of the query's dtype.

    Returns:
        ``[B, H, S, V]``, in memory ``[B, S, H, V]``; zeros where a query sees nothing.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    K, N = key.rows.shape[1:3]
    T = N
    tensors = {"query": query, "key": key.rows, "value": value.rows}
    own: dict[str, Any] = {"key_rows": key.format, "value_rows": value.format, "coded": N}
    # Blocks of KIVI have scales of their own, and behind them come tokens that wait for a block to fill.
    if blocks is not None:
        tensors["block_scale"] = scales = blocks.scales.contiguous()
        own |= {"block": blocks.tokens, "block_scale_stride": scales.stride()[:3]}
    if late is not None:
        tensors["late_key"], tensors["late_value"] = keys, values = tuple(map(dense, late))
        T += keys.shape[2]
        own |= {"late_key_stride": keys.stride()[:3], "late_value_stride": values.stride()[:3]}
    return attend_stored("headwise_affine", tensors, own, (K, T, value.width, value.width), scoring)
