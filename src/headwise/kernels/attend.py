"""`attend`: softmax(QKᵀ)V, one function over several ways to compute it.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels.gpu import attend_split, why_not_split
from headwise.kernels.libraries import attend_flash, attend_flex, why_not_flash
from headwise.kernels.mask import as_bool_mask, combine_masks
from headwise.kernels.native import are_plain, attend_fused, built, why_not
from headwise.kernels.packed import FEW_TOKENS, attend_packed
from headwise.kernels.reference import attend_reference

Shape = Sequence[int]
Backend = Literal["auto", "reference", "sdpa", "packed", "fused", "split", "flex", "flash"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "sdpa", "packed", "fused", "split", "flex", "flash")
WITHOUT_WEIGHTS: tuple[Backend, ...] = ("sdpa", "fused", "split", "flex", "flash")
"""Those that never hold all weights, and so cannot return them."""
PARTICULAR: tuple[Backend, ...] = ("fused", "split", "flex", "flash")
"""Those that torch does not prepare tensors for: they are refused, or passed over, where these do not fit."""


@dataclass(frozen=True)
class Choice:
    """What ``backend="auto"`` settles on, and why."""

    backend: Backend
    reason: str


@overload
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window: int | None = ...,
    backend: Backend = ...,
    return_weights: Literal[False] = ...,
) -> Tensor: ...


@overload
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window: int | None = ...,
    backend: Backend = ...,
    return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window: int | None = ...,
    backend: Backend = ...,
    return_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
    *,
    window: int | None = None,
    backend: Backend = "auto",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale · Q Kᵀ) V``, with the arguments of torch's ``scaled_dot_product_attention``.

    It differs from torch's in three ways: causal is bottom-right when T > S, a mask and ``is_causal`` combine,
    and a query with nothing to attend to gives zeros.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``; K divides H, and query head i reads head ``i // (H / K)``.
        value: ``[B, K, T, V]``.
        attn_mask: bool or 0/1 integers, True = attend; ``[B, T]`` padding, or broadcastable to ``[B, H, S, T]``.
        dropout_p: probability of dropping an attention weight.
        is_causal: query i of S sees keys 0 … T − S + i.
        scale: multiplies the scores; ``1/sqrt(D)`` when None.
        enable_gqa: False demands K = H, as torch does.
        window: with ``is_causal``, how many of the latest keys a query sees; all when None.
        backend: ``auto`` picks by shape (`choose_backend` tells what); the result is the same beyond rounding.
        return_weights: also return the weights ``[B, H, S, T]``; some backends hold none (`WITHOUT_WEIGHTS`).

    Returns:
        ``[B, H, S, V]``, or that and the weights.

    Raises:
        ArgumentError: shapes, mask or backend do not fit together.
    """
    check_shapes(query, key, value)
    B, H, S, D = query.shape
    K, T = key.shape[1:3]
    if not enable_gqa and H != K:
        raise ArgumentError("key heads", K, f"must be {H} without enable_gqa")
    if not 0.0 <= dropout_p < 1.0:
        raise ArgumentError("dropout_p", dropout_p, "must be at least 0 and below 1")
    check_window(window, is_causal)
    if attn_mask is not None and attn_mask.device != query.device:
        raise ArgumentError("attn_mask device", str(attn_mask.device), f"must be {query.device}, the query's")
    if window is not None and window >= T:
        window = None
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if backend == "auto":
        backend = choose_backend(
            query.shape,
            key.shape,
            dtype=query.dtype,
            device=query.device,
            needs_grad=needs_grad,
            dropout_p=dropout_p,
            return_weights=return_weights,
            value_dim=value.shape[3],
            has_mask=attn_mask is not None,
        ).backend
        if backend in PARTICULAR and not _fit(backend, query, key, value, attn_mask):
            backend = "packed" if S <= FEW_TOKENS else "sdpa"  # torch says what it makes of them
    elif backend in PARTICULAR:
        _refuse(backend, query, key, value, attn_mask, needs_grad=needs_grad, dropout_p=dropout_p)
    if scale is None:
        scale = D**-0.5
    if return_weights and backend in WITHOUT_WEIGHTS:
        raise ArgumentError("backend", backend, "never holds the weights; use reference, packed or auto")
    if backend in ("fused", "split"):
        mask = None if attn_mask is None else as_bool_mask(attn_mask, (B, H, S, T))
        kernel = attend_fused if backend == "fused" else attend_split
        return kernel(query, key, value, mask, is_causal, window, scale)
    if backend == "flex":
        mask = None if attn_mask is None else as_bool_mask(attn_mask, (B, H, S, T))
        return attend_flex(query, key, value, mask, is_causal, window, scale)
    if backend == "flash":
        return attend_flash(query, key, value, is_causal, window, scale, dropout_p)
    if backend == "sdpa":
        return _attend_sdpa(query, key, value, attn_mask, is_causal, window, scale, dropout_p)
    mask = combine_masks(attn_mask, is_causal, (B, H, S, T), query.device, window)
    weights: Tensor | None
    if backend == "packed":
        out, weights = attend_packed(query, key, value, mask, scale, dropout_p, return_weights=return_weights)
    elif backend == "reference":
        out, weights = attend_reference(query, key, value, mask, scale, dropout_p)
    else:
        raise ArgumentError("backend", backend, f"must be one of {', '.join(BACKENDS)}")
    if not return_weights:
        return out
    assert weights is not None
    return out, weights


