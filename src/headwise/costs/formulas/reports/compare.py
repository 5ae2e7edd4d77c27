"""`compare`: the costs of several mechanisms in the place of a model's attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headwise.costs.formulas import layer, model
from headwise.costs.formulas.reports.candidates import MATCHES, Match, ladder, matched
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs.base import MAX_SIZE, AttentionSpec
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.latent import LatentSpec
from headwise.models.specs.model import ModelSpec
from headwise.models.specs.recurrent import RecurrentSpec
from headwise.models.specs.sources import read_spec
from headwise.models.specs.target_sizes import as_latent, refuse_as_latent


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism at one size, in the place of the model's attention.

    FLOPs are those of all layers' attention (or mixers), causal; ``decode_flops`` are those of one token at the
    stated context. ``convert_to`` is the option of ``headwise convert`` that makes it, None where there is none.
    ``decode_ms`` and ``prefill_ms`` are measured on one layer, when asked for.
    """

    mechanism: str
    label: str
    is_source: bool
    convert_to: str | None
    attention_parameters_per_layer: int
    prefill_flops: int
    decode_flops: int
    kv_bytes_per_token: int
    kv_bytes: int
    decode_intensity: float
    decode_ms: float | None = None
    prefill_ms: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-able values, with the measured keys only where there is a measurement."""
        return {key: value for key, value in asdict(self).items() if value is not None or not key.endswith("_ms")}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows for one model at one context and batch; ``specs[i]`` is the layer of ``rows[i]``."""

    context: int
    batch: int
    dtype: str
    source: str
    match: str | None
    rows: tuple[Row, ...]
    specs: tuple[AttentionSpec, ...]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able values."""
        return {
            "source": self.source,
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "match": self.match,
            "rows": [row.to_dict() for row in self.rows],
        }


def compare(
    source: str | Path | ModelSpec,
    *,
    context: int = 4096,
    batch: int = 1,
    dtype: str = "bfloat16",
    match: Match | None = None,
) -> Comparison:
    """Compare the costs of mechanisms in the place of a model's attention.

    Layers without attention stay as they are, and every candidate keeps each layer's window.

    Args:
        source: a model folder, ``.gguf``, ``config.json``, catalog name, ``smollm2-135m``, ``hf://…`` or a spec.
        context: tokens in the cache, and in the prefill.
        batch: sequences.
        dtype: of the cache.
        match: None for several sizes (`headwise.cost.ladder`); ``cache`` or ``parameters`` for each mechanism at the
            one size whose cache or parameters are nearest the model's.

    Raises:
        ArgumentError: context or batch is not positive, a name is not known, or there is no such source.
        CheckpointError: its files are damaged.
        SpecError: the architecture is not understood, the model keeps no cache, or its attention is not of one kind
            and size, or shares keys and values, or is gated.

    >>> [row.label for row in headwise.compare("llama-3-8b", context=8192, match="cache").rows]
    """
    for name, value in (("context", context), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(name, value, "must be a whole number of at least 1")
        if value > MAX_SIZE:
            raise ArgumentError(name, value, f"must be at most {MAX_SIZE}")
    if match is not None and match not in MATCHES:
        raise ArgumentError("match", match, f"must be one of {', '.join(MATCHES)}")
    spec = source if isinstance(source, ModelSpec) else read_spec(source)
    if not spec.is_causal:
        raise SpecError("model_type", spec.model_type, "is an encoder: it keeps no cache to compare")
    original = _attention_of(spec)
    specs = tuple(ladder(original) if match is None else matched(original, match))
    rows = []
    for candidate in specs:
        stack = spec if candidate == original else _with(spec, candidate)
        rows.append(
            Row(
                mechanism=candidate.mechanism,
                label=candidate.label,
                is_source=candidate == original,
                convert_to=_target(original, candidate),
                attention_parameters_per_layer=layer.parameters(candidate),
                prefill_flops=model.attention_flops(stack, context, batch=batch, causal=True),
                decode_flops=model.attention_flops(stack, 1, context, batch=batch, causal=True),
                kv_bytes_per_token=model.cache_bytes_per_token(stack, dtype),
                kv_bytes=model.cache_bytes(stack, context, batch=batch, dtype=dtype),
                decode_intensity=layer.decode_intensity(candidate, dtype=dtype),
            )
        )
    return Comparison(
        source=spec.model_type if isinstance(source, ModelSpec) else str(source),
        context=context,
        batch=batch,
        dtype=dtype.removeprefix("torch."),
        match=match,
        rows=tuple(rows),
        specs=specs,
    )


def _attention_of(spec: ModelSpec) -> AttentionSpec:
    """The layer that candidates replace: the model's first attention layer, where all are of one kind and size."""
    attention = [one for one in spec.layers if not isinstance(one, RecurrentSpec)]
    kinds = {one.kind for one in attention}
    if len(kinds) != 1:
        raise SpecError(
            "attention kinds", sorted(kinds), "must be one: candidates replace all layers, which are of several kinds"
        )
    for name, what in (("shares_kv", "share keys and values"), ("output_gate", "gate their output")):
        if any(getattr(one, name, False) for one in attention):
            raise SpecError("model_type", spec.model_type, f"has layers that {what}, which candidates cannot replace")
    sizes = {replace(one, sliding_window=None, chunked=False, rope=None, softmax_scale=None) for one in attention}
    if len(sizes) > 1:
        rule = "must be of one size to be compared: each candidate takes the place of all of them"
        raise SpecError("attention", list(dict.fromkeys(one.label for one in attention)), rule)
    return attention[0]


def _with(spec: ModelSpec, candidate: AttentionSpec) -> ModelSpec:
    """The model with another attention; each layer keeps its window, and recurrent layers stay as they are."""
    layers = (
        one
        if isinstance(one, RecurrentSpec)
        else replace(candidate, sliding_window=one.sliding_window, chunked=one.chunked)
        for one in spec.layers
    )
    return replace(spec, layers=tuple(layers), stored=None)


def _target(original: AttentionSpec, candidate: AttentionSpec) -> str | None:
    """The arguments of ``headwise convert`` that turn the layer into the candidate, or None."""
    if candidate == original or not isinstance(original, GroupedSpec):
        return None
    if isinstance(candidate, LatentSpec):
        rank, rope_dim = candidate.kv_lora_rank, candidate.qk_rope_head_dim
        try:
            refuse_as_latent(original)
            converted = as_latent(original, rank, rope_dim)
        except (ArgumentError, SpecError):
            return None  # a source of its kind is not converted, or is narrower than the candidate
        return f"--to mla --kv-lora-rank {rank} --qk-rope-head-dim {rope_dim}" if candidate == converted else None
    if isinstance(candidate, GroupedSpec) and replace(original, num_kv_heads=candidate.num_kv_heads) == candidate:
        count = candidate.num_kv_heads
        return f"--to {candidate.mechanism}" + (f":{count}" if candidate.mechanism == "gqa" else "")
    return None
