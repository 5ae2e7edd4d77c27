"""What a layer becomes when it is converted: the one place that decides a target's sizes."""

from __future__ import annotations

from dataclasses import replace

from headwise.errors import ArgumentError, SpecError
from headwise.specs.base import AttentionSpec
from headwise.specs.grouped import GroupedSpec
from headwise.specs.latent import LatentSpec


def as_grouped(source: AttentionSpec, num_kv_heads: int) -> GroupedSpec:
    """The layer with another number of key–value heads.

    Raises:
        ArgumentError: ``num_kv_heads`` does not divide the query heads, or is neither a multiple nor a divisor of
            the source's own.
        SpecError: the source is not of the grouped kind.
    """
    source = _grouped(source)
    own, heads = source.num_kv_heads, source.num_heads
    if num_kv_heads < 1 or heads % num_kv_heads:
        raise ArgumentError("num_kv_heads", num_kv_heads, f"must divide the {heads} query heads")
    if max(own, num_kv_heads) % min(own, num_kv_heads):
        raise ArgumentError("num_kv_heads", num_kv_heads, f"must divide or be a multiple of the source's {own}")
    return replace(source, num_kv_heads=num_kv_heads)


def as_latent(source: AttentionSpec, kv_lora_rank: int, qk_rope_head_dim: int) -> LatentSpec:
    """The MLA layer that takes the place of a grouped one.

    A head keeps its own D content dims beside the rotary ones, and when every rotary channel is kept only those that
    never rotated; the output projection's bias stays, and query, key and value biases become the query's and the
    latent's. No ``rope`` is named: which frequency of the model's a rotary pair keeps is found by converting, layer
    by layer. A layer without RoPE has no rotary key.

    Raises:
        ArgumentError: a width is outside what the source has to give.
        SpecError: the source is not of the grouped kind.
    """
    source = _grouped(source)
    keys, rotary = source.num_kv_heads * source.head_dim, rotary_width(source)
    if not rotary and qk_rope_head_dim:
        raise ArgumentError("qk_rope_head_dim", qk_rope_head_dim, "must be 0: the layer has no rotary embedding")
    if rotary and (qk_rope_head_dim < 2 or qk_rope_head_dim % 2 or qk_rope_head_dim > rotary):
        rule = f"must be even, at least 2 and at most num_kv_heads · rotated dims of a head = {rotary}"
        raise ArgumentError("qk_rope_head_dim", qk_rope_head_dim, rule)
    most = keys - qk_rope_head_dim + source.num_kv_heads * source.value_dim
    if not 1 <= kv_lora_rank <= most:
        rule = f"must be at least 1 and at most {most}, all that is left beside the rotary key"
        raise ArgumentError("kv_lora_rank", kv_lora_rank, rule)
    biased = any(name in source.bias for name in ("q_proj", "k_proj", "v_proj"))
    return LatentSpec(
        hidden_size=source.hidden_size,
        is_causal=source.is_causal,
        sliding_window=source.sliding_window,
        num_heads=source.num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=source.head_dim - (rotated_dims(source) if qk_rope_head_dim == rotary else 0),
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=source.value_dim,
        latent_norm=False,
        bias=(
            *(("q_proj", "kv_a_proj_with_mqa") if biased else ()),
            *(("o_proj",) if "o_proj" in source.bias else ()),
        ),
    )


def refuse_as_latent(source: AttentionSpec) -> None:
    """Raise for a layer that can be set beside MLA and not be converted to it.

    Raises:
        SpecError: it has norms on queries and keys, sinks or a softcap.
    """
    source = _grouped(source)
    for field, value in (
        ("qk_norm", source.qk_norm),
        ("sinks", source.sinks or None),
        ("softcap", source.softcap),
    ):
        if value is not None:
            raise SpecError(field, value, "a layer with it cannot be converted to mla yet")


def rotated_dims(source: GroupedSpec) -> int:
    """How many dims of a head rotate."""
    return 0 if source.rope is None else source.rope.dim


def rotary_width(source: GroupedSpec) -> int:
    """How many of a token's cached keys rotate: the width of the rotary key that keeps them all."""
    return source.num_kv_heads * rotated_dims(source)


def split_budget(source: AttentionSpec, values: int) -> tuple[int, int]:
    """Spend ``values`` cached numbers a token on a latent and a rotary key.

    About a quarter goes to the rotary key (in steps of 16, or of 2 where that is coarse), but no more than a head
    rotates, one channel a frequency: each query head has a part for all of the rotary key, so with the quarter of
    many heads ``q_proj`` would be several times as large. A budget of the source's whole cache keeps every rotary
    channel, which is lossless.

    Returns:
        ``(kv_lora_rank, qk_rope_head_dim)``.

    Raises:
        ArgumentError: fewer than 3 values, a latent and a rotary pair; fewer than 1 without RoPE.
        SpecError: the source is not of the grouped kind.
    """
    source = _grouped(source)
    whole = source.num_kv_heads * (source.head_dim + source.value_dim)
    rotary = rotary_width(source)
    if not rotary and values >= 1:
        return min(values, whole), 0
    if values < 3:
        rule = f"must be at least 3 (a latent and a rotary pair) of the source's {whole}"
        raise ArgumentError("cache values per token and layer", values, rule)
    if values >= whole:
        return whole - rotary, rotary
    step = 16 if values >= 48 else 2
    rope_dim = max(step, step * round(values / (4 * step)))
    rope_dim = min(rope_dim, rotated_dims(source))
    return values - rope_dim, rope_dim


def _grouped(source: AttentionSpec) -> GroupedSpec:
    if not isinstance(source, GroupedSpec):
        raise SpecError("attention", source.label, "only MHA, MQA and GQA layers are converted")
    if source.output_gate or source.shares_kv:
        raise SpecError("attention", source.label, "a layer with an output gate or another's keys is not converted")
    return source
