"""Tied attention: a head's keys are its values."""

from __future__ import annotations

from headwise.models.specs.tied import TiedSpec
from torch import Tensor, nn

from headwise.runtime.attention.base import AttentionLayer, Call, Cut, HeadSplit, merge_heads, split_heads


class TiedAttention(AttentionLayer):
    """One projection is both keys and values."""

    spec: TiedSpec

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__(TiedSpec(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim))
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """One tensor for both."""
        return ((self.spec.num_heads, self.spec.head_dim),)

    def head_split(self) -> HeadSplit:
        """Ranks share heads."""
        heads = self.spec.num_heads
        return HeadSplit({"q_proj": Cut(0, heads), "kv_proj": Cut(0, heads), "o_proj": Cut(1, heads)})

    def _states_to_cache(self, states: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        return (split_heads(self.kv_proj(states), self.spec.num_heads),)

    def _attend(
        self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call
    ) -> Tensor | tuple[Tensor, Tensor]:
        (both,) = memory
        mixed, weights = self._kernel(
            split_heads(self.q_proj(hidden_states), self.spec.num_heads), both, both, call, None
        )
        out: Tensor = self.o_proj(merge_heads(mixed))
        return out if weights is None else (out, weights)


def from_spec(spec: TiedSpec) -> TiedAttention:
    """The layer a spec describes."""
    return TiedAttention(spec.hidden_size, spec.num_heads, spec.head_dim)
