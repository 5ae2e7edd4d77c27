"""The target of a conversion, as a user writes it, and the spec of every converted layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwise.cost import formulas
from headwise.errors import ArgumentError, SpecError
from headwise.options import KV_BUDGET, TARGET
from headwise.specs import (
    AttentionSpec,
    GroupedSpec,
    ModelSpec,
    as_grouped,
    as_latent,
    refuse_as_latent,
    rotary_width,
    split_budget,
)


@dataclass(frozen=True)
class Target:
    """A mechanism and its size, such as ``Target("mla", kv_budget=0.5)``.

    Attributes:
        mechanism: ``mha``, ``gqa``, ``mqa`` or ``mla``.
        num_kv_heads: for ``gqa``, the number of key–value heads.
        kv_budget: for ``mla``, the fraction of the source's cache to keep.
        kv_lora_rank: for ``mla``, the width of the latent, in place of a budget.
        qk_rope_head_dim: for ``mla``, the width of the rotary key, with ``kv_lora_rank``.
    """

    mechanism: str
    num_kv_heads: int | None = None
    kv_budget: float | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None


def parse_target(
    to: str,
    *,
    kv_budget: float | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    kv_bytes: float | None = None,
) -> Target:
    """Read a target, such as ``parse_target("gqa:2")`` or ``parse_target("mla", kv_budget=0.5)``.

    Args:
        to: ``mha``, ``gqa:K``, ``mqa`` or ``mla``.
        kv_budget: see `Target`.
        kv_lora_rank: see `Target`.
        qk_rope_head_dim: see `Target`.

    Raises:
        ArgumentError: ``to`` is no target, or the sizes do not go with it.
    """
    TARGET.check("to", to)
    mechanism, _, heads = to.strip().lower().partition(":")
    sizes = {"kv_budget": kv_budget, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    if mechanism != "mla":
        for name, value in sizes.items():
            if value is not None:
                raise ArgumentError(name, value, f"goes with mla; the cache of {to} follows from its heads")
        return Target(mechanism, num_kv_heads=int(heads) if heads else None)
    if kv_bytes is not None:
        return Target("mla", kv_budget=1.0)
    if kv_budget is None and kv_lora_rank is None and qk_rope_head_dim is None:
        raise ArgumentError("kv_budget", None, "mla needs kv_budget, or kv_lora_rank and qk_rope_head_dim")
    if kv_budget is not None:
        if kv_lora_rank is not None or qk_rope_head_dim is not None:
            raise ArgumentError("kv_budget", kv_budget, "cannot be used with kv_lora_rank and qk_rope_head_dim")
        KV_BUDGET.check("kv_budget", kv_budget)
    elif kv_lora_rank is None or qk_rope_head_dim is None:
        raise ArgumentError("kv_lora_rank", kv_lora_rank, "and qk_rope_head_dim are given together")
    return Target("mla", kv_budget=kv_budget, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)


def refuse_latent(source: ModelSpec) -> None:
    """Refuse a source that is MLA already.

    Raises:
        SpecError: a layer is MLA, or another kind without key–value heads.
    """
    for layer in source.layers:
        if not isinstance(layer, GroupedSpec):
            raise SpecError("source attention", layer.label, "converting from MLA is not supported")


def convert_spec(source: ModelSpec, target: Target) -> ModelSpec:
    """The spec of the converted model, such as ``convert_spec(source, parse_target("mqa"))``.

    Raises:
        ArgumentError: a layer cannot have the size.
        SpecError: a layer is of a kind that is not converted.
    """
    refuse_latent(source)
    layers, cross_layers = (
        tuple(_convert_layer_spec(layer, target) for layer in part) for part in (source.layers, source.cross_layers)
    )
    return replace(source, layers=layers, cross_layers=cross_layers)


def _convert_layer_spec(source: AttentionSpec, target: Target) -> AttentionSpec:
    """The spec of one converted layer."""
    assert isinstance(source, GroupedSpec)
    if target.mechanism != "mla":
        counts = {"mha": source.num_heads, "mqa": 1, "gqa": target.num_kv_heads}
        count = counts[target.mechanism]
        assert count is not None
        return as_grouped(source, count)
    refuse_as_latent(source)
    if target.kv_budget is not None:
        total = formulas(source).cache_values(source)
        values = int(target.kv_budget * total + 1e-9)
        if values < (3 if rotary_width(source) else 1):
            rule = f"leaves {values} of the {total} values a layer caches; at least 3: a latent and a rotary pair"
            raise ArgumentError("kv_budget", target.kv_budget, rule)
        return as_latent(source, *split_budget(source, values))
    assert target.kv_lora_rank is not None
    assert target.qk_rope_head_dim is not None
    return as_latent(source, target.kv_lora_rank, target.qk_rope_head_dim)
