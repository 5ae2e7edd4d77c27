"""Keys and values that attention reads as they are stored, in the layouts that the kernels read.

Where a kernel can read codes, attention is given the codes themselves: on a CPU those of quantised caches and of all
converted layers, on a GPU those of quantised caches and of latents. Where none can, the layer decodes, and results
differ by rounding alone.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, N tokens in codes, D head dim, V value
dim, R latent rank, P rotary dims, F frequencies of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.runtime.kernels import attend
from headwise.runtime.kernels.gpu import LatentLayout, attend_codes, attend_latents, why_not_codes, why_not_latents
from headwise.runtime.kernels.mask import as_bool_mask
from headwise.runtime.kernels.native import are_plain, why_not
from headwise.runtime.kernels.native.abi import CHANNELS, TURN
from headwise.runtime.kernels.native.codes.calls import (
    AffineRows,
    CodedLayout,
    HeadsLayout,
    KeyBlocks,
    attend_affine,
    attend_coded,
    attend_heads,
)
from headwise.runtime.kernels.sdpa import FEW_TOKENS
from headwise.runtime.quantization.engine_code import EngineCode
from headwise.runtime.quantization.formats import EngineFormat, TokenFormat
from headwise.runtime.quantization.groups import GroupCode, rotated
from headwise.runtime.quantization.kivi import KiviCode
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


Read = Callable[[Tensor, Tensor | None, bool, float], Tensor]
"""Attends with queries ``[B, H, S, D]``, a mask ``[B, H, S, T]``, the causal rule and a scale."""


class StoredKeys(Tensor):
    """Rows of codes ``[B, K, N, bytes]`` in the place of keys, with what attends to them and to their values.

    No model looks into keys between its cache and its attention, so that headwise's attention can be given rows in
    their place. It does not know their format, and has them attend.

    Attributes:
        read: attends.
        decode: makes the keys ``[B, K, T, D]`` and values ``[B, K, T, V]``.
    """

    read: Read
    decode: Callable[[], tuple[Tensor, Tensor]]

    # Operations on it are those of its rows.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def attend(self, query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
        """Compute `headwise.attend`.

        Args:
            query: ``[B, H, S, D]``.
            mask: bool or 0/1 integers, broadcastable to ``[B, H, S, T]``.
            is_causal: apply the bottom-right causal mask.
            scale: multiplies the scores; ``1/sqrt(D)`` when None.

        Returns:
            ``[B, H, S, V]``.
        """
        return self.read(query, mask, is_causal, query.shape[3] ** -0.5 if scale is None else scale)


def stored_keys(rows: Tensor, read: Read, decode: Callable[[], tuple[Tensor, Tensor]]) -> StoredKeys:
    """Rows ``[B, K, N, bytes]`` as `StoredKeys`."""
    keys = rows.as_subclass(StoredKeys)
    keys.read, keys.decode = read, decode
    return keys


def can_read(code: TokenFormat | KiviCode, keys: Tensor, values: Tensor) -> bool:
    """Whether a kernel reads a format, and is the fastest way: for few new tokens.

    Args:
        code: the format.
        keys: the new keys ``[B, K, S, D]``.
        values: the new values ``[B, K, S, V]``.
    """
    if isinstance(code, TokenFormat) and not all(isinstance(part, GroupCode) for part in (code.keys, code.values)):
        return False
    if keys.shape[2] > FEW_TOKENS:
        return False
    if is_on_gpu(keys):
        return why_not_codes(keys, values) is None
    needs_grad = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
    if not are_plain(keys, values):
        return False
    return why_not(keys.dtype, keys.device, needs_grad=needs_grad) is None


def read_tokenwise(code: TokenFormat, rows: tuple[Tensor, Tensor], widths: tuple[int, int]) -> Read:
    """What attends to tokens that are coded by themselves.

    Args:
        code: the format, which `can_read`.
        rows: of keys and of values, uint8 ``[B, K, T, bytes]``.
        widths: D and V.
    """
    key_code, value_code = code.keys, code.values
    assert isinstance(key_code, GroupCode)
    assert isinstance(value_code, GroupCode)
    keys, values = _rows(key_code, rows[0], widths[0]), _rows(value_code, rows[1], widths[1])

    def read(query: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
        if key_code.hadamard:
            query = rotated(query.float()).to(query.dtype)
        attend = attend_codes if is_on_gpu(query) else attend_affine
        out = attend(query, keys, values, _as_mask(mask, query, rows[0].shape[2]), is_causal, scale)
        return rotated(out.float()).to(out.dtype) if value_code.hadamard else out

    return read


def read_rounded(code: EngineFormat, rows: tuple[Tensor, Tensor], widths: tuple[int, int]) -> Read:
    """What attends to an engine's cache with the numbers that the engine would use, queries rounded among them.

    Args:
        code: the format.
        rows: of keys and of values, uint8 ``[B, K, T, bytes]``.
        widths: D and V.
    """

    def read(query: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
        keys = code.keys.as_read(rows[0], widths[0])
        values = code.values.as_read(rows[1], widths[1])
        queries = code.keys.rounded_queries(code.keys.turned(query.float()))
        out = attend(queries, keys, values, mask, 0.0, is_causal, scale)
        return code.values.turned_back(out).to(query.dtype)

    return read


def passed_through(code: EngineFormat, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as attention has them of an engine's cache; derivatives pass as if none was rounded.

    What is rounded is turned, and turned back here, which no product sees: `kernels.attend` of the result is what
    `read_rounded` computes. For example ``passed_through(parse_format("llama.cpp:q4_0"), query, key, value)``.

    Args:
        code: the format.
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
    """

    def rounded(states: Tensor, side: EngineCode, read: Callable[[Tensor], Tensor]) -> Tensor:
        own = states.detach()
        return states + (side.turned_back(read(side.turned(own.float()))).to(states.dtype) - own)

    def stored(states: Tensor, side: EngineCode) -> Tensor:
        return rounded(states, side, lambda turned: side.as_read(side.stored(turned), states.shape[3]))

    queries = rounded(query, code.keys, code.keys.rounded_queries)
    return queries, stored(key, code.keys), stored(value, code.values)


