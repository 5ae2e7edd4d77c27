"""Cost of expert-decoded latent attention, with the mixture of experts applied to the query or to keys and values.

With one row of gates (a single new token, or gates for the whole sequence) an expanded layer mixes the decoders first
and decodes once. With a row for each token it decodes with one expert after the other and mixes scores and outputs,
so that the keys and values of only one decoder are held at a time.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.formulas import activations as keep
from headwise.costs.formulas.activations import Heads, KeptOver, KeptTensor, Training
from headwise.costs.formulas.stages import Core, Linear, Product, Size, Stage, Vector
from headwise.errors import ArgumentError
from headwise.models.specs.expert_latent import ExpertLatentSpec

IMPLS = ("expanded", "absorbed")
"""``expanded`` decodes keys and values. ``absorbed`` folds the mixed decoders into the query and the output, except
for the rotated channels of the keys: their rotation by the key's position stands between decoder and query."""


def stages(spec: ExpertLatentSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    E, H, D = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.head_dim, "D")
    K, C, X = Size(spec.latent_kv_heads, "K"), Size(spec.kv_dim, "C"), Size(spec.num_experts, "X")
    one_row = has_one_row(spec, new_tokens)
    core = _absorbed(spec, H, D, C, X, one_row) if impl == "absorbed" else _expanded(H, D, C, X, one_row)
    return (
        Linear("q_proj", E, H * D, "q_proj" in spec.bias),
        Linear("kv_a_proj", E, 2 * K * C, "kv_a_proj" in spec.bias, over="source"),
        Linear(
            "gate_proj",
            H * D,
            X,
            "gate_proj" in spec.bias,
            over="call" if spec.conditioning == "sequence" else "new",
            reads="inner",
        ),
        Vector("k_experts", X * H * C * D),
        Vector("v_experts", X * H * C * D),
        *core,
        Linear("o_proj", H * D, E, "o_proj" in spec.bias, reads="inner"),
    )


def has_one_row(spec: ExpertLatentSpec, new_tokens: int) -> bool:
    """Whether all queries of a call share one row of gates."""
    return new_tokens == 1 or spec.conditioning == "sequence"


def _expanded(H: Size, D: Size, C: Size, X: Size, one_row: bool) -> tuple[Stage, ...]:
    if one_row:
        return (
            Product("mix decoders", 2 * X * H * C * D, 2 * H * C * D, over="call"),
            Product("decode keys and values", 2 * H * C * D, 2 * H * D, over="total"),
            Core(H, D, D),
        )
    decoded = Product("decode keys and values", 2 * X * H * C * D, 2 * X * H * D, over="total")
    return decoded, Core(H, X * D, X * D, can_fuse=False)


def _absorbed(spec: ExpertLatentSpec, H: Size, D: Size, C: Size, X: Size, one_row: bool) -> tuple[Stage, ...]:
    absorb_values = Product("absorb values", X * H * C * D, H * (C + D))
    if spec.rope is None:
        return Product("absorb keys", X * H * D * C, H * (D + C)), Core(H, C, C), absorb_values
    P = Size(spec.rope.dim, "P")
    absorb_keys = Product("absorb keys", X * H * (D - P) * C, H * (D + C))
    content = C if spec.rope.dim < spec.head_dim else Size(0)
    if one_row:
        return (
            absorb_keys,
            Product("mix rotary decoders", X * H * C * P, H * C * P, over="call"),
            Product("decode rotary keys", H * C * P, H * P, over="total"),
            Core(H, content + P, C, can_fuse=False),
            absorb_values,
        )
    return (
        absorb_keys,
        Product("decode rotary keys", X * H * C * P, X * H * P, over="total"),
        Core(H, content + X * P, C, can_fuse=False),
        absorb_values,
    )


