"""Costs of a whole model: its layers, and the feed-forward networks, norms, embedding and head around them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

from headwise.cost import layer, streams
from headwise.cost.feed_forward import parts
from headwise.cost.stages import Core, IndexScores
from headwise.errors import SpecError
from headwise.specs.base import AttentionSpec
from headwise.specs.feed_forward import FeedForwardSpec
from headwise.specs.model import BodySpec, ModelSpec
from headwise.specs.recurrent import RecurrentSpec


@dataclass(frozen=True, kw_only=True)
class _Sum:
    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, kw_only=True)
class Weights(_Sum):
    """Weights by part. ``mixers`` are those of layers without softmax attention; ``streams`` are of several residual
    streams; ``head`` is 0 where it is tied."""

    embedding: int = 0
    positions: int = 0
    attention: int = 0
    mixers: int = 0
    feed_forward: int = 0
    experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    streams: int = 0
    head: int = 0


@dataclass(frozen=True, kw_only=True)
class Flops(_Sum):
    """FLOPs by part: matrix products only, 2 for each multiply-add."""

    attention_projections: int = 0
    attention_pairs: int = 0
    mixers: int = 0
    feed_forward: int = 0
    experts: int = 0
    shared_experts: int = 0
    router: int = 0
    streams: int = 0
    head: int = 0


def weights(model: ModelSpec, *, active: bool = False) -> Weights:
    """Every weight that a model stores, by part; with ``active``, those that one token uses.

    Active weights leave out only the experts that a token does not choose. The embedding counts whole, as in
    published counts.

    Raises:
        SpecError: the model's body is not known.
    """
    body, counts = _known_body(model), _Counts()
    vectors, E = body.norm_vectors, model.hidden_size
    for (spec, network), times in _distinct(model, body):
        counts.add("mixers" if isinstance(spec, RecurrentSpec) else "attention", times * layer.parameters(spec))
        for part in parts(network) if network else ():
            counts.add(part.name, times * part.parameters * (part.used if active else part.stored))
    counts.add("norms", (model.num_layers * body.norms + 1) * vectors * E)
    counts.add("streams", streams.parameters(body.streams, E, model.num_layers))
    counts.add("embedding", body.vocab_size * E)
    counts.add("positions", body.positions * E)
    counts.add("head", (0 if body.tied else body.vocab_size * E) + (body.vocab_size if body.head_bias else 0))
    return Weights(**counts)


def parameters(model: ModelSpec) -> int:
    """Attention parameters of all layers together."""
    return sum(layer.parameters(spec) for spec in model.layers)


def forward_flops(
    model: ModelSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    batch: int = 1,
    causal: bool | None = None,
    impl: str = "auto",
) -> Flops:
    """FLOPs of one forward pass of the whole model, by part, with the head computed for every new token.

    Args:
        new_tokens: S, tokens passed in; 1 for a decode step.
        total_tokens: T, tokens attended to, S of them new; S when None (prefill).
        batch: B.
        causal: as in `headwise.cost.forward_flops`.
        impl: implementation of the layers whose mechanism has it; ``auto`` for the others.

    Raises:
        ArgumentError: not 1 <= S <= T.
        SpecError: the model's body is not known.
    """
    body, counts = _known_body(model), _Counts()
    tokens = batch * new_tokens
    for (spec, network), times in _distinct(model, body):
        call = layer.call_of(spec, new_tokens, total_tokens, batch=batch, causal=causal)
        chosen = layer.chosen_impl(spec, impl if impl in layer.formulas(spec).IMPLS else "auto", call)
        outside = "mixers" if isinstance(spec, RecurrentSpec) else "attention_projections"
        for stage in layer.stages(spec, chosen, new_tokens=new_tokens):
            part = "attention_pairs" if isinstance(stage, Core | IndexScores) else outside
            counts.add(part, times * int(stage.forward_flops(call, "unfused")))
        for network_part in parts(network) if network else ():
            counts.add(network_part.name, times * tokens * network_part.used * network_part.flops)
    counts.add("streams", tokens * streams.flops(body.streams, model.hidden_size, model.num_layers))
    counts.add("head", 2 * tokens * model.hidden_size * body.vocab_size)
    return Flops(**counts)


def attention_flops(
    model: ModelSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    batch: int = 1,
    causal: bool | None = None,
) -> int:
    """FLOPs of one forward pass through every layer's attention or mixer, without the rest of the model."""
    return sum(
        times * layer.forward_flops(spec, new_tokens, total_tokens, batch=batch, causal=causal)
        for spec, times in Counter(model.layers).items()
    )


def shard(model: ModelSpec, ranks: int) -> ModelSpec:
    """The part of a model's attention that one of ``ranks`` tensor-parallel ranks holds (`headwise.cost.shard`).

    The result has no body: how feed-forward networks are split does not depend on heads.
    """
    return replace(model, layers=tuple(layer.shard(spec, ranks) for spec in model.layers), body=None)


def cache_bytes_per_token(model: ModelSpec, dtype: str = "bfloat16") -> int:
    """Bytes that one more token adds to the cache of all layers, while every layer's grows."""
    return sum(layer.cache_bytes_per_token(spec, dtype) for spec in model.layers)


def source_cache_bytes_per_token(model: ModelSpec, dtype: str = "bfloat16") -> int:
    """Bytes that one token of an encoder's output takes in the caches of all layers that attend to it."""
    return sum(int(layer.cache_values(spec)) for spec in model.cross_layers) * layer.dtype_bytes(dtype)


def cache_bytes_by_layer(
    model: ModelSpec, tokens: int, *, batch: int = 1, dtype: str = "bfloat16"
) -> tuple[int, ...]:
    """Bytes of each layer's cache at a context of ``tokens``: keys and values within its window, or its state."""
    each = {spec: layer.cache_bytes(spec, tokens, batch=batch, dtype=dtype) for spec in set(model.layers)}
    return tuple(each[spec] for spec in model.layers)


def cache_bytes(model: ModelSpec, tokens: int, *, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of the cache of all layers at a context of ``tokens``."""
    return sum(cache_bytes_by_layer(model, tokens, batch=batch, dtype=dtype))


def state_bytes(model: ModelSpec, *, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of the cache that do not grow with tokens: the states of recurrent layers."""
    return sum(layer.state_bytes(spec, batch=batch, dtype=dtype) for spec in model.layers)


class _Counts(dict[str, int]):
    def add(self, name: str, value: int) -> None:
        self[name] = self.get(name, 0) + value


def _known_body(model: ModelSpec) -> BodySpec:
    if model.body is None:
        rule = (
            "has attention that is understood, but the layers around it are not: the config or its reader lacks them"
        )
        raise SpecError("model_type", model.model_type, rule)
    return model.body


def _distinct(model: ModelSpec, body: BodySpec) -> list[tuple[tuple[AttentionSpec, FeedForwardSpec | None], int]]:
    """Each distinct layer and how many there are: a deep model has few distinct ones."""
    return list(Counter(zip(model.layers, body.feed_forward, strict=True)).items())
