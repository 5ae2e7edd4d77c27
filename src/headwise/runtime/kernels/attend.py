"""`attend`: softmax(QKᵀ)V with several backends, and the choice among them.

Calls that a named backend cannot compute are refused.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels.gpu import attend_split, why_not_split
from headwise.runtime.kernels.mask import Scoring, as_bool_mask, combine_masks
from headwise.runtime.kernels.native import are_plain, attend_fused, built, why_not
from headwise.runtime.kernels.reference import attend_reference
from headwise.runtime.kernels.sdpa import (
    FEW_TOKENS,
    FLASH_WIDEST,
    attend_flash,
    attend_flex,
    attend_packed,
    attend_sdpa,
    has_flash_in_torch,
    why_not_flash,
)

Shape = Sequence[int]
Backend = Literal["auto", "reference", "sdpa", "packed", "fused", "split", "flex", "flash"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "sdpa", "packed", "fused", "split", "flex", "flash")
"""Every value of ``backend``."""
WITHOUT_WEIGHTS: tuple[Backend, ...] = ("sdpa", "fused", "split", "flex", "flash")
"""Backends that never have all weights in memory, and so cannot return them."""
PARTICULAR: tuple[Backend, ...] = ("fused", "split", "flex", "flash")
"""Backends that support only some tensors: with others, naming them is an error and ``auto`` does not choose them."""


@dataclass(frozen=True)
class Choice:
    """The backend that ``backend="auto"`` chooses, and why."""

    backend: Backend
    reason: str


def choose_backend(
    query: Shape,
    key: Shape,
    *,
    return_weights: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    needs_grad: bool = False,
    dropout_p: float = 0.0,
    value_dim: int | None = None,
    has_mask: bool = False,
) -> Choice:
    """The backend that ``backend="auto"`` chooses for a call of `attend`, and why.

    Args:
        query: shape of the query, ``(B, H, S, D)``.
        key: shape of the key, ``(B, K, T, D)``.
        return_weights: whether the attention weights are returned too.
        dtype: the dtype of the tensors.
        device: the device of the tensors.
        needs_grad: whether gradients are computed through the call.
        dropout_p: probability of dropping an attention weight.
        value_dim: V, the width of a value; the query's D when None.
        has_mask: whether there is a mask.

    >>> choose_backend((1, 32, 64, 128), (1, 8, 8192, 128), needs_grad=True).backend
    'sdpa'
    """
    if return_weights:
        return Choice("packed", "the weights are requested, and only packed and reference compute them all")
    S, K, T = query[2], key[1], key[2]
    is_few = S <= FEW_TOKENS
    why = f"few new tokens ({S}): reading {K} key–value heads once takes most of the time"
    if not is_few:
        why = f"{S} new tokens: blocked softmax, no {S} × {T} scores held"
    if torch.device(device).type == "cuda":
        reason = why_not_split(dtype, torch.device(device), query[3], needs_grad=needs_grad)
        width = query[3] if value_dim is None else value_dim
        fits = dtype.itemsize < 4 and query[3] == width <= FLASH_WIDEST and not has_mask
        if S == 1 and fits and has_flash_in_torch(torch.device(device)):
            return Choice("sdpa", f"{why}; torch's own kernel splits the tokens of one query, and starts sooner")
        if is_few and dtype.itemsize == 4 and query[3] > FLASH_WIDEST:
            return Choice("packed", f"{why}; products of wide float32 heads are the library's best")
        if is_few and reason is None and not dropout_p:
            return Choice("split", f"{why}, its parts at once")
        if is_few:
            return Choice("packed", why)
        if why_not_flash(dtype, torch.device(device), query[3], width, has_mask=has_mask) is None:
            return Choice("flash", f"{why}; it takes grouped heads, windows and cached tokens without copies")
        return Choice("sdpa", why)
    reason = why_not(dtype, torch.device(device), needs_grad=needs_grad)
    if dropout_p:
        reason = "it has no dropout"
    elif reason is None and not is_few and dtype.itemsize < 4 and not (dtype == torch.bfloat16 and built().has_pairs):
        reason = f"it would widen {dtype} first"
    if reason is None:
        return Choice("fused", why)
    return Choice("packed" if is_few else "sdpa", f"{why}; not the fused kernel: {reason}")


def refuse_backend(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    needs_grad: bool,
    dropout_p: float,
) -> None:
    """Refuse a call that a backend cannot compute.

    Args:
        backend: the backend that the user named.
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        mask: the user's mask, or None.
        needs_grad: whether gradients are needed.
        dropout_p: probability of dropping an attention weight.

    Raises:
        ArgumentError: the backend cannot compute the call.
    """
    if dropout_p and backend != "flash":
        raise ArgumentError("backend", backend, "has no dropout; use another, or auto")
    reason = None
    if backend == "fused":
        reason = why_not(query.dtype, query.device, needs_grad=needs_grad)
    elif backend == "flash":
        widths = query.shape[3], value.shape[3]
        reason = why_not_flash(query.dtype, query.device, *widths, has_mask=mask is not None)
    elif backend == "split":
        reason = why_not_split(query.dtype, query.device, query.shape[3], needs_grad=needs_grad)
    if reason is not None:
        raise ArgumentError("backend", backend, f"cannot compute this call: {reason}; use another, or auto")
    if not fits(backend, query, key, value, mask):
        raise ArgumentError("backend", backend, "takes plain tensors on one device, of one dtype")


def fits(backend: Backend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel supports these tensors: one dtype, one device, and on the CPU no subclasses.

    Args:
        backend: one of `PARTICULAR`.
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        mask: the user's mask, or None.
    """
    if not query.dtype == key.dtype == value.dtype:
        return False
    if backend == "fused":
        return are_plain(query, key, value, mask)
    return all(x is None or x.device == query.device for x in (key, value, mask))