def best_impl(spec: ExpertLatentSpec, new_tokens: int, total_tokens: int, pairs: int) -> str:
    """The implementation with fewer FLOPs, by plain ints of one head: a layer calls this while it is compiled."""
    D, C, X = spec.head_dim, spec.kv_dim, spec.num_experts
    P = 0 if spec.rope is None else spec.rope.dim
    one_row = has_one_row(spec, new_tokens)
    decoders = 1 if one_row else X
    # One dim of all keys, and the mixture of its decoders.
    decoded = C * (decoders * total_tokens + (X if one_row else 0))
    expanded = 2 * D * decoded + pairs * 2 * decoders * D
    content = C if P < D else 0
    absorbed = new_tokens * X * C * (2 * D - P) + P * decoded + pairs * (content + decoders * P + C)
    return "expanded" if expanded < absorbed else "absorbed"


def cache_values(spec: ExpertLatentSpec) -> Size:
    """Values cached for a token: the key latents and the value latents."""
    return 2 * Size(spec.latent_kv_heads, "K") * Size(spec.kv_dim, "C")


def shard(spec: ExpertLatentSpec, ranks: int) -> ExpertLatentSpec:
    """The part of a layer on one of several ranks, which exchange nothing but sums of their gates' logits."""
    heads, latents = spec.num_heads, spec.latent_kv_heads
    if heads % ranks or max(latents, ranks) % min(latents, ranks):
        rule = f"must divide num_heads = {heads}, and divide or be a multiple of latent_kv_heads = {latents}"
        raise ArgumentError("ranks", ranks, rule)
    return replace(spec, num_heads=heads // ranks, latent_kv_heads=-(-latents // ranks))


def activations(spec: ExpertLatentSpec, impl: str, training: Training) -> tuple[KeptTensor, ...]:
    """The tensors that one layer keeps for the backward pass."""
    E, H, D = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.head_dim, "D")
    P = Size(0) if spec.rope is None else Size(spec.rope.dim, "P")
    by_sequence = spec.conditioning == "sequence"
    rows: KeptOver = "call" if by_sequence else "new"
    # The gates of a token read its whole query, and absorption reads the part of it that is not rotated.
    query_is_read = not by_sequence or (impl == "absorbed" and D > P)
    kept = [
        *keep.inputs(training, E),
        *((KeptTensor("query", H * D, "new"),) if query_is_read else ()),
        *((KeptTensor("mean query", H * D, "call"),) if by_sequence else ()),
        KeptTensor("gates", Size(spec.num_experts, "X"), rows, "float32"),
        KeptTensor("top-k indices", spec.top_k, rows, "index"),
        KeptTensor("kept gates", Size(spec.num_experts, "X"), rows),
    ]
    if spec.rope is not None:
        kept += [KeptTensor("cos, sin", P, "queries"), KeptTensor("cos, sin of keys", P, "keys")]
    kept += (_kept_absorbed if impl == "absorbed" else _kept_expanded)(spec, training, by_sequence)
    return tuple(kept)


def _kept_expanded(spec: ExpertLatentSpec, training: Training, by_sequence: bool) -> list[KeptTensor]:
    H, D, K = Size(spec.num_heads, "H"), Size(spec.head_dim, "D"), Size(spec.latent_kv_heads, "K")
    C, X = Size(spec.kv_dim, "C"), Size(spec.num_experts, "X")
    if by_sequence:
        core = keep.core(training, Heads(H, H, D, D), contiguous=spec.rope is not None)
        return [KeptTensor("mixed decoders", 2 * H * C * D, "call"), KeptTensor("latents", 2 * K * C, "total"), *core]
    return [
        *_kept_rotated_query(spec),
        KeptTensor("key decoders", X * H * C * D if _keys_are_laid_out(spec, D) else 0, "once"),
        KeptTensor("value decoders", X * H * C * D if _values_are_laid_out(spec) else 0, "once"),
        KeptTensor("latents", 2 * K * C, "total"),
        KeptTensor("gated queries", X * H * D, "new"),
        KeptTensor("keys and values of every expert", 2 * X * H * D, "total"),
        *_kept_weights(training, H),
        KeptTensor("mixed by every expert", X * H * D, "new"),
        KeptTensor("merged heads", H * D, "new"),
    ]


