"""What every attention layer shares: its call, its checks, its cache."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from headwise.attention.cache import AttentionCache
from headwise.attention.rope import RotaryEmbedding
from headwise.errors import ArgumentError
from headwise.kernels import BACKENDS, Backend
from headwise.specs.base import AttentionSpec, RopeSpec

Rope = RopeSpec | RotaryEmbedding


class CacheLike(Protocol):
    """What a layer needs of a cache; `AttentionCache` is one, transformers' caches are made to look like one."""

    @property
    def length(self) -> int:
        """Tokens held."""

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append, and return all that is held."""

    def views(self) -> tuple[Tensor, ...]:
        """All that is held."""


class AttentionLayer(nn.Module):
    """Base of the layers.

    Args:
        spec: what the layer is; its cost is `headwise.cost` of this.
        dropout: probability of dropping an attention weight while training.
        backend: passed to `headwise.kernels.attend`.
    """

    def __init__(self, spec: AttentionSpec, *, dropout: float = 0.0, backend: Backend = "auto") -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ArgumentError("dropout", dropout, "must be at least 0 and below 1")
        if backend not in BACKENDS:
            raise ArgumentError("backend", backend, f"must be one of {', '.join(BACKENDS)}")
        self.spec = spec
        self.dropout = dropout
        self.backend: Backend = backend

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, width) of each tensor this layer caches."""
        raise NotImplementedError

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> AttentionCache:
        """An empty cache for this layer, of the weights' dtype and device unless told otherwise."""
        weight = next(self.parameters())
        return AttentionCache(
            batch_size,
            self.cache_shapes(),
            max_length,
            dtype=dtype or weight.dtype,
            device=device or weight.device,
        )

    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def _check_hidden(self, name: str, states: Tensor) -> None:
        if states.dim() != 3 or states.shape[2] != self.spec.hidden_size:
            rule = f"must be [batch, tokens, hidden_size = {self.spec.hidden_size}]"
            raise ArgumentError(f"{name} shape", tuple(states.shape), rule)


def as_rotary(rope: Rope | None) -> RotaryEmbedding | None:
    """A module from a spec; a module and None pass."""
    return RotaryEmbedding(rope) if isinstance(rope, RopeSpec) else rope


def positions(start: int, states: Tensor, given: Tensor | None) -> Tensor:
    """Position ids ``[B or 1, S]`` of ``[B, S, E]`` states: those given, or ``start … start + S − 1``."""
    B, S = states.shape[:2]
    if given is None:
        return torch.arange(start, start + S, device=states.device)[None]
    if given.dim() == 1:
        given = given[None]
    if given.dim() != 2 or given.shape[0] not in (1, B) or given.shape[1] != S:
        raise ArgumentError("position_ids shape", tuple(given.shape), f"must be [{B} or 1, {S}]")
    return given


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, S, heads·D]`` → ``[B, heads, S, D]``, a view."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """``[B, heads, S, D]`` → ``[B, S, heads·D]``."""
    return x.transpose(1, 2).flatten(-2)
