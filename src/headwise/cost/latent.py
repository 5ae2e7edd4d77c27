"""Cost of MLA, three ways: expanded or absorbed from cached latents, or with expanded keys and values cached.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C for the absorption.
"""

from __future__ import annotations

from headwise.cost.stages import Core, Linear, PerHead, Stage, Vector
from headwise.errors import SpecError
from headwise.specs.latent import LatentSpec

IMPLS = ("expanded", "absorbed", "cached_kv")
"""``expanded`` decodes keys and values from every cached latent; ``absorbed`` never decodes them;
``cached_kv`` decodes only the new tokens' and caches the result (no saving, as some frameworks do)."""


def stages(spec: LatentSpec, impl: str) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    if impl not in IMPLS:
        raise SpecError("impl", impl, f"must be one of {IMPLS}")
    E, H, R, P = spec.hidden_size, spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
    N, V, Q = spec.qk_nope_head_dim, spec.v_head_dim, spec.q_lora_rank

    def biased(name: str) -> bool:
        return name in spec.bias

    query: tuple[Stage, ...]
    if Q is None:
        query = (Linear("q_proj", E, H * (N + P), biased("q_proj")),)
    else:
        query = (
            Linear("q_a_proj", E, Q, biased("q_a_proj")),
            Vector("q_a_layernorm", Q if spec.latent_norm else 0),
            Linear("q_b_proj", Q, H * (N + P), biased("q_b_proj")),
        )
    down = (
        Linear("kv_a_proj_with_mqa", E, R + P, biased("kv_a_proj_with_mqa")),
        Vector("kv_a_layernorm", R if spec.latent_norm else 0),
    )
    up = Linear("kv_b_proj", R, H * (N + V), biased("kv_b_proj"), over="new" if impl == "cached_kv" else "total")
    core: tuple[Stage, ...]
    if impl == "absorbed":
        core = (
            PerHead("absorb keys", H, N, R),
            Core(H, *absorbed_widths(spec)),
            PerHead("absorb values", H, R, V),
            Vector("kv_b_proj", up.parameters),
        )
    else:
        core = (up, Core(H, N + P, V))
    return (*query, *down, *core, Linear("o_proj", H * V, E, biased("o_proj")))


def absorbed_widths(spec: LatentSpec) -> tuple[int, int]:
    """What an absorbed head compares and what it mixes: ``(R + P, R)``.

    Without content dims the scores come from the rotary key alone; a value bias takes one more column, which gathers
    the sum of each row's weights.
    """
    scores = spec.qk_rope_head_dim + (spec.kv_lora_rank if spec.qk_nope_head_dim else 0)
    return scores, spec.kv_lora_rank + ("kv_b_proj" in spec.bias)


def best_impl(spec: LatentSpec, new_tokens: int, total_tokens: int) -> str:
    """``absorbed`` when it takes fewer FLOPs than ``expanded``: ``R(N+V)(T−S) > ST(2R−N−V)``, for N > 0, no bias."""
    S, T, decoded = new_tokens, total_tokens, spec.qk_nope_head_dim + spec.v_head_dim
    wider = sum(absorbed_widths(spec)) - spec.qk_rope_head_dim - decoded
    return "absorbed" if spec.kv_lora_rank * decoded * (T - S) > S * T * wider else "expanded"


def cache_values(spec: LatentSpec) -> int:
    """Values cached for a token: the latent and the one rotary key."""
    return spec.kv_lora_rank + spec.qk_rope_head_dim