class AttendOptions(TypedDict, total=False):
    """The keyword arguments of `attend_with_weights`; `attend` describes them."""

    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    window: int | None
    backend: Backend


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
) -> Tensor:
    """Compute ``softmax(scale · Q Kᵀ) V``, with the arguments of torch's ``scaled_dot_product_attention``.

    It differs from torch's function in three ways: causal is bottom-right when T > S, a mask and ``is_causal``
    combine, and a query with nothing to attend to gives zeros.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``; K divides H, and query head i reads head ``i // (H / K)``.
        value: ``[B, K, T, V]``.
        attn_mask: bool or 0/1 integers, True = attend; ``[B, T]`` padding, or broadcastable to ``[B, H, S, T]``.
        dropout_p: probability of dropping an attention weight.
        is_causal: query i of S sees keys 0 … T − S + i.
        scale: multiplies the scores; ``1/sqrt(D)`` when None.
        enable_gqa: when False, K must equal H, as in torch.
        window: the number of latest keys that a query sees, with ``is_causal``; all when None.
        backend: ``auto`` chooses by shape (`choose_backend` says which); results differ only by rounding.
        return_weights: return a pair, the output and the weights ``[B, H, S, T]``. The annotation does not have the
            pair; typed code calls `attend_with_weights`.

    Returns:
        The output ``[B, H, S, V]``, or the pair.

    Raises:
        ArgumentError: shapes, mask or backend do not fit together, or weights are requested from a backend that does
            not compute them all (`WITHOUT_WEIGHTS`).

    >>> query, cache = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 100, 64)
    >>> attend(query, cache, cache, is_causal=True).shape
    torch.Size([1, 8, 1, 64])
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
    if scale is None:
        scale = D**-0.5
    backend = _checked_backend(backend, (query, key, value), attn_mask, dropout_p, return_weights=return_weights)
    scoring = Scoring(attn_mask, is_causal, scale, window)
    if backend in ("flash", "sdpa"):
        return (attend_flash if backend == "flash" else attend_sdpa)(query, key, value, scoring, dropout_p)
    if backend in PARTICULAR:
        if attn_mask is not None:
            scoring = scoring._replace(mask=as_bool_mask(attn_mask, (B, H, S, T)))
        kernel = attend_fused if backend == "fused" else attend_split if backend == "split" else attend_flex
        return kernel(query, key, value, scoring)
    mask = combine_masks(attn_mask, is_causal, (B, H, S, T), query.device, window)
    weights: Tensor | None
    if backend == "packed":
        out, weights = attend_packed(query, key, value, mask, scale, dropout_p, return_weights=return_weights)
    else:
        out, weights = attend_reference(query, key, value, mask, scale, dropout_p)
    if return_weights:
        return out, weights  # type: ignore[return-value]  # the annotation does not have the pair
    return out


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttendOptions]
) -> tuple[Tensor, Tensor]:
    """Compute `attend` and return the attention weights too.

    For example ``output, weights = attend_with_weights(query, key, value, is_causal=True)``.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        options: keyword arguments of `attend`.

    Returns:
        The output ``[B, H, S, V]`` and the weights ``[B, H, S, T]``, after dropout.

    Raises:
        ArgumentError: as `attend` raises it.
    """
    out, weights = attend(query, key, value, return_weights=True, **options)
    return out, weights


def _checked_backend(
    backend: Backend,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout_p: float,
    *,
    return_weights: bool,
) -> Backend:
    """Choose the backend of a call for ``auto``, or check that the named one can compute it.

    Raises:
        ArgumentError: the backend does not exist, or cannot compute the call.
    """
    query, key, value = tensors
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if backend == "auto":
        given: dict[str, Any] = {
            "dtype": query.dtype,
            "device": query.device,
            "needs_grad": needs_grad,
            "dropout_p": dropout_p,
        }
        given |= {"return_weights": return_weights, "value_dim": value.shape[3], "has_mask": mask is not None}
        backend = choose_backend(query.shape, key.shape, **given).backend
        if backend in PARTICULAR and not fits(backend, query, key, value, mask):
            backend = "packed" if query.shape[2] <= FEW_TOKENS else "sdpa"  # torch reports what is wrong with them
    elif backend not in BACKENDS:
        raise ArgumentError("backend", backend, f"must be one of {', '.join(BACKENDS)}")
    elif backend in PARTICULAR:
        refuse_backend(backend, query, key, value, mask, needs_grad=needs_grad, dropout_p=dropout_p)
    if return_weights and backend in WITHOUT_WEIGHTS:
        raise ArgumentError("backend", backend, "never holds the weights; use reference, packed or auto")
    return backend


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that the shapes of queries, keys and values fit together.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.

    Raises:
        ArgumentError: the shapes do not fit together.
    """
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
    """Check a window.

    Raises:
        ArgumentError: the window is below 1, or is used without ``is_causal``.
    """
    if window is not None and (window < 1 or not is_causal):
        raise ArgumentError("window", window, "must be at least 1, and is_causal true with it")