def choose_backend(
    query: Shape,
    key: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    needs_grad: bool = False,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    value_dim: int | None = None,
    has_mask: bool = False,
) -> Choice:
    """What ``backend="auto"`` would use for such tensors, and why.

    ``query`` and ``key`` are their shapes; ``value_dim`` is V, the head dim when None.

    >>> choose_backend((1, 32, 64, 128), (1, 8, 8192, 128), needs_grad=True).backend
    'sdpa'
    """
    S, K, T = query[2], key[1], key[2]
    if return_weights:
        return Choice("packed", "the weights are asked for, and no other way holds them")
    is_few = S <= FEW_TOKENS
    why = f"few new tokens ({S}): reading {K} key–value heads once is the cost"
    if not is_few:
        why = f"{S} new tokens: blocked softmax, no {S} × {T} scores held"
    if torch.device(device).type == "cuda":
        reason = why_not_split(dtype, torch.device(device), query[3], needs_grad=needs_grad)
        if is_few and reason is None and not dropout_p:
            return Choice("split", f"{why}, its parts at once")
        if is_few:
            return Choice("packed", why)
        width = query[3] if value_dim is None else value_dim
        if why_not_flash(dtype, torch.device(device), query[3], width, has_mask=has_mask) is None:
            return Choice("flash", f"{why}; grouped heads, windows and old tokens taken as they are")
        return Choice("sdpa", why)
    reason = why_not(dtype, torch.device(device), needs_grad=needs_grad)
    if dropout_p:
        reason = "it knows no dropout"
    elif reason is None and not is_few and dtype.itemsize < 4 and not (dtype == torch.bfloat16 and built().has_pairs):
        reason = f"it would widen {dtype} first"
    if reason is None:
        return Choice("fused", why)
    return Choice("packed" if is_few else "sdpa", f"{why}; not the fused kernel: {reason}")


def _refuse(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    needs_grad: bool,
    dropout_p: float,
) -> None:
    """Refuse what a kernel was asked for and cannot serve."""
    if dropout_p and backend != "flash":
        raise ArgumentError("backend", backend, "knows no dropout; use another, or auto")
    reason = None
    if backend == "fused":
        reason = why_not(query.dtype, query.device, needs_grad=needs_grad)
    elif backend == "flash":
        widths = query.shape[3], value.shape[3]
        reason = why_not_flash(query.dtype, query.device, *widths, has_mask=mask is not None)
    elif backend == "split":
        reason = why_not_split(query.dtype, query.device, query.shape[3], needs_grad=needs_grad)
    if reason is not None:
        raise ArgumentError("backend", backend, f"cannot serve: {reason}; use another, or auto")
    if not _fit(backend, query, key, value, mask):
        raise ArgumentError("backend", backend, "takes plain tensors on one device, of one dtype")


