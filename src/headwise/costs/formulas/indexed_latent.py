"""Cost of MLA with an indexer: that of MLA over the selected pairs, and the indexer's over all pairs.

The indexer is counted as transformers computes it: scores of all its heads, and their weighted sum. Choosing the
largest is not a matrix product, and its gradients are not computed.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.formulas import latent
from headwise.costs.formulas.stages import Core, IndexScores, Linear, Size, Stage, Vector, attended_pairs
from headwise.models.specs.indexed_latent import IndexedLatentSpec

IMPLS = ("expanded", "absorbed")
"""The implementations of MLA but ``cached_kv``: no layer of this kind caches decoded keys and values."""


def stages(spec: IndexedLatentSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    most, work = spec.index_topk, latent.stages(spec, impl, new_tokens)
    return (*_indexer(spec), *(replace(stage, most=most) if isinstance(stage, Core) else stage for stage in work))


def _indexer(spec: IndexedLatentSpec) -> tuple[Stage, ...]:
    if not spec.index_n_heads:
        return ()
    E, heads, width = Size(spec.hidden_size, "E"), Size(spec.index_n_heads, "I"), Size(spec.index_head_dim, "J")
    assert spec.q_lora_rank is not None
    return (
        Linear("index wq_b", Size(spec.q_lora_rank, "Q"), heads * width, reads="inner", has_gradient=False),
        Linear("index wk", E, width, over="source", has_gradient=False),
        Vector("index k_norm", 2 * width),
        Linear("index weights_proj", E, heads, has_gradient=False),
        IndexScores(heads, width),
    )


def best_impl(spec: IndexedLatentSpec, new_tokens: int, total_tokens: int, pairs: int) -> str:
    """The implementation with fewer FLOPs, as for MLA, over the pairs that are selected."""
    selected = attended_pairs(new_tokens, total_tokens, causal=True, window=spec.index_topk)
    return latent.best_impl(spec, new_tokens, total_tokens, min(pairs, selected))


def cache_values(spec: IndexedLatentSpec) -> Size:
    """Values cached for a token: the latent, the rotary key and the indexer's key."""
    return latent.cache_values(spec) + Size(spec.index_head_dim, "J")


def shard(spec: IndexedLatentSpec, ranks: int) -> IndexedLatentSpec:
    """The part of a layer on one of several ranks: its share of the heads; the latent and the indexer whole."""
    return replace(spec, num_heads=latent.shard(spec, ranks).num_heads)
