"""The spec that a layer has after conversion: the only place that decides a target's sizes."""

from __future__ import annotations

from dataclasses import replace

from headwise.errors import ArgumentError, SpecError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.latent import LatentSpec

KERNELS = ((512, 64), (256, 64), (128, 64))
"""The latents and rotary keys that most backends of llama.cpp have kernels for: CUDA the first two, Metal all."""

_NEAR = 0.9
"""The part of a budget that a size with kernels has to use to be taken before others."""


def as_grouped(source: AttentionSpec, num_kv_heads: int) -> GroupedSpec:
    """The layer with another number of key–value heads.

    For example ``as_grouped(layer_spec("llama-3-8b"), 2).label`` is ``"GQA 32/2 × 128"``.

    Raises:
        ArgumentError: ``num_kv_heads`` does not divide the query heads, or is neither a multiple nor a divisor of
            the source's.
        SpecError: the source is not of the grouped kind.
    """
    source = _grouped(source)
    current, heads = source.num_kv_heads, source.num_heads
    if num_kv_heads < 1 or heads % num_kv_heads:
        raise ArgumentError("num_kv_heads", num_kv_heads, f"must divide the {heads} query heads")
    if max(current, num_kv_heads) % min(current, num_kv_heads):
        raise ArgumentError("num_kv_heads", num_kv_heads, f"must divide or be a multiple of the source's {current}")
    return replace(source, num_kv_heads=num_kv_heads)


def as_latent(source: AttentionSpec, kv_lora_rank: int, qk_rope_head_dim: int) -> LatentSpec:
    """The MLA layer that a grouped layer is converted to.

    For example ``as_latent(layer_spec("llama-3-8b"), 448, 64).label`` is ``"MLA 448 + 64"``.

    A head keeps its D content dims beside the rotary ones, or, where every rotary channel is kept, only those that
    never rotated. The bias of the output projection stays; biases of queries, keys and values become those of the
    query and the latent. The spec has no ``rope``: conversion finds for each layer which of the model's frequencies
    its rotary pairs keep. A layer without RoPE has no rotary key.

    Raises:
        ArgumentError: a width is impossible, or more than the source has.
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
        rule = f"must be at least 1 and at most {most}, all channels beside the rotary key"
        raise ArgumentError("kv_lora_rank", kv_lora_rank, rule)
    has_bias = any(name in source.bias for name in ("q_proj", "k_proj", "v_proj"))
    has_norms = source.qk_norm is not None and not has_bias  # with both it is not converted, and compared without
    return LatentSpec(
        hidden_size=source.hidden_size,
        is_causal=source.is_causal,
        sliding_window=source.sliding_window,
        chunked=source.chunked,
        num_heads=source.num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=source.head_dim - (rotated_dims(source) if qk_rope_head_dim == rotary else 0),
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=source.value_dim,
        latent_norm=False,
        bias=(
            *(("q_proj", "kv_a_proj_with_mqa") if has_bias else ()),
            *(("o_proj",) if "o_proj" in source.bias else ()),
        ),
        q_lora_rank=source.q_lora_rank,
        qk_norm=source.qk_norm if has_norms else None,
        num_kv_heads=source.num_kv_heads if has_norms else None,
        head_dim=source.head_dim if has_norms else None,
    )


def as_normed(spec: LatentSpec) -> LatentSpec:
    """The MLA layer without biases whose latent has a norm, and a constant channel beside those of a layer without.

    For example ``as_normed(as_latent(layer_spec("llama-3-8b"), 447, 64)).label`` is ``"MLA 448 + 64"``.
    """
    return replace(spec, kv_lora_rank=spec.kv_lora_rank + 1, latent_norm=True, bias=())


def refuse_as_latent(source: AttentionSpec) -> None:
    """Raise an error for a layer that `compare` can set beside MLA, but that cannot be converted to it.

    For example ``refuse_as_latent(layer_spec("gpt-oss-20b"))`` raises a SpecError.

    Raises:
        SpecError: it has sinks, a softcap, chunks, a query latent, or norms on queries and keys beside biases.
    """
    source = _grouped(source)
    for field, value in (
        ("qk_norm", source.qk_norm if any(name != "o_proj" for name in source.bias) else None),
        ("sinks", source.sinks or None),
        ("softcap", source.softcap),
        ("chunked", source.chunked or None),
        ("q_lora_rank", source.q_lora_rank),
    ):
        if value is not None:
            raise SpecError(field, value, "a layer with it cannot be converted to mla yet")


def rotated_dims(source: GroupedSpec) -> int:
    """The number of rotated dims in a head.

    For example ``rotated_dims(layer_spec("llama-3-8b"))`` is 128.
    """
    return 0 if source.rope is None else source.rope.dim


def rotary_width(source: GroupedSpec) -> int:
    """The width of a rotary key that keeps the rotated dims of all key heads.

    For example ``rotary_width(layer_spec("llama-3-8b"))`` is 1,024.
    """
    return source.num_kv_heads * rotated_dims(source)


def split_budget(source: AttentionSpec, values: int) -> tuple[int, int]:
    """Split a budget of ``values`` cached numbers a token into a latent and a rotary key.

    For example ``split_budget(layer_spec("llama-3-8b"), 1024)`` is ``(896, 128)``.

    About a quarter goes to the rotary key, in steps of 16, or of 2 where that is too coarse. It is no more than the
    rotated dims of one head: every query head has dims for the whole rotary key, so that with a quarter of many heads
    ``q_proj`` would be several times as large. A budget of the source's whole cache keeps every rotary channel, which
    is lossless.

    Returns:
        ``(kv_lora_rank, qk_rope_head_dim)``.

    Raises:
        ArgumentError: the budget is below 3, a latent channel and a rotary pair, or below 1 without RoPE.
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


def split_in_blocks(source: GroupedSpec, values: int, block: int) -> tuple[int, int] | None:
    """Split a budget into a latent and a rotary key that are whole blocks of channels, as quantised caches need.

    For example ``split_in_blocks(layer_spec("smollm2-135m"), 200, 32)`` is ``(128, 64)``.

    A size that engines have kernels for (`KERNELS`) is taken where it uses nearly the whole budget. Elsewhere about a
    quarter goes to the rotary key, up to the rotated dims of one head. What makes no block stays unused.

    Args:
        source: the layer.
        values: the budget, in cached numbers a token.
        block: the number of channels in a block.

    Returns:
        ``(kv_lora_rank, qk_rope_head_dim)``; None where the budget, or the rotated dims of a head, make no block.
    """
    widest = rotated_dims(source) // block * block
    if not widest or values < 2 * block:
        return None
    for rank, rotary in KERNELS:
        fits = rotary <= widest and rank % block == 0 and rotary % block == 0
        if fits and _NEAR * values <= rank + rotary <= values:
            return rank, rotary
    rope_dim = min(max(block, block * round(values / (4 * block))), widest)
    return (values - rope_dim) // block * block, rope_dim


def _grouped(source: AttentionSpec) -> GroupedSpec:
    if not isinstance(source, GroupedSpec):
        raise SpecError("attention", source.label, "only MHA, MQA and GQA layers are converted")
    if source.output_gate or source.shares_kv:
        raise SpecError("attention", source.label, "a layer with an output gate or another's keys is not converted")
    return source
