"""The few kinds of work an attention layer is made of.

A mechanism's formulas are the list of its stages; parameters, FLOPs and library counts are sums over that one
list, so that no number is derived twice. Symbols: B batch, S new tokens, T all key–value tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Linear:
    """A projection ``y = x Wᵀ (+ b)`` of every new token, or (``over="total"``) of every cached one."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    over: Literal["new", "total"] = "new"

    @property
    def parameters(self) -> int:
        """Weights and bias."""
        return self.out_features * (self.in_features + self.bias)

    def macs(self, batch: int, new_tokens: int, total_tokens: int) -> int:
        """Multiply-adds, the bias not counted."""
        tokens = new_tokens if self.over == "new" else total_tokens
        return batch * tokens * self.in_features * self.out_features


@dataclass(frozen=True)
class PerHead:
    """A product of each head's part of the new tokens with a matrix that is counted elsewhere (absorption)."""

    name: str
    heads: int
    in_features: int
    out_features: int
    parameters: int = 0

    def macs(self, batch: int, new_tokens: int, total_tokens: int) -> int:
        """Multiply-adds."""
        return batch * new_tokens * self.heads * self.in_features * self.out_features


@dataclass(frozen=True)
class Vector:
    """A parameter vector whose arithmetic is elementwise, and so not counted: a norm's weight, sink logits."""

    name: str
    parameters: int

    def macs(self, batch: int, new_tokens: int, total_tokens: int) -> int:
        """None: elementwise work is not a matrix product."""
        return 0


@dataclass(frozen=True)
class Core:
    """``softmax(QKᵀ)V`` of all heads; the only stage that sees pairs of tokens."""

    heads: int
    qk_dim: int
    v_dim: int
    name: str = "attention"
    parameters: int = 0

    def macs_per_pair(self) -> int:
        """Multiply-adds for each (query, key) pair that is attended to."""
        return self.heads * (self.qk_dim + self.v_dim)


Stage = Linear | PerHead | Vector | Core


def attended_pairs(new_tokens: int, total_tokens: int, *, causal: bool, window: int | None = None) -> int:
    """How many (query, key) pairs the mask leaves, for one head of one sequence.

    Causal is bottom-right: the last of S queries sees all T keys. A query at position i (counted from 1) sees
    ``min(i, window)`` keys when causal, else T.
    """
    if not causal:
        return new_tokens * total_tokens
    first = total_tokens - new_tokens + 1
    if window is None or window >= total_tokens:
        return new_tokens * (first + total_tokens) // 2
    growing_last = min(window, total_tokens)
    if first >= growing_last:
        return new_tokens * window
    growing = growing_last - first + 1
    return growing * (first + growing_last) // 2 + (new_tokens - growing) * window
