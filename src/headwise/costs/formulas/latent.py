"""Cost of MLA in three implementations: expanded or absorbed from cached latents, or with decoded keys cached.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C for the absorption.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.formulas import activations as keep
from headwise.costs.formulas.activations import Heads, KeptTensor, Storages, Training
from headwise.costs.formulas.stages import Core, Linear, Over, Product, Size, Stage, Vector
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs.latent import LatentSpec

IMPLS = ("expanded", "absorbed", "cached_kv")
"""``expanded`` decodes keys and values from every cached latent; ``absorbed`` never decodes them; ``cached_kv``, as
in some frameworks, decodes those of the new tokens and caches the result, which saves no memory."""


def stages(spec: LatentSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    E, H, R = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.kv_lora_rank, "R")
    N, P, V = Size(spec.qk_nope_head_dim, "N"), Size(spec.qk_rope_head_dim, "P"), Size(spec.v_head_dim, "V")

    def has_bias(name: str) -> bool:
        return name in spec.bias

    query: tuple[Stage, ...]
    down: tuple[Stage, ...] = (
        Linear("kv_a_proj_with_mqa", E, R + P, has_bias("kv_a_proj_with_mqa"), over="source"),
        Vector("kv_a_layernorm", R if spec.latent_norm else 0),
    )
    if spec.qk_norm is not None:
        query, down = _behind_norms(spec)
    elif spec.q_lora_rank is None:
        query = (Linear("q_proj", E, H * (N + P), has_bias("q_proj")),)
    else:
        Q = Size(spec.q_lora_rank, "Q")
        query = (
            Linear("q_a_proj", E, Q, has_bias("q_a_proj")),
            Vector("q_a_layernorm", Q if spec.latent_norm else 0),
            Linear("q_b_proj", Q, H * (N + P), has_bias("q_b_proj"), reads="inner"),
        )
    over: Over = "source" if impl == "cached_kv" else "total"
    up = Linear("kv_b_proj", R, H * (N + V), has_bias("kv_b_proj"), over=over, reads="inner")
    core: tuple[Stage, ...]
    if impl == "absorbed":
        core = (
            Product("absorb keys", H * N * R, H * (N + R), part_of="kv_b_proj"),
            Core(H, *absorbed_widths(spec)),
            Product("absorb values", H * R * V, H * (R + V), part_of="kv_b_proj"),
            Vector("kv_b_proj", up.parameters),
        )
    else:
        core = (up, Core(H, N + P, V))
    return (*query, *down, *core, Linear("o_proj", H * V, E, has_bias("o_proj"), reads="inner"))


def _behind_norms(spec: LatentSpec) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """The stages of the queries and of the latent, of a layer whose queries and keys are normed first."""
    assert spec.num_kv_heads is not None
    assert spec.head_dim is not None
    E, H, R = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.kv_lora_rank, "R")
    N, P, V = Size(spec.qk_nope_head_dim, "N"), Size(spec.qk_rope_head_dim, "P"), Size(spec.v_head_dim, "V")
    K, D = Size(spec.num_kv_heads, "K"), Size(spec.head_dim, "D")
    is_whole = spec.qk_norm == "full"
    maps = H * (N + P) * D
    query = (
        Linear("q_proj", E, H * D),
        Vector("q_norm", H * D if is_whole else D),
        Product("q_b_proj", maps, H * (D + N + P), parameters=maps),
    )
    down = (
        Linear("k_proj", E, K * D, over="source"),
        Vector("k_norm", K * D if is_whole else D),
        Linear("v_proj", E, K * V, over="source"),
        Linear("kv_a_proj_with_mqa", K * (D + V), R + P, over="source", reads="inner"),
        Vector("kv_a_layernorm", R if spec.latent_norm else 0),
    )
    return query, down


def absorbed_widths(spec: LatentSpec) -> tuple[int, int]:
    """Query–key width and value width of an absorbed head: ``(R + P, R)``.

    Without content dims the scores come from the rotary key alone. A value bias takes one more column, which adds up
    each row's weights.
    """
    R, P = Size(spec.kv_lora_rank, "R"), Size(spec.qk_rope_head_dim, "P")
    return R + P if spec.qk_nope_head_dim else P, R + ("kv_b_proj" in spec.bias)


def best_impl(spec: LatentSpec, new_tokens: int, total_tokens: int, pairs: int) -> str:
    """``absorbed`` when it takes fewer FLOPs than ``expanded``: ``R(N+V)(T−S) > pairs·(2R−N−V)``, N > 0, no bias."""
    R, N, P, V = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    wider = (R + P if N else P) + R + ("kv_b_proj" in spec.bias) - (N + P + V)
    return "absorbed" if R * (N + V) * (total_tokens - new_tokens) > pairs * wider else "expanded"


def cache_values(spec: LatentSpec) -> Size:
    """Values cached for a token: the latent and the rotary key that all heads share."""
    return Size(spec.kv_lora_rank, "R") + Size(spec.qk_rope_head_dim, "P")


def expanded_cache_values(spec: LatentSpec) -> Size:
    """Values cached for a token by ``cached_kv``, which caches decoded keys and values."""
    N, P, V = Size(spec.qk_nope_head_dim, "N"), Size(spec.qk_rope_head_dim, "P"), Size(spec.v_head_dim, "V")
    return Size(spec.num_heads, "H") * (N + P + V)


def shard(spec: LatentSpec, ranks: int) -> LatentSpec:
    """The part of a layer on one of several ranks: its share of the heads, and the whole latent."""
    if spec.num_heads % ranks:
        raise ArgumentError("ranks", ranks, f"must divide num_heads = {spec.num_heads}")
    return replace(spec, num_heads=spec.num_heads // ranks)


def activations(spec: LatentSpec, impl: str, training: Training) -> tuple[KeptTensor, ...]:
    """The tensors that one layer keeps for the backward pass."""
    E, H, R = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.kv_lora_rank, "R")
    N, P, V = Size(spec.qk_nope_head_dim, "N"), Size(spec.qk_rope_head_dim, "P"), Size(spec.v_head_dim, "V")
    if spec.qk_norm is not None:
        raise SpecError("qk_norm", spec.qk_norm, "an MLA layer with it has no list of its activations")
    if impl == "cached_kv":
        raise SpecError("impl", impl, "has no list of its activations: no layer here runs it")
    kept = [*keep.inputs(training, E)]
    if spec.rope is not None:
        kept += keep.rotation(training, P)
    if spec.q_lora_rank is not None:
        Q = Size(spec.q_lora_rank, "Q")
        kept += [KeptTensor("q_b_proj input", Q, "new")]
        kept += keep.norm(training, "q_a_proj output", Q, "new") if spec.latent_norm else ()
    if spec.latent_norm:
        kept += keep.norm(training, "kv_a_proj output", R, "total", storage=R + P)
    if impl == "absorbed":
        return (*kept, *_kept_absorbed(spec, training, H, R, N, P, V))
    kept += [KeptTensor("latent and rotary key", R + P, "total")]
    kept += keep.core(training, Heads(H, H, N + P, V), storages=Storages(value=H * (N + V)))
    return tuple(kept)


def _kept_absorbed(
    spec: LatentSpec, training: Training, H: Size, R: Size, N: Size, P: Size, V: Size
) -> tuple[KeptTensor, ...]:
    """Tensors of an absorbed layer: keys and values are one head, views of the same tensor."""
    has_bias = "kv_b_proj" in spec.bias
    mixed = R + has_bias
    scored = R + P if spec.qk_nope_head_dim else P
    queries = (KeptTensor("query before absorption", H * (N + P), "new"),) if spec.qk_nope_head_dim else ()
    key_is_copied = training.kernel == "padded" and scored < mixed
    core = keep.core(
        training,
        Heads(H, Size(1), scored, mixed),
        storages=Storages(key=R + P, value=mixed if has_bias else R + P if key_is_copied else Size(0)),
        read_from="heads",
    )
    copied = H > 1 and not training.batch_of_one and (training.is_fused or has_bias)
    return (
        *queries,
        *core,
        *((KeptTensor("mixed latents", H * R, "new"),) if copied else ()),
        KeptTensor("merged heads", H * V, "new"),
    )
