"""Call the compiled kernel of attention to keys and values in trellis codes, ``heads.cpp``.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim, P rotary dims,
F frequencies of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.runtime.kernels.native.codes.attention import TrellisLayout, call_on_codes


@dataclass(frozen=True, eq=False)
class HeadsLayout(TrellisLayout):
    """How the kernel reads the codes of a layer's keys and values.

    Levels lie in rows of columns: all heads' keys, then all values, each padded to a multiple of
    `headwise.runtime.kernels.native.codes.sizes.CHANNELS`. The two dims of a rotary pair are P/2 apart.

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
        layout: of the codes.
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
    sizes = layout.value_dim, layout.value_dim, layout.heads
    stored = codes, wide, first
    return call_on_codes("headwise_heads", query, stored, layout, rotation, frequency, mask, is_causal, scale, sizes)
