"""`attend`: softmax(QKᵀ)V with several backends.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels.backend_choice import (
    BACKENDS,
    PARTICULAR,
    WITHOUT_WEIGHTS,
    Backend,
    choose_backend,
    fits,
    refuse_backend,
)
from headwise.runtime.kernels.gpu import attend_split
from headwise.runtime.kernels.libraries import attend_flash, attend_flex
from headwise.runtime.kernels.mask import as_bool_mask, combine_masks
from headwise.runtime.kernels.native import attend_fused
from headwise.runtime.kernels.packed import FEW_TOKENS, attend_packed
from headwise.runtime.kernels.reference import attend_reference
from headwise.runtime.kernels.sdpa import attend_sdpa


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
        window: with ``is_causal``, the number of latest keys that a query sees; all when None.
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
    backend = _settle(backend, (query, key, value), attn_mask, dropout_p, return_weights=return_weights)
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
        return attend_sdpa(query, key, value, attn_mask, is_causal, window, scale, dropout_p)
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
        ArgumentError: as for `attend`.
    """
    out, weights = attend(query, key, value, return_weights=True, **options)
    return out, weights


def _settle(
    backend: Backend,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout_p: float,
    *,
    return_weights: bool,
) -> Backend:
    """Choose the backend of a call for ``auto``, or check that the named one can compute it.

    Raises:
        ArgumentError: there is no such backend, or it cannot compute the call.
    """
    query, key, value = tensors
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
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
            has_mask=mask is not None,
        ).backend
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
        ArgumentError: they do not.
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
        ArgumentError: it is below 1, or is used without ``is_causal``.
    """
    if window is not None and (window < 1 or not is_causal):
        raise ArgumentError("window", window, "must be at least 1, and is_causal true with it")
