"""Cost of MHA, MQA and GQA.

Parameters ``E·D·(2H+2K)`` for equal key and value widths; forward FLOPs ``2BSED(2H+2K) + 4BHSTD``; cache
``2KD`` values a token.
"""

from __future__ import annotations

from headwise.cost.stages import Core, Linear, Stage, Vector
from headwise.errors import SpecError
from headwise.specs.grouped import GroupedSpec

IMPLS = ("direct",)


def stages(spec: GroupedSpec, impl: str) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    if impl not in IMPLS:
        raise SpecError("impl", impl, f"{spec.mechanism} has only {IMPLS}")
    E, H, K, D, V = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    norm = {None: (0, 0), "head": (D, D), "full": (H * D, K * D)}[spec.qk_norm]
    keys: tuple[Stage, ...] = (
        Linear("k_proj", E, K * D, "k_proj" in spec.bias),
        Linear("v_proj", E, K * V, "v_proj" in spec.bias),
        Vector("k_norm", norm[1]),
    )
    gated = 2 if spec.output_gate else 1
    return (
        Linear("q_proj", E, gated * H * D, "q_proj" in spec.bias),
        *(() if spec.shares_kv else keys),
        Vector("q_norm", norm[0]),
        Vector("sinks", H if spec.sinks else 0),
        Core(H, D, V),
        Linear("o_proj", H * V, E, "o_proj" in spec.bias),
    )


def best_impl(spec: GroupedSpec, new_tokens: int, total_tokens: int) -> str:
    """There is one way to compute it."""
    return "direct"


def cache_values(spec: GroupedSpec) -> int:
    """Values cached for a token: every key and value head, or none where an earlier layer's are read."""
    return 0 if spec.shares_kv else spec.num_kv_heads * (spec.head_dim + spec.value_dim)
