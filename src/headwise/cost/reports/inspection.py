"""`inspect`: what a model is and what it costs, from its config alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.cost import layer, model
from headwise.specs import AttentionSpec, BodySpec, FeedForwardSpec, GroupedSpec, LatentSpec, ModelSpec, read_spec


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers of one spec: their indices, and one layer's costs."""

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
    """A model: its weights, its attention, its cache for a token and at the longest context it was made for.

    A number that differs from layer to layer, or that the mechanism lacks, is None; so is what needs the whole model
    (``weights``, ``active_weights``, ``flops_…``, ``body``) where only its attention is known.

    ``kv_bytes_per_token`` is all layers', in ``dtype``, and ``state_bytes`` what no token adds to; a decoder that
    attends to an encoder's output keeps ``source_kv_bytes_per_token`` of each of its tokens besides.
    ``kv_bytes_at_longest`` counts both, and windows. ``head_dim`` is a head's whole query–key width. The FLOPs
    are one token's, with nothing before it and at the longest context. ``kv_bytes_…_of_rank`` is what each of
    ``ranks`` tensor-parallel ranks holds of the cache.
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
    flops_of_first_token: dict[str, int] | None
    flops_at_longest: dict[str, int] | None
    layers: tuple[LayerGroup, ...]
    body: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


def inspect(source: str | Path | ModelSpec, *, dtype: str = "bfloat16", ranks: int = 1) -> Inspection:
    """What a model is, its attention above all, and what it costs, without weights and without torch.

    Args:
        source: a model folder, ``.gguf``, ``config.json``, catalog name, ``smollm2-135m``, ``hf://…`` or a spec.
        dtype: the cache's.
        ranks: tensor-parallel ranks that the heads are split over.

    Raises:
        SpecError: the architecture is not understood.
        ArgumentError: there is no such source or dtype, or the heads cannot be split so.
        CheckpointError: its files are damaged.
    """
    layer.dtype_bytes(dtype)
    spec = source if isinstance(source, ModelSpec) else read_spec(source)

    def common(value: Callable[[AttentionSpec], int | None]) -> int | None:
        values = {value(own) for own in spec.layers}
        return values.pop() if len(values) == 1 else None

    def head_dim(own: AttentionSpec) -> int | None:
        return own.qk_head_dim if isinstance(own, LatentSpec) else getattr(own, "head_dim", None)

    def v_head_dim(own: AttentionSpec) -> int | None:
        return own.value_dim if isinstance(own, GroupedSpec) else getattr(own, "v_head_dim", None)

    longest, rank = spec.max_position_embeddings, model.shard(spec, ranks)
    weights = active = first = last = None
    if spec.body is not None:
        weights, active = _parts(model.weights(spec)), _parts(model.weights(spec, active=True))
        first = _parts(model.forward_flops(spec, 1))
        last = None if longest is None else _parts(model.forward_flops(spec, 1, longest))
    return Inspection(
        source=spec.model_type if isinstance(source, ModelSpec) else str(source),
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        max_position_embeddings=spec.max_position_embeddings,
        mechanism=spec.mechanism,
        num_heads=common(lambda own: getattr(own, "num_heads", None)),
        num_kv_heads=common(lambda own: getattr(own, "num_kv_heads", None)),
        head_dim=common(head_dim),
        v_head_dim=common(v_head_dim),
        q_lora_rank=common(lambda own: getattr(own, "q_lora_rank", None)),
        kv_lora_rank=common(lambda own: getattr(own, "kv_lora_rank", None)),
        qk_rope_head_dim=common(lambda own: getattr(own, "qk_rope_head_dim", None)),
        dtype=dtype.removeprefix("torch."),
        kv_bytes_per_token=model.cache_bytes_per_token(spec, dtype),
        source_kv_bytes_per_token=model.source_cache_bytes_per_token(spec, dtype),
        state_bytes=model.state_bytes(spec, dtype=dtype),
        kv_bytes_at_longest=None if longest is None else model.cache_bytes(spec, longest, dtype=dtype),
        ranks=ranks,
        kv_bytes_per_token_of_rank=model.cache_bytes_per_token(rank, dtype),
        kv_bytes_at_longest_of_rank=None if longest is None else model.cache_bytes(rank, longest, dtype=dtype),
        attention_parameters_per_layer=common(layer.parameters),
        weights=weights,
        active_weights=active,
        flops_of_first_token=first,
        flops_at_longest=last,
        layers=tuple(
            LayerGroup(
                layers=indices,
                label=own.label,
                mechanism=own.mechanism,
                kv_bytes_per_token=layer.cache_bytes_per_token(own, dtype),
                state_bytes=layer.state_bytes(own, dtype=dtype),
                kv_bytes_at_longest=None if longest is None else layer.cache_bytes(own, longest, dtype=dtype),
                attention_parameters=layer.parameters(own),
                sliding_window=own.sliding_window,
                spec=own.to_dict(),
            )
            for own, indices in spec.distinct_layers()
        ),
        body=None if spec.body is None else _body(spec.body),
    )


def _parts(counts: model.Weights | model.Flops) -> dict[str, int]:
    return {**asdict(counts), "total": counts.total}


def _body(body: BodySpec) -> dict[str, Any]:
    """As JSON-able values, layers with the same network together."""
    networks: dict[FeedForwardSpec | None, list[int]] = {}
    for index, network in enumerate(body.feed_forward):
        networks.setdefault(network, []).append(index)
    groups = [{"layers": indices, **asdict(network)} for network, indices in networks.items() if network]
    return {**asdict(body), "feed_forward": groups}
