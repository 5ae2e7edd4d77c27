"""The side-by-side of mechanisms for one model's shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headwise.cost import layer, model
from headwise.errors import ArgumentError, SpecError
from headwise.specs.base import MAX_SIZE, AttentionSpec
from headwise.specs.grouped import GroupedSpec
from headwise.specs.latent import LatentSpec
from headwise.specs.model import ModelSpec
from headwise.specs.sources import read_spec
from headwise.specs.targets import as_grouped, as_latent, split_budget


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism at one size, in the place of the model's own attention.

    FLOPs are those of the attention layers of the whole model, causal; ``decode_flops`` is one token's at the
    stated context. ``decode_ms`` and ``prefill_ms`` are one layer's, measured, when asked for.
    """

    mechanism: str
    label: str
    is_source: bool
    attention_parameters_per_layer: int
    prefill_flops: int
    decode_flops: int
    kv_bytes_per_token: int
    kv_bytes: int
    decode_intensity: float
    decode_ms: float | None = None
    prefill_ms: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-able values; the measured keys only when there is a measurement."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows for one model at one context and batch; ``specs[i]`` is the layer of ``rows[i]``."""

    context: int
    batch: int
    dtype: str
    source: str
    rows: tuple[Row, ...]
    specs: tuple[AttentionSpec, ...]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able values."""
        own = {"source": self.source, "context": self.context, "batch": self.batch, "dtype": self.dtype}
        return {**own, "rows": [row.to_dict() for row in self.rows]}


def compare(
    source: str | Path | ModelSpec, *, context: int = 4096, batch: int = 1, dtype: str = "bfloat16"
) -> Comparison:
    """What each mechanism would cost in the place of a model's attention.

    The ladder: MHA, ever fewer key–value heads (each time about half) down to MQA, the model's own number among
    them, and MLA at the source's whole cache, a half and a quarter of it, about a third of that for the rotary key.

    Args:
        source: a model folder, ``.gguf``, ``config.json``, catalog name, ``smollm2-135m``, ``hf://…`` or a spec.
        context: tokens in the cache, and in the prefill.
        batch: sequences.
        dtype: the cache's.

    Raises:
        ArgumentError: context or batch is not positive, the dtype is not known, or there is no such source.
        CheckpointError: its files are damaged.
        SpecError: the architecture is not understood, the model keeps no cache, or its layers are of different kinds.
    """
    for name, value in (("context", context), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(name, value, "must be a whole number of at least 1")
        if value > MAX_SIZE:
            raise ArgumentError(name, value, f"must be at most {MAX_SIZE}")
    spec = source if isinstance(source, ModelSpec) else read_spec(source)
    if not spec.is_causal:
        raise SpecError("model_type", spec.model_type, "is an encoder: it keeps no cache to compare")
    if len(kinds := {own.kind for own in spec.layers}) > 1:
        raise SpecError("attention kinds", sorted(kinds), "must be one: layers of several kinds have no one ladder")
    rows, specs = [], []
    for candidate in ladder(spec.layers[0]):
        stack = replace(
            spec,
            layers=tuple(_like(own, candidate, is_source=candidate == spec.layers[0]) for own in spec.layers),
        )
        rows.append(
            Row(
                mechanism=candidate.mechanism,
                label=candidate.label,
                is_source=candidate == spec.layers[0],
                attention_parameters_per_layer=layer.parameters(candidate),
                prefill_flops=model.forward_flops(stack, context, batch=batch, causal=True),
                decode_flops=model.forward_flops(stack, 1, context, batch=batch, causal=True),
                kv_bytes_per_token=model.cache_bytes_per_token(stack, dtype),
                kv_bytes=model.cache_bytes(stack, context, batch=batch, dtype=dtype),
                decode_intensity=layer.decode_intensity(candidate, dtype=dtype),
            )
        )
        specs.append(candidate)
    return Comparison(
        source=spec.model_type if isinstance(source, ModelSpec) else str(source),
        context=context,
        batch=batch,
        dtype=dtype.removeprefix("torch."),
        rows=tuple(rows),
        specs=tuple(specs),
    )


def _like(own: AttentionSpec, candidate: AttentionSpec, *, is_source: bool) -> AttentionSpec:
    """The candidate in the place of one layer, which keeps its own window."""
    return own if is_source else replace(candidate, sliding_window=own.sliding_window)


def ladder(source: AttentionSpec) -> list[AttentionSpec]:
    """The mechanisms and sizes worth setting beside a layer, from the largest cache down, the layer included."""
    if isinstance(source, GroupedSpec):
        return [*_grouped_ladder(source), *_latent_ladder(source)]
    if isinstance(source, LatentSpec):
        head_dim = source.qk_nope_head_dim or source.qk_rope_head_dim
        dense = GroupedSpec(
            hidden_size=source.hidden_size,
            num_heads=source.num_heads,
            num_kv_heads=source.num_heads,
            head_dim=head_dim,
            v_head_dim=source.v_head_dim,
        )
        return [*_grouped_ladder(dense), source]
    return [source]


def _grouped_ladder(source: GroupedSpec) -> list[AttentionSpec]:
    counts = {1, source.num_kv_heads, source.num_heads}
    divisors = [d for d in range(1, source.num_heads) if source.num_heads % d == 0]
    count = source.num_heads
    while count > 1:
        count = max(d for d in divisors if d <= max(count // 2, 1))
        counts.add(count)
    reachable = [n for n in counts if max(n, source.num_kv_heads) % min(n, source.num_kv_heads) == 0]
    return [as_grouped(source, count) for count in sorted(reachable, reverse=True)]


def _latent_ladder(source: GroupedSpec) -> list[AttentionSpec]:
    if source.num_kv_heads * source.head_dim < 2:  # nothing to make a rotary pair of
        return []
    values = source.num_kv_heads * (source.head_dim + source.value_dim)
    budgets = [values, values // 2, values // 4]
    sizes = [split_budget(source, budget) for budget in budgets if budget >= 3]  # a latent and a rotary pair
    return [as_latent(source, rank, rope_dim) for rank, rope_dim in sizes]