def read_kivi(code: KiviCode, coded: tuple[Tensor, Tensor, Tensor], recent: tuple[Tensor, Tensor]) -> Read:
    """What attends to blocks of keys, and to the latest tokens.

    Args:
        code: the format.
        coded: rows of keys ``[B, K, N, bytes]``, the blocks' scales, and rows of values.
        recent: keys ``[B, K, T - N, D]`` and values ``[B, K, T - N, V]`` of the other tokens.
    """
    keys = AffineRows(coded[0], recent[0].shape[3], code.bits, 0)
    values = _rows(code.values, coded[2], recent[1].shape[3])
    blocks = KeyBlocks(coded[1], code.block)
    total = coded[0].shape[2] + recent[0].shape[2]

    def read(query: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
        mask = _as_mask(mask, query, total)
        attend = attend_codes if is_on_gpu(query) else attend_affine
        return attend(query, keys, values, mask, is_causal, scale, blocks=blocks, late=recent)

    return read


def is_on_gpu(states: Tensor) -> bool:
    """Whether Triton's kernel attends to them, and not the compiled one.

    Args:
        states: of any shape.
    """
    return states.is_cuda


def _rows(code: GroupCode, rows: Tensor, width: int) -> AffineRows:
    return AffineRows(rows, width, code.bits, code.groups(width))


def _as_mask(mask: Tensor | None, query: Tensor, total: int) -> Tensor | None:
    B, H, S, _ = query.shape
    return None if mask is None else as_bool_mask(mask, (B, H, S, total))


_Layout = TypeVar("_Layout")
_CPU = torch.device("cpu")


class Slots(Protocol):
    """The rotation of a cache's slots, whose frequencies may change.

    Attributes:
        version: rises when they do.
    """

    version: int

    def tables(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 ``[1, count, F]``, of so many slots."""
        ...


class CodeReader(Generic[_Layout]):
    """What the readers of both mechanisms share.

    Args:
        code: of the layer.
        frequencies: each rotary pair's index among the model's frequencies.
        slots: how slots are rotated, where the layer has rotary dims.
    """

    def __init__(self, code: TransformCode, frequencies: list[int], slots: Slots | None) -> None:
        self._code, self._slots = code, slots if frequencies else None
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be used elsewhere
            self._frequency = torch.tensor(frequencies, dtype=torch.int64)
        self._layout: _Layout | None = None
        self._version = 0

    def _new_layout(self) -> _Layout | None:
        """How the kernel reads the code; None where it cannot."""
        raise NotImplementedError

    def can_read(self, states: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, *, needs_grad: bool) -> bool:
        """Whether a kernel can attend to the codes, and is the fastest way: for few queries.

        Args:
            states: ``[B, S, hidden size]`` of the new tokens.
            stored: codes, wide values and first slots; see `attend`.
            mask: of the call.
            needs_grad: whether gradients are needed.
        """
        if states.shape[1] > FEW_TOKENS or why_not(states.dtype, states.device, needs_grad=needs_grad) is not None:
            return False
        if not are_plain(states, *stored, mask):
            return False
        if self._layout is None or self._version != self._rotation_now:
            with torch.inference_mode(False), torch.no_grad():
                self._layout, self._version = self._new_layout(), self._rotation_now
        return self._layout is not None

    @property
    def _rotation_now(self) -> int:
        """The version of the slots' rotation, which a layout is made for."""
        return 0 if self._slots is None else self._slots.version

    def _turn(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """cos and sin ``[TURN, P/2]`` of the first slots, without the factor of a scaled rotary embedding."""
        if self._slots is None:
            return None
        tables = self._slots.tables(TURN, device)
        cos, sin = (table[0, :TURN, self._frequency.to(table.device)] for table in tables)
        return cos / cos[:1], sin / cos[:1]

    def _call(
        self, query: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
        """The mask as the kernels take it, and cos and sin ``[slots, F]``."""
        B, H, S, _ = query.shape
        T = stored[0].shape[2]
        mask = None if mask is None else as_bool_mask(mask, (B, H, S, T))
        if self._slots is None:
            none = torch.empty(1, 0, device=query.device)
            return mask, (none, none)
        cos, sin = self._slots.tables(T, query.device)
        return mask, (cos[0], sin[0])


class LatentReader(CodeReader[CodedLayout]):
    """Attends to the codes of one layer of MLA.

    Args:
        code: of the layer.
        rank: R.
        frequencies: see `CodeReader`.
        slots: see `CodeReader`.
    """

    def __init__(self, code: TransformCode, rank: int, frequencies: list[int], slots: Slots | None) -> None:
        super().__init__(code, frequencies, slots)
        self._rank = rank
        self._on_gpu: LatentLayout | None = None
        self._version_on_gpu = 0

    def _new_layout(self) -> CodedLayout | None:
        return kernel_layout(self._code, self._rank, self._turn(_CPU))

    def can_read(self, states: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, *, needs_grad: bool) -> bool:
        """See `CodeReader.can_read`."""
        if not is_on_gpu(states):
            return super().can_read(states, stored, mask, needs_grad=needs_grad)
        if (
            states.shape[1] > FEW_TOKENS
            or needs_grad
            or why_not_latents(states, stored, mask, self._rank) is not None
        ):
            return False
        is_elsewhere = self._on_gpu is None or self._on_gpu.ends.device != states.device
        if is_elsewhere or self._version_on_gpu != self._rotation_now:
            with torch.inference_mode(False), torch.no_grad():
                frequency = self._frequency.to(states.device)
                self._on_gpu = latent_layout(self._code, self._rank, self._turn(states.device), frequency)
                self._version_on_gpu = self._rotation_now
        return self._on_gpu is not None

    def attend(
        self,
        query: Tensor,
        stored: tuple[Tensor, ...],
        mask: Tensor | None,
        *,
        is_causal: bool,
        scale: float,
        has_sums: bool,
    ) -> Tensor:
        """Attend to codes that `can_read` said yes to; see `attend_coded` and `attend_latents`.

        Args:
            query: absorbed and rotated by slots, ``[B, H, S, R + P]`` or ``[B, H, S, P]``.
            stored: codes ``[B, 1, T, bytes]``, wide values ``[B, sinks, R + P]`` and first slots ``[B]``.
            mask: ``[B, T]`` or broadcastable to ``[B, H, S, T]``.
            is_causal: apply the bottom-right causal mask.
            scale: multiplies the scores.
            has_sums: add the sum of each row's weights as a last column.

        Returns:
            The mixed latents ``[B, H, S, R]``, or ``R + 1``.
        """
        mask, tables = self._call(query, stored, mask)
        codes, wide, first = stored
        if is_on_gpu(query):
            assert self._on_gpu is not None
            call = (tables, mask, is_causal, scale)
            return attend_latents(query, codes, wide, first, self._on_gpu, *call, has_sums=has_sums)
        assert self._layout is not None
        options = (tables, self._frequency, mask, is_causal, scale)
        return attend_coded(query, codes, wide, first, self._layout, *options, has_sums=has_sums)


class HeadsReader(CodeReader[HeadsLayout]):
    """Attends to the codes of one layer of MHA, GQA or MQA.

    Args:
        code: of the layer.
        shapes: ``(K, D)`` of the keys and ``(K, V)`` of the values.
        frequencies: see `CodeReader`.
        slots: see `CodeReader`.
    """

    def __init__(
        self,
        code: TransformCode,
        shapes: tuple[tuple[int, int], ...],
        frequencies: list[int],
        slots: Slots | None,
    ) -> None:
        super().__init__(code, frequencies, slots)
        self._shapes = shapes

    def _new_layout(self) -> HeadsLayout | None:
        return heads_layout(self._code, self._shapes, self._turn(_CPU))

    def attend(
        self, query: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, *, is_causal: bool, scale: float
    ) -> Tensor:
        """Attend to codes that `can_read` said yes to; see `attend_heads`.

        Args:
            query: rotated by slots, ``[B, H, S, D]``.
            stored: codes ``[B, 1, T, bytes]``, wide values ``[B, sinks, K · (D + V)]`` and first slots ``[B]``.
            mask: ``[B, T]`` or broadcastable to ``[B, H, S, T]``.
            is_causal: apply the bottom-right causal mask.
            scale: multiplies the scores.

        Returns:
            ``[B, H, S, V]``.
        """
        assert self._layout is not None
        mask, tables = self._call(query, stored, mask)
        codes, wide, first = stored
        return attend_heads(query, codes, wide, first, self._layout, tables, self._frequency, mask, is_causal, scale)
