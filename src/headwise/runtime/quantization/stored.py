"""Keys and values of a quantised cache that attention reads as they are stored.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, N tokens in codes, D head dim, V value
dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.runtime.kernels import attend
from headwise.runtime.kernels.gpu import attend_codes, why_not_codes
from headwise.runtime.kernels.mask import as_bool_mask
from headwise.runtime.kernels.native import are_plain, why_not
from headwise.runtime.kernels.native.codes.integers.affine import AffineRows, KeyBlocks, attend_affine
from headwise.runtime.kernels.packed import FEW_TOKENS
from headwise.runtime.quantization.engine_code import EngineCode
from headwise.runtime.quantization.formats import EngineFormat, TokenFormat
from headwise.runtime.quantization.groups import GroupCode, rotated
from headwise.runtime.quantization.kivi import KiviCode

Read = Callable[[Tensor, Tensor | None, bool, float], Tensor]
"""Attends with queries ``[B, H, S, D]``, a mask ``[B, H, S, T]``, the causal rule and a scale."""


class StoredKeys(Tensor):
    """Rows of codes ``[B, K, N, bytes]`` in the place of keys, with what attends to them and to their values.

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
