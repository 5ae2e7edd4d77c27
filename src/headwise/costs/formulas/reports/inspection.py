"""`inspect`: a model's architecture and costs, from its config alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headwise.costs.formulas import layer, model
from headwise.models.specs import (
    AttentionSpec,
    BodySpec,
    FeedForwardSpec,
    GroupedSpec,
    LatentSpec,
    ModelSpec,
    read_spec,
)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers with equal specs: their indices, and the costs of one of them."""

    layers: tuple[int, ...]
    label: str
    mechanism: str
    kv_bytes_per_token: int
    state_bytes: int
    kv_bytes_at_longest: int | None
    attention_parameters: int
    sliding_window: int | None
    spec: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A model's weights, attention and cache, for one token and at the longest context that the model was made for.

    A number that differs between layers, or that the mechanism lacks, is None; so are numbers of the whole model
    (``weights``, ``active_weights``, ``flops_…``, ``body``) where only its attention is known.

    ``kv_bytes_per_token`` are the cache bytes that a token adds in all layers, in ``dtype``, and ``state_bytes``
    those that do not grow with tokens. A decoder that attends to an encoder's output caches
    ``source_kv_bytes_per_token`` for each token of that besides. ``kv_bytes_at_longest`` counts all layers at the
    longest context, within their windows, and their states. ``head_dim`` is a head's whole query–key width. The FLOPs
    are those of one token, without context and at the longest one. ``kv_bytes_…_of_rank`` is the part of the cache on
    each of ``ranks`` tensor-parallel ranks.

    ``weight_bytes`` has the bytes of each part's weights in the formats that they are stored in; ``weight_format``
    names these formats, and the dtype of all other weights. ``weight_notes`` say what is not known of the formats,
    and ``weight_bytes_are_bound`` whether the bytes are therefore an upper bound.
    """

    source: str
    model_type: str
    num_layers: int
    hidden_size: int
    max_position_embeddings: int | None
    mechanism: str
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None
    q_lora_rank: int | None
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    dtype: str
    kv_bytes_per_token: int
    source_kv_bytes_per_token: int
    state_bytes: int
    kv_bytes_at_longest: int | None
    ranks: int
    kv_bytes_per_token_of_rank: int
    kv_bytes_at_longest_of_rank: int | None
    attention_parameters_per_layer: int | None
    weights: dict[str, int] | None
    active_weights: dict[str, int] | None
    weight_bytes: dict[str, int] | None
    weight_format: str
    weight_notes: tuple[str, ...]
    weight_bytes_are_bound: bool
    flops_of_first_token: dict[str, int] | None
    flops_at_longest: dict[str, int] | None
    layers: tuple[LayerGroup, ...]
    body: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return asdict(self)


def inspect(source: str | Path | ModelSpec, *, dtype: str = "bfloat16", ranks: int = 1) -> Inspection:
    """Report a model's architecture, above all its attention, and its costs, without its weights and without torch.

    Args:
        source: a model folder, ``.gguf``, ``config.json``, catalog name, ``smollm2-135m``, ``hf://…`` or a spec.
        dtype: the dtype of the cache.
        ranks: tensor-parallel ranks that the heads are split over.

    Raises:
        SpecError: the architecture is not understood.
        ArgumentError: the source or dtype does not exist, or the heads cannot be split so.
        CheckpointError: the files of the source are damaged.

    >>> headwise.inspect("llama-3-8b").kv_bytes_per_token
    131072
    """
    layer.dtype_bytes(dtype)
    spec = source if isinstance(source, ModelSpec) else read_spec(source)
    longest, rank = spec.max_position_embeddings, model.shard(spec, ranks)
    weights = active = held = first = last = None
    weight_dtype = str(spec.dtype).removeprefix("torch.")
    weight_dtype = weight_dtype if weight_dtype in layer.DTYPE_BYTES else "bfloat16"
    if spec.body is not None:
        weights, active = _parts(model.weights(spec)), _parts(model.weights(spec, active=True))
        held = _parts(model.weight_bytes(spec, weight_dtype))
        first = _parts(model.forward_flops(spec, 1))
        last = None if longest is None else _parts(model.forward_flops(spec, 1, longest))
    return Inspection(
        source=spec.model_type if isinstance(source, ModelSpec) else str(source),
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        max_position_embeddings=spec.max_position_embeddings,
        mechanism=spec.mechanism,
        **_common_sizes(spec),
        dtype=dtype.removeprefix("torch."),
        kv_bytes_per_token=model.cache_bytes_per_token(spec, dtype),
        source_kv_bytes_per_token=model.source_cache_bytes_per_token(spec, dtype),
        state_bytes=model.state_bytes(spec, dtype=dtype),
        kv_bytes_at_longest=None if longest is None else model.cache_bytes(spec, longest, dtype=dtype),
        ranks=ranks,
        kv_bytes_per_token_of_rank=model.cache_bytes_per_token(rank, dtype),
        kv_bytes_at_longest_of_rank=None if longest is None else model.cache_bytes(rank, longest, dtype=dtype),
        weights=weights,
        active_weights=active,
        weight_bytes=held,
        weight_format=weight_dtype if spec.stored is None else spec.stored.counted(weight_dtype),
        weight_notes=() if spec.stored is None else spec.stored.warnings(),
        weight_bytes_are_bound=spec.stored is not None and spec.stored.is_bound,
        flops_of_first_token=first,
        flops_at_longest=last,
        layers=_layer_groups(spec, dtype),
        body=None if spec.body is None else _body(spec.body),
    )


def _common_sizes(spec: ModelSpec) -> dict[str, int | None]:
    """Sizes that all layers share; None for one that differs, or that the mechanism lacks."""

    def common(value: Callable[[AttentionSpec], int | None]) -> int | None:
        values = {value(one) for one in spec.layers}
        return values.pop() if len(values) == 1 else None

    def head_dim(one: AttentionSpec) -> int | None:
        return one.qk_head_dim if isinstance(one, LatentSpec) else getattr(one, "head_dim", None)

    def v_head_dim(one: AttentionSpec) -> int | None:
        return one.value_dim if isinstance(one, GroupedSpec) else getattr(one, "v_head_dim", None)

    names = ("num_heads", "num_kv_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    return {
        **{name: common(partial(_field, name)) for name in names},
        "head_dim": common(head_dim),
        "v_head_dim": common(v_head_dim),
        "attention_parameters_per_layer": common(layer.parameters),
    }


def _field(name: str, spec: AttentionSpec) -> int | None:
    value: int | None = getattr(spec, name, None)
    return value


def _layer_groups(spec: ModelSpec, dtype: str) -> tuple[LayerGroup, ...]:
    """Each distinct layer with its indices and costs."""
    longest = spec.max_position_embeddings
    return tuple(
        LayerGroup(
            layers=indices,
            label=one.label,
            mechanism=one.mechanism,
            kv_bytes_per_token=layer.cache_bytes_per_token(one, dtype),
            state_bytes=layer.state_bytes(one, dtype=dtype),
            kv_bytes_at_longest=None if longest is None else layer.cache_bytes(one, longest, dtype=dtype),
            attention_parameters=layer.parameters(one),
            sliding_window=one.sliding_window,
            spec=one.to_dict(),
        )
        for one, indices in spec.distinct_layers()
    )


def _parts(counts: model.Weights | model.Flops) -> dict[str, int]:
    return {**asdict(counts), "total": counts.total}


def _body(body: BodySpec) -> dict[str, Any]:
    """The body as JSON-able values, where layers with equal networks are one entry."""
    networks: dict[FeedForwardSpec | None, list[int]] = {}
    for index, network in enumerate(body.feed_forward):
        networks.setdefault(network, []).append(index)
    groups = [{"layers": indices, **asdict(network)} for network, indices in networks.items() if network]
    return {**asdict(body), "feed_forward": groups}
