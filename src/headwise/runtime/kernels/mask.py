"""Masks: bool, True = attend. Causal is bottom-right: the last query sees every key.

Shapes: B batch, H query heads, S new tokens (queries), T all tokens (keys).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import ArgumentError


class Scoring(NamedTuple):
    """Which tokens each query attends to, and what its scores are multiplied by.

    Attributes:
        mask: bool, broadcastable to ``[B, H, S, T]``, True where a query attends; None for everywhere. A key or value
            that no query sees is never read by kernels.
        is_causal: whether the bottom-right causal mask applies too.
        scale: multiplies the scores.
        window: the number of latest keys that a query sees; all when None.
    """

    mask: Tensor | None
    is_causal: bool
    scale: float
    window: int | None = None


def causal_mask(S: int, T: int, device: torch.device | None = None, window: int | None = None) -> Tensor:
    """Bottom-right causal mask ``[S, T]``: query i sees keys 0 … T − S + i (none when that is negative).

    For example ``causal_mask(2, 3).tolist()`` is ``[[True, True, False], [True, True, True]]``.

    Args:
        S: new tokens.
        T: all tokens.
        device: the device of the mask; torch's default when None.
        window: a query sees only the last ``window`` of these keys.
    """
    mask = torch.ones(S, T, dtype=torch.bool, device=device).tril(T - S)
    return mask if window is None else mask.triu(T - S - window + 1)


def mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    """The strides of a mask ``[B, H, S, T]``, 0 along dimensions that it repeats, and without a mask.

    For example ``mask_strides(torch.ones(2, 1, 3, 5))`` is ``(15, 0, 5, 1)``.
    """
    if mask is None:
        return (0,) * 4
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))


def combine_masks(
    attn_mask: Tensor | None,
    is_causal: bool,
    shape: tuple[int, int, int, int],
    device: torch.device,
    window: int | None = None,
) -> Tensor | None:
    """Combine a user's mask with the causal mask.

    For example ``combine_masks(torch.tensor([[0, 1, 1]]), True, (1, 8, 3, 3), torch.device("cpu"))`` hides the
    first token, and from each query the tokens after it.

    Args:
        attn_mask: ``[B, T]`` padding, or 4-D and broadcastable to ``[B, H, S, T]``; bool or 0/1 integers.
        is_causal: also apply the bottom-right causal mask.
        shape: (B, H, S, T).
        device: the device of the scores.
        window: the number of latest keys that a query sees, with ``is_causal``; all when None.

    Returns:
        A bool mask that broadcasts to ``[B, H, S, T]``, or None when every query sees every key.

    Raises:
        ArgumentError: the mask has another dtype or shape.
    """
    _, _, S, T = shape
    mask = None if attn_mask is None else as_bool_mask(attn_mask, shape)
    if is_causal and (S > 1 or (window is not None and window < T)):
        triangle = causal_mask(S, T, device, window)
        mask = triangle[None, None] if mask is None else mask & triangle
    return mask


def as_bool_mask(attn_mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Check a user's mask and return it as a 4-D bool tensor that broadcasts to ``shape``.

    For example ``as_bool_mask(torch.tensor([[0, 1, 1]]), (1, 8, 1, 3)).tolist()`` is
    ``[[[[False, True, True]]]]``.

    Args:
        attn_mask: ``[B, T]`` padding, or 4-D and broadcastable to ``[B, H, S, T]``; bool or 0/1 integers.
        shape: (B, H, S, T).

    Raises:
        ArgumentError: the mask has another dtype or shape.
    """
    if attn_mask.dtype != torch.bool:
        if attn_mask.is_floating_point() or attn_mask.is_complex():
            rule = "must be bool or 0/1 integers, True = attend; additive masks are not taken"
            raise ArgumentError("attention_mask dtype", str(attn_mask.dtype), rule)
        attn_mask = attn_mask != 0
    B, _, _, T = shape
    sizes = tuple(attn_mask.shape)
    if attn_mask.dim() == 2:
        if sizes[0] not in (1, B) or sizes[1] != T:
            rule = f"a 2-D mask is padding, [batch, keys] = [{B}, {T}]; write an [S, T] mask as mask[None, None]"
            raise ArgumentError("attention_mask shape", sizes, rule)
        return attn_mask[:, None, None, :]  # [B, 1, 1, T]
    if attn_mask.dim() != 4 or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        rule = f"must be [{B}, {T}] or broadcast to [B, H, S, T] = {list(shape)}"
        raise ArgumentError("attention_mask shape", sizes, rule)
    return attn_mask
