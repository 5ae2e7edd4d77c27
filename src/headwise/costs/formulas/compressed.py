"""Cost of attention to a window and to compressed entries: the pairs of both, the making of entries, an indexer.

Making an entry is counted as its projections; the weighted mean of a few tokens is elementwise work.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.formulas.stages import Core, IndexScores, Linear, Product, Size, Stage, Vector
from headwise.errors import ArgumentError
from headwise.models.specs.compressed import CompressedSpec

IMPLS = ("direct",)


def stages(spec: CompressedSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    E, H, D = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.head_dim, "D")
    Q, O = Size(spec.q_lora_rank, "Q"), Size(spec.o_lora_rank, "O")  # noqa: E741 - the letter of the formulas
    joined = Size(spec.output_groups, "G") * O
    return (
        Linear("q_a_proj", E, Q),
        Vector("q_a_norm", Q),
        Linear("q_b_proj", Q, H * D, reads="inner"),
        Linear("kv_proj", E, D, over="source"),
        Vector("kv_norm", D),
        Vector("sinks", H),
        *_entries(spec, "", D),
        *_indexer(spec),
        Core(H, D, D, name="window attention", most=spec.window),
        *([] if spec.rate is None else [Core(H, D, D, name="entry attention", most=spec.index_topk, rate=spec.rate)]),
        Product("o_a_proj", H * D * O, H * D + joined, parameters=H * D * O, outputs=joined),
        Linear("o_b_proj", joined, E, reads="inner"),
    )


def _indexer(spec: CompressedSpec) -> tuple[Stage, ...]:
    if not spec.has_indexer:
        return ()
    assert spec.rate is not None
    E, Q = Size(spec.hidden_size, "E"), Size(spec.q_lora_rank, "Q")
    heads, width = Size(spec.index_n_heads, "I"), Size(spec.index_head_dim, "J")
    return (
        *_entries(spec, "index ", width),
        Linear("index q_b_proj", Q, heads * width, reads="inner", has_gradient=False),
        Linear("index weights_proj", E, heads, has_gradient=False),
        IndexScores(heads, width, rate=spec.rate),
    )


def _entries(spec: CompressedSpec, prefix: str, width: Size) -> tuple[Stage, ...]:
    """The stages that make entries: each token's part and its weight, twice where entries overlap."""
    if spec.rate is None:
        return ()
    E, parts = Size(spec.hidden_size, "E"), _overlap(spec) * width
    return (
        Linear(f"{prefix}entry kv_proj", E, parts, over="source", has_gradient=not prefix),
        Linear(f"{prefix}entry gate_proj", E, parts, over="source", has_gradient=not prefix),
        Vector(f"{prefix}entry position_bias, kv_norm", Size(spec.rate, "m") * parts + width),
    )


def _overlap(spec: CompressedSpec) -> int:
    """The number of entries that a token is part of."""
    return 2 if spec.has_indexer else 1


def cache_values(spec: CompressedSpec) -> Size:
    """Values cached for a token as a text grows: its share of an entry, and of the indexer's."""
    if spec.rate is None:
        return Size(0)
    return Size((spec.head_dim + spec.index_head_dim) // spec.rate, "(D + J)/m" if spec.has_indexer else "D/m")


def state_values(spec: CompressedSpec) -> int:
    """Values kept for a sequence of any length: the window, and the tokens that are not in an entry yet, at most.

    A token that is not in an entry yet keeps a part and a weight for each entry that it will be in; where entries
    overlap, so do the last ``rate`` tokens before it, for the next entry alone.
    """
    window = spec.window * spec.head_dim
    if spec.rate is None:
        return window
    overlap, width = _overlap(spec), spec.head_dim + spec.index_head_dim
    waiting = (spec.rate - 1) * overlap + spec.rate * (overlap - 1)
    return window + 2 * waiting * width


def shard(spec: CompressedSpec, ranks: int) -> CompressedSpec:
    """The part of a layer on one of several ranks: its groups of heads; the shared key and the indexer whole."""
    if spec.output_groups % ranks:
        raise ArgumentError("ranks", ranks, f"must divide output_groups = {spec.output_groups}")
    return replace(spec, num_heads=spec.num_heads // ranks, output_groups=spec.output_groups // ranks)
