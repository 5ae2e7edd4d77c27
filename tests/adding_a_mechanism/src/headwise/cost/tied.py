"""Cost of tied attention."""

from __future__ import annotations

from headwise.specs.tied import TiedSpec

from headwise.cost.stages import Core, Linear, Stage

IMPLS = ("direct",)


def stages(spec: TiedSpec, impl: str) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    width = spec.num_heads * spec.head_dim
    return (
        Linear("q_proj", spec.hidden_size, width),
        Linear("kv_proj", spec.hidden_size, width),
        Core(spec.num_heads, spec.head_dim, spec.head_dim),
        Linear("o_proj", width, spec.hidden_size),
    )


def best_impl(spec: TiedSpec, new_tokens: int, total_tokens: int) -> str:
    """There is one way to compute it."""
    return "direct"


def cache_values(spec: TiedSpec) -> int:
    """One vector a head."""
    return spec.num_heads * spec.head_dim