def _kept_absorbed(spec: ExpertLatentSpec, training: Training, by_sequence: bool) -> list[KeptTensor]:
    H, D, K = Size(spec.num_heads, "H"), Size(spec.head_dim, "D"), Size(spec.latent_kv_heads, "K")
    C, X = Size(spec.kv_dim, "C"), Size(spec.num_experts, "X")
    P = Size(0) if spec.rope is None else Size(spec.rope.dim, "P")
    copied = _latents_are_copied(training, K)
    kept = []
    if D > P:
        kept += [KeptTensor("gated query", X * H * (D - P), "new")]
        kept += [KeptTensor("key decoders", X * H * C * (D - P), "once")] if X > 1 and P > 0 and D - P > 1 else []
    if spec.rope is None:
        kept += keep.core(training, Heads(H, K, C, C), read_from="heads")
    else:
        kept += _kept_rotary(spec, training, by_sequence, H, K, C, X, P)
        kept += _kept_rotated_query(spec)
        if D > P:
            kept += [KeptTensor("absorbed query", H * C, "new")]
            kept += [KeptTensor("key latents", K * C, "total")] if copied else []
        kept += [*_kept_weights(training, H), KeptTensor("mixed latents", H * C, "new")]
        kept += [KeptTensor("value latents", K * C, "total")] if copied else []
    kept += [KeptTensor("gated latents", X * H * C, "new"), KeptTensor("merged heads", H * D, "new")]
    return kept


def _kept_rotary(
    spec: ExpertLatentSpec, training: Training, by_sequence: bool, H: Size, K: Size, C: Size, X: Size, P: Size
) -> list[KeptTensor]:
    """Tensors of the keys' rotated channels: of one mixture, or of every expert."""
    if by_sequence:
        return [
            KeptTensor("mixed decoders", H * C * P, "call"),
            KeptTensor("latents", K * C if _latents_are_copied(training, K) else 2 * K * C, "total"),
            KeptTensor("rotary keys", H * P, "total"),
        ]
    return [
        KeptTensor("rotary decoders", X * H * C * P if _keys_are_laid_out(spec, P) else 0, "once"),
        KeptTensor("latents", 2 * K * C, "total"),
        KeptTensor("gated queries", X * H * P, "new"),
        KeptTensor("rotary keys of every expert", X * H * P, "total"),
    ]


def _kept_rotated_query(spec: ExpertLatentSpec) -> list[KeptTensor]:
    width = Size(spec.num_heads, "H") * Size(spec.head_dim, "D")
    return [] if spec.rope is None else [KeptTensor("rotated query", width, "new")]


def _keys_are_laid_out(spec: ExpertLatentSpec, width: int) -> bool:
    """Whether the key decoders of heads that share a latent have to be copied to lie side by side."""
    are_side_by_side = spec.num_experts == 1 and width == spec.head_dim
    return spec.num_heads > spec.latent_kv_heads and width > 1 and not are_side_by_side


def _values_are_laid_out(spec: ExpertLatentSpec) -> bool:
    """Whether the value decoders of heads that share a latent have to be copied to lie side by side."""
    are_side_by_side = spec.num_experts == 1 and spec.kv_dim == 1
    return spec.num_heads > spec.latent_kv_heads and spec.head_dim > 1 and not are_side_by_side


def _latents_are_copied(training: Training, K: Size) -> bool:
    """Whether the key (or value) latents have to be copied to be read head by head; if not, both are one tensor."""
    return K > 1 and not training.batch_of_one


def _kept_weights(training: Training, H: Size) -> list[KeptTensor]:
    """The attention weights as in `keep.softmax`, but in the layer's dtype once they are normalised."""
    softmax = keep.softmax(training, H)
    weights = KeptTensor("weights in the layer's dtype", H, "scores")
    if training.is_masked:
        return [softmax[0], weights, softmax[2]]
    return [softmax[0], weights] if training.half else [softmax[0]]
