"""Tied attention: a head's keys are its values."""

from __future__ import annotations

from headwise.specs.tied import TiedSpec
from torch import Tensor, nn

from headwise.attention.base import AttentionLayer, CacheLike, merge_heads, split_heads
from headwise.kernels import attend


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

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: CacheLike | None = None,
    ) -> Tensor:
        """Attend; arguments as the other layers'."""
        query = split_heads(self.q_proj(hidden_states), self.spec.num_heads)
        both = split_heads(self.kv_proj(hidden_states), self.spec.num_heads)
        if cache is not None:
            (both,) = cache.update(both)
        attended = attend(query, both, both, attention_mask, is_causal=is_causal, backend=self.backend)
        out: Tensor = self.o_proj(merge_heads(attended))
        return out


def from_spec(spec: TiedSpec) -> TiedAttention:
    """The layer a spec describes."""
    return TiedAttention(spec.hidden_size, spec.num_heads, spec.head_dim)
