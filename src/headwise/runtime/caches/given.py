"""Caches that stand for others: what attention is given, and what masks see, is said by the caller.

Shapes: B batch, K key–value heads, S new tokens, T all tokens, D width of keys, V width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache

Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gives attention keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` for those that it computed of S tokens."""


class GivenCache(DynamicCache):
    """A cache that gives attention what a function returns.

    Args:
        update: the function.
    """

    def __init__(self, update: Update) -> None:
        super().__init__()
        self._update = update

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, T, D]`` and values ``[B, K, T, V]`` in place of those given."""
        return self._update(key_states, value_states)


class OneTokenCache(DynamicCache):
    """A cache as masks see it that holds one token."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Its tokens."""
        return 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the next token."""
        return 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens there are with ``query_length`` more, and the position of their first."""
        return 1 + query_length, 0
