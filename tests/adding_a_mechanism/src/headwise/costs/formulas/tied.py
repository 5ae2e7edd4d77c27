"""Cost of tied attention."""

from __future__ import annotations

from headwise.models.specs.tied import TiedSpec

from headwise.costs.formulas.stages import Core, Linear, Size, Stage

IMPLS = ("direct",)


def stages(spec: TiedSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    E, H, D = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.head_dim, "D")
    return (
        Linear("q_proj", E, H * D),
        Linear("kv_proj", E, H * D, over="source"),
        Core(H, D, D),
        Linear("o_proj", H * D, E, reads="inner"),
    )


def cache_values(spec: TiedSpec) -> Size:
    """One vector a head."""
    return Size(spec.num_heads, "H") * Size(spec.head_dim, "D")
