"""The target of a conversion, as a user writes it, and the spec of every layer that follows from it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from headwise.cost import formulas
from headwise.errors import ArgumentError, SpecError
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

TARGETS = "mha, gqa:K, mqa or mla"


@dataclass(frozen=True)
class Target:
    """A mechanism and its size.

    Attributes:
        mechanism: ``mha``, ``gqa``, ``mqa`` or ``mla``.
        num_kv_heads: for ``gqa``.
        kv_budget: for ``mla``: the fraction of the source's cache to keep.
        kv_lora_rank: for ``mla``, with ``qk_rope_head_dim``, in place of a budget.
        qk_rope_head_dim: see ``kv_lora_rank``.
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
) -> Target:
    """Read ``mha``, ``gqa:K``, ``mqa`` or ``mla`` and the sizes that go with it.

    Raises:
        ArgumentError: it is none of those, or the sizes do not go with it.
    """
    match = re.fullmatch(r"(mha|mqa|mla|gqa:([0-9]{1,9}))", to.strip().lower())
    if match is None:
        raise ArgumentError("to", to, f"must be {TARGETS}, K the number of key–value heads")
    mechanism = match[1].partition(":")[0]
    sizes = {"kv_budget": kv_budget, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    if mechanism != "mla":
        for name, value in sizes.items():
            if value is not None:
                raise ArgumentError(name, value, f"goes with mla; the cache of {to} follows from its heads")
        return Target(mechanism, num_kv_heads=int(match[2]) if match[2] else None)
    if kv_budget is None and kv_lora_rank is None and qk_rope_head_dim is None:
        raise ArgumentError("kv_budget", None, "mla needs kv_budget, or kv_lora_rank and qk_rope_head_dim")
    if kv_budget is not None:
        if kv_lora_rank is not None or qk_rope_head_dim is not None:
            raise ArgumentError("kv_budget", kv_budget, "goes without kv_lora_rank and qk_rope_head_dim")
        if not (math.isfinite(kv_budget) and 0 < kv_budget <= 1):
            raise ArgumentError("kv_budget", kv_budget, "must be a fraction above 0 and at most 1")
    elif kv_lora_rank is None or qk_rope_head_dim is None:
        raise ArgumentError("kv_lora_rank", kv_lora_rank, "and qk_rope_head_dim are given together")
    return Target("mla", kv_budget=kv_budget, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)


def refuse_latent(source: ModelSpec) -> None:
    """Refuse what cannot be a source.

    Raises:
        SpecError: a layer is MLA already.
    """
    for layer in source.layers:
        if not isinstance(layer, GroupedSpec):
            raise SpecError("source attention", layer.label, "converting from MLA is not supported")


def convert_spec(source: ModelSpec, target: Target) -> ModelSpec:
    """The converted model, without its weights.

    Raises:
        ArgumentError: the size is outside what a layer has to give.
        SpecError: a layer is of a kind that is not converted.
    """
    refuse_latent(source)
    layers, cross_layers = (
        tuple(_convert_layer_spec(layer, target) for layer in part) for part in (source.layers, source.cross_layers)
    )
    return replace(source, layers=layers, cross_layers=cross_layers)


def _convert_layer_spec(source: AttentionSpec, target: Target) -> AttentionSpec:
    """One layer of `convert_spec`."""
    assert isinstance(source, GroupedSpec)
    if target.mechanism != "mla":
        counts = {"mha": source.num_heads, "mqa": 1, "gqa": target.num_kv_heads}
        count = counts[target.mechanism]
        assert count is not None
        return as_grouped(source, count)
    refuse_as_latent(source)
    if target.kv_budget is not None:
        whole = formulas(source).cache_values(source)
        values = int(target.kv_budget * whole + 1e-9)
        if values < (3 if rotary_width(source) else 1):
            rule = f"leaves {values} of the {whole} values a layer caches; at least 3: a latent and a rotary pair"
            raise ArgumentError("kv_budget", target.kv_budget, rule)
        return as_latent(source, *split_budget(source, values))
    assert target.kv_lora_rank is not None
    assert target.qk_rope_head_dim is not None
    return as_latent(source, target.kv_lora_rank, target.qk_rope_head_dim)
