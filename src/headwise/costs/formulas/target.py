"""The target of a conversion, as a user writes it, and the spec of every converted layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headwise.base.options import BITS, KV_BUDGET, TARGET
from headwise.costs.formulas.layer import formulas
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import (
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
        mechanism: ``mha``, ``gqa``, ``mqa``, ``mla``, or ``same`` for the source's own.
        num_kv_heads: for ``gqa``, the number of key–value heads.
        kv_budget: for ``mla``, the fraction of the source's cache to keep.
        kv_lora_rank: for ``mla``, the width of the latent, in place of a budget.
        qk_rope_head_dim: for ``mla``, the width of the rotary key, with ``kv_lora_rank``.
        kv_bytes: the fraction of the bytes of the source's cache in bfloat16 to keep, in codes.
        bits: the bits of a cached value on average; None for a cache without codes.
        spreads: for ``mla``, whether the cache is spread over layers at any size; where few values are kept, and for
            ``kv_bytes``, it always is.
        has_constant: for ``mla``, whether one channel of the latent is a constant.
        block: for ``mla`` with a budget, the number of channels that the latent and the rotary key are multiples of
            where it has room for that.
    """

    mechanism: str
    num_kv_heads: int | None = None
    kv_budget: float | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    kv_bytes: float | None = None
    bits: float | None = None
    spreads: bool = False
    has_constant: bool = False
    block: int = 1

    @property
    def is_coded(self) -> bool:
        """Whether cached values are stored in codes."""
        return self.kv_bytes is not None or self.bits is not None

    @property
    def spelling(self) -> str | None:
        """As frontiers spell it, such as ``mla:0.5``; None with ``bits``, which have no spelling.

        For example ``parse_target("mla", kv_budget=0.5).spelling``.
        """
        if self.bits is not None:
            return None
        size = "" if self.num_kv_heads is None else f":{self.num_kv_heads}"
        if self.kv_lora_rank is not None:
            size = f":{self.kv_lora_rank}+{self.qk_rope_head_dim}"
        elif self.kv_budget is not None:
            size = f":{self.kv_budget:.12g}"
        return f"{self.mechanism}{size}" + ("" if self.kv_bytes is None else f"@{self.kv_bytes:.12g}")


