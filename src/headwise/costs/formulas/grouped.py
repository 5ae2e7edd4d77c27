"""Cost of MHA, MQA and GQA, and of attention with a single head.

Parameters ``E·D·(2H+2K)`` for equal key and value widths; forward FLOPs ``2BSED(2H+2K) + 4BHSTD``; cache
``2KD`` values a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headwise.costs.formulas import activations as keep
from headwise.costs.formulas.activations import Heads, KeptTensor, Training
from headwise.costs.formulas.stages import Core, Linear, Size, Stage, Vector
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs.grouped import GroupedSpec

IMPLS = ("direct",)


def stages(spec: GroupedSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    E, H, K = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.num_kv_heads, "K")
    D = Size(spec.head_dim, "D")
    V = D if spec.value_dim == spec.head_dim else Size(spec.value_dim, "V")
    norm = {None: (0, 0), "head": (D, D), "full": (H * D, K * D)}[spec.qk_norm]
    output = (Linear("o_proj", H * V, E, "o_proj" in spec.bias, reads="inner"),) if spec.output_projection else ()
    keys: tuple[Stage, ...] = (
        Linear("k_proj", E, K * D, "k_proj" in spec.bias, over="source"),
        Linear("v_proj", E, K * V, "v_proj" in spec.bias, over="source"),
        Vector("k_norm", norm[1]),
    )
    gated = 2 if spec.output_gate else 1
    queries: tuple[Stage, ...] = (Linear("q_proj", E, gated * H * D, "q_proj" in spec.bias),)
    if spec.q_lora_rank is not None:
        Q = Size(spec.q_lora_rank, "Q")
        queries = (Linear("q_a_proj", E, Q), Vector("q_a_norm", Q), Linear("q_b_proj", Q, H * D, reads="inner"))
    return (
        *queries,
        *(() if spec.shares_kv else keys),
        Vector("q_norm", norm[0]),
        Vector("sinks", H if spec.sinks else 0),
        Core(H, D, V),
        *output,
    )


def cache_values(spec: GroupedSpec) -> Size:
    """Values cached for a token: every key and value head, or none in a layer that reads an earlier layer's cache."""
    if spec.shares_kv:
        return Size(0)
    K, D = Size(spec.num_kv_heads, "K"), Size(spec.head_dim, "D")
    return 2 * K * D if spec.value_dim == spec.head_dim else K * (D + Size(spec.value_dim, "V"))


def shard(spec: GroupedSpec, ranks: int) -> GroupedSpec:
    """The part of a layer on one of several ranks: its share of the heads, and at least one key–value head."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % ranks or max(kv_heads, ranks) % min(kv_heads, ranks):
        rule = f"must divide num_heads = {heads}, and divide or be a multiple of num_kv_heads = {kv_heads}"
        raise ArgumentError("ranks", ranks, rule)
    return replace(spec, num_heads=heads // ranks, num_kv_heads=-(-kv_heads // ranks))


def activations(spec: GroupedSpec, impl: str, training: Training) -> tuple[KeptTensor, ...]:
    """The tensors that one layer keeps for the backward pass."""
    for name in ("sinks", "softcap", "output_gate", "shares_kv", "chunked", "q_lora_rank"):
        if getattr(spec, name):
            raise SpecError(name, getattr(spec, name), "has no list of its activations: no layer here runs it")
    E, H, K = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.num_kv_heads, "K")
    D = Size(spec.head_dim, "D")
    V = D if spec.value_dim == spec.head_dim else Size(spec.value_dim, "V")
    kept = [*keep.inputs(training, E)]
    if spec.qk_norm is not None:
        by_head = spec.qk_norm == "head"
        kept += keep.norm(training, "query", H * D, "new", rows=H if by_head else 1)
        kept += keep.norm(training, "key", K * D, "total", rows=K if by_head else 1)
    if spec.rope is not None:
        kept += keep.rotation(training, Size(spec.rope.dim, "P"))
    read_from: Literal["merged", "nothing"] = "merged" if spec.output_projection else "nothing"
    return *kept, *keep.core(training, Heads(H, K, D, V), contiguous=spec.rope is not None, read_from=read_from)