def _fit(backend: Backend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether tensors go together as a kernel takes them: one dtype, one device, and for the CPU's no subclasses."""
    if not query.dtype == key.dtype == value.dtype:
        return False
    if backend == "fused":
        return are_plain(query, key, value, mask)
    return all(x is None or x.device == query.device for x in (key, value, mask))


def _attend_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    B, H, S, _ = query.shape
    T = key.shape[2]
    # The CPU's blocked kernels know no dropout and want one width: columns of zeros change nothing and take a third
    # to half the time of the path that holds scores.
    V = value.shape[3]
    width = max(query.shape[3], V) if query.device.type == "cpu" and not dropout_p else 0
    query, key, value = (x if x.shape[3] >= width else F.pad(x, (0, width - x.shape[3])) for x in (query, key, value))
    grouped = key.shape[1] != H
    # torch's own flag is top-left, which agrees with ours only for S = T; it skips the masked half.
    flag = is_causal and attn_mask is None and S == T and window is None
    sees_all = attn_mask is None and (not is_causal or (S == 1 and window is None))
    if flag or sees_all:
        out = F.scaled_dot_product_attention(
            query, key, value, None, dropout_p, flag, scale=scale, enable_gqa=grouped
        )
        return out[..., :V]
    mask = None if attn_mask is None else as_bool_mask(attn_mask, (B, H, S, T))
    # Some queries at a time: a mask of all would be as large as their scores, and half of a causal one is empty.
    parts = []
    for start in range(0, S, _QUERIES):
        rows = range(start, min(start + _QUERIES, S))
        seen, tokens = _seen_by(rows, mask, is_causal, window, S, T, query.device)
        some = query[:, :, rows.start : rows.stop], key[:, :, tokens], value[:, :, tokens]
        parts.append(F.scaled_dot_product_attention(*some, seen, dropout_p, scale=scale, enable_gqa=grouped))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))[..., :V]


def _seen_by(
    rows: range, mask: Tensor | None, is_causal: bool, window: int | None, S: int, T: int, device: torch.device
) -> tuple[Tensor | None, slice]:
    """A mask of some of the queries, and the tokens that it is over: those that any of them may see, or one."""
    if mask is not None:
        mask = mask.expand(-1, -1, -1, T)
        mask = mask[:, :, rows.start : rows.stop] if mask.shape[2] > 1 else mask
    if not is_causal:
        return mask, slice(0, T)
    last = min(T, max(1, T - S + rows.stop))
    first = 0 if window is None else min(last - 1, max(0, T - S + rows.start - window + 1))
    at = torch.arange(T - S + rows.start, T - S + rows.stop, device=device)[:, None]
    token = torch.arange(first, last, device=device)
    seen = token <= at if window is None else (token <= at) & (token > at - window)
    return seen[None, None] if mask is None else mask[..., first:last] & seen, slice(first, last)


_QUERIES = 512
"""Queries that share a mask."""


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse tensors that do not go together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ArgumentError(f"{name} shape", tuple(tensor.shape), "must be [batch, heads, tokens, head_dim]")
    B, H, _, D = query.shape
    K, T = key.shape[1], key.shape[2]
    if key.shape[0] != B or key.shape[3] != D:
        raise ArgumentError("key shape", tuple(key.shape), f"must be [{B}, K, T, {D}] to match the query")
    if tuple(value.shape[:3]) != (B, K, T):
        raise ArgumentError("value shape", tuple(value.shape), f"must be [{B}, {K}, {T}, V] to match the key")
    if K < 1 or H % K:
        raise ArgumentError("key heads", K, f"must divide the {H} query heads")


def check_window(window: int | None, is_causal: bool) -> None:
    """Refuse a window of nothing, or of no direction."""
    if window is not None and (window < 1 or not is_causal):
        raise ArgumentError("window", window, "must be at least 1, and is_causal true with it")