def parse_target(
    to: str,
    *,
    kv_budget: float | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    kv_bytes: float | None = None,
    bits: float | None = None,
) -> Target:
    """Read a target, such as ``parse_target("gqa:2")`` or ``parse_target("mla", kv_budget=0.5)``.

    Args:
        to: ``mha``, ``gqa:K``, ``mqa``, ``mla`` or ``same``.
        kv_budget: see `Target`.
        kv_lora_rank: see `Target`.
        qk_rope_head_dim: see `Target`.
        kv_bytes: see `Target`.
        bits: see `Target`.

    Raises:
        ArgumentError: ``to`` is no target, or the sizes do not go with it.
    """
    TARGET.check("to", to)
    mechanism, _, heads = to.strip().lower().partition(":")
    values = {"kv_budget": kv_budget, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    sizes = {**values, "kv_bytes": kv_bytes, "bits": bits}
    KV_BUDGET.check("kv_bytes", kv_bytes)
    BITS.check("bits", bits)
    if mechanism != "mla":
        for name, value in values.items():
            if value is not None:
                raise ArgumentError(name, value, f"goes with mla; the cache of {to} follows from its heads")
        if kv_bytes is not None and bits is not None:
            raise ArgumentError("kv_bytes", kv_bytes, "cannot be used with bits")
        if mechanism == "same" and kv_bytes is None and bits is None:
            raise ArgumentError(
                "to", to, "needs kv_bytes or bits: it stores the cache in codes and changes nothing else"
            )
        return Target(mechanism, num_kv_heads=int(heads) if heads else None, kv_bytes=kv_bytes, bits=bits)
    if kv_bytes is not None:
        for name, value in sizes.items():
            if value is not None and name != "kv_bytes":
                raise ArgumentError("kv_bytes", kv_bytes, f"cannot be used with {name}: it chooses sizes and bits")
    elif all(value is None for value in values.values()):
        raise ArgumentError("kv_budget", None, "mla needs kv_budget, kv_bytes, or kv_lora_rank and qk_rope_head_dim")
    elif kv_budget is not None:
        if kv_lora_rank is not None or qk_rope_head_dim is not None:
            raise ArgumentError("kv_budget", kv_budget, "cannot be used with kv_lora_rank and qk_rope_head_dim")
        KV_BUDGET.check("kv_budget", kv_budget)
    elif kv_lora_rank is None or qk_rope_head_dim is None:
        raise ArgumentError("kv_lora_rank", kv_lora_rank, "and qk_rope_head_dim are given together")
    return Target(
        "mla",
        kv_budget=kv_budget,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        kv_bytes=kv_bytes,
        bits=bits,
    )


def target_options(target: str) -> dict[str, Any]:
    """A conversion's target, as frontiers spell it, as keywords of `parse_target` and `headwise.convert`.

    For example ``target_options("mla:0.5")`` is ``{"to": "mla", "kv_budget": 0.5}``.

    Raises:
        ValueError: a size is no number.
    """
    mechanism, _, fraction = target.partition("@")
    kind, _, size = mechanism.partition(":")
    codes = {"kv_bytes": float(fraction)} if fraction else {}
    if kind != "mla":
        return {"to": mechanism, **codes}
    if "+" in size:
        rank, rope = map(int, size.split("+"))
        return {"to": "mla", "kv_lora_rank": rank, "qk_rope_head_dim": rope, **codes}
    return {"to": "mla", **({"kv_budget": float(size)} if size else {}), **codes}


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

    Its weights are in one dtype: a conversion reads a quantised GGUF's as numbers, and writes no quantised ones.

    Raises:
        ArgumentError: a layer cannot have the size.
        SpecError: a layer is of a kind that is not converted.
    """
    refuse_latent(source)
    layers, cross_layers = (
        tuple(_convert_layer_spec(layer, target) for layer in part) for part in (source.layers, source.cross_layers)
    )
    return replace(source, layers=layers, cross_layers=cross_layers, stored=None)


def _convert_layer_spec(source: AttentionSpec, target: Target) -> AttentionSpec:
    """The spec of one converted layer."""
    assert isinstance(source, GroupedSpec)
    if target.mechanism != "mla":
        own = source.num_kv_heads
        counts = {"mha": source.num_heads, "mqa": 1, "gqa": target.num_kv_heads, "same": own}
        count = counts[target.mechanism]
        assert count is not None
        return as_grouped(source, count)
    refuse_as_latent(source)
    total = formulas(source).cache_values(source)
    if target.kv_bytes is not None:
        # A size to begin with: how many values there are at each byte is found on the text.
        values = min(total, int(8 * code_bytes(source, target.kv_bytes) / _BITS_AT_FIRST))
        least = 3 if rotary_width(source) else 1
        if values < least:
            rule = f"leaves less than a byte for each of {least} values, the fewest that a layer caches"
            raise ArgumentError("kv_bytes", target.kv_bytes, rule)
        return as_latent(source, *split_budget(source, values))
    if target.kv_budget is not None:
        values = int(target.kv_budget * total + 1e-9)
        if values < (3 if rotary_width(source) else 1):
            rule = f"leaves {values} of the {total} values a layer caches; at least 3: a latent and a rotary pair"
            raise ArgumentError("kv_budget", target.kv_budget, rule)
        return as_latent(source, *split_budget(source, values))
    assert target.kv_lora_rank is not None
    assert target.qk_rope_head_dim is not None
    return as_latent(source, target.kv_lora_rank, target.qk_rope_head_dim)


def code_bytes(source: AttentionSpec, fraction: float) -> float:
    """The bytes a token of one layer with a fraction of its cache in bfloat16.

    For example ``code_bytes(layer_spec("smollm2-135m"), 0.25)`` is 192.0.
    """
    return fraction * 2 * formulas(source).cache_values(source)


def refuse_codes(converted: ModelSpec) -> None:
    """Refuse a model whose cache cannot be coded.

    Raises:
        SpecError: the model is no decoder, or a layer has a sliding window, norms on keys, or rotary pairs whose two
            dims lie side by side.
    """
    if not converted.is_causal or converted.cross_layers:
        raise SpecError(
            "model_type", converted.model_type, "is no decoder of text alone; only their caches are coded"
        )
    for layer in converted.layers:
        if layer.sliding_window is not None:
            raise SpecError("sliding_window", layer.sliding_window, "a layer with one cannot have a coded cache yet")
        if isinstance(layer, GroupedSpec):
            for field, value in (
                ("qk_norm", layer.qk_norm),
                ("sinks", layer.sinks or None),
                ("softcap", layer.softcap),
                ("rope.interleaved", (layer.rope is not None and layer.rope.interleaved) or None),
            ):
                if value is not None:
                    raise SpecError(field, value, "a layer with it cannot have a coded cache yet")


_BITS_AT_FIRST = 3.3
"""The bits of a value that a search for sizes and bits begins with; 3 to 4 are best at most budgets."""
