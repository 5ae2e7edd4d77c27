"""Choose the backend for a call of `attend`, and refuse calls that a named backend cannot compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels.gpu import why_not_split
from headwise.runtime.kernels.libraries import FLASH_WIDEST, has_flash_in_torch, why_not_flash
from headwise.runtime.kernels.native import are_plain, built, why_not
from headwise.runtime.kernels.packed import FEW_TOKENS

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
        device: their device.
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
        backend: named by the user.
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``.
        value: ``[B, K, T, V]``.
        mask: the user's, or None.
        needs_grad: whether gradients are needed.
        dropout_p: probability of dropping an attention weight.

    Raises:
        ArgumentError: it cannot.
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
        mask: the user's, or None.
    """
    if not query.dtype == key.dtype == value.dtype:
        return False
    if backend == "fused":
        return are_plain(query, key, value, mask)
    return all(x is None or x.device == query.device for x in (key, value, mask))
