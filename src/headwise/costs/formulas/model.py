"""Costs of a whole model: its layers, and the feed-forward networks, norms, embedding and head around them.

A network has ``2EW`` weights, ``3EW`` gated, for each of its experts, and does 2 FLOPs for each weight used.

With n residual streams, each attention and each network has n weights that join them, n that spread its output over
them, and an n by n matrix that mixes them, all projected from the streams themselves. Behind the last layer the
streams are joined once more. Source: DeepSeek-V4's report, section 2.2 (manifold-constrained hyper-connections).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from headwise.costs.formulas import layer
from headwise.costs.formulas.stages import (
    Core,
    IndexScores,
    Linear,
    Stage,
    Vector,
    WeightsInMemory,
    held_matrix,
    held_stage,
)
from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec, Formats, ModelSpec
from headwise.models.specs.recurrent import RecurrentSpec


@dataclass(frozen=True, kw_only=True)
class _Sum:
    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, kw_only=True)
class Weights(_Sum):
    """The number of weights in each part of a model. ``mixers`` counts layers without softmax attention, ``streams``
    several residual streams; ``head`` is 0 where it is tied to the embedding."""

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
    """FLOPs of each part of a model: matrix products only, 2 for each multiply-add."""

    attention_projections: int = 0
    attention_pairs: int = 0
    mixers: int = 0
    feed_forward: int = 0
    experts: int = 0
    shared_experts: int = 0
    router: int = 0
    streams: int = 0
    head: int = 0


@dataclass(frozen=True)
class Part:
    """One kind of network in a layer: its stages, how many are stored, and how many of them a token uses."""

    name: str
    stages: tuple[Stage, ...]
    stored: int = 1
    used: int = 1

    @property
    def parameters(self) -> int:
        """The number of learned parameters of one network."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def flops(self) -> int:
        """FLOPs of one network for one token."""
        return sum(2 * stage.in_features * stage.out_features for stage in self.stages if isinstance(stage, Linear))


def parts(spec: FeedForwardSpec) -> tuple[Part, ...]:
    """The networks of a layer; their names are fields of `Weights` and `Flops`."""
    network = _network(spec, spec.intermediate_size, spec.bias)
    if spec.num_experts is None or spec.experts_per_token is None:
        return (Part("feed_forward", network),)
    E, n = spec.hidden_size, spec.num_experts
    router = (Linear("router", E, n, spec.router_bias), Vector("score correction", n if spec.score_correction else 0))
    networks = [Part("experts", network, n, spec.experts_per_token), Part("router", router)]
    if spec.shared_intermediate_size is not None:
        gate = (Linear("shared gate", E, 1),) if spec.shared_gate else ()
        networks.append(Part("shared_experts", (*_network(spec, spec.shared_intermediate_size, False), *gate)))
    return tuple(networks)


def _network(spec: FeedForwardSpec, width: int, bias: bool) -> tuple[Linear, ...]:
    E = spec.hidden_size
    gate = (Linear("gate_proj", E, width, bias),) if spec.gated else ()
    return (*gate, Linear("up_proj", E, width, bias), Linear("down_proj", width, E, bias))


def join_weights(streams: int) -> int:
    """The number of weights that join, feed and mix a block's streams, for each token."""
    return (streams + 2) * streams


def _stream_weights(streams: int, hidden_size: int, layers: int) -> int:
    """The number of weights in a whole model: projections, biases and three scales a block, and the last join."""
    if streams == 1:
        return 0
    block = join_weights(streams) * (streams * hidden_size + 1) + 3
    return 2 * layers * block + streams * (streams * hidden_size + 1) + 1


def stream_flops(streams: int, hidden_size: int) -> int:
    """FLOPs of one block's streams for one token: the projection, and mixing the streams."""
    return 2 * streams * hidden_size * (join_weights(streams) + streams)


def weights(model: ModelSpec, *, active: bool = False) -> Weights:
    """Every weight that a model stores, by part; with ``active``, those that one token uses.

    Active weights leave out only the experts that a token does not choose. The embedding counts whole, as in
    published counts.

    Raises:
        SpecError: the model's body is not known.
    """
    return Weights(**{part: int(each.values) for part, each in weights_in_memory(model, active=active).items()})


def weight_bytes(model: ModelSpec, dtype: str = "bfloat16", *, active: bool = False) -> Weights:
    """Bytes of the weights by part, in the formats that they are stored in
    (`headwise.models.specs.ModelSpec.stored`).

    For example ``weight_bytes(read_spec("gpt-oss-20b")).total`` is 13,761,264,768.

    Args:
        model: a model whose body is known.
        dtype: the dtype of weights without a format of their own.
        active: count only the weights that one token uses, see `weights`.

    Raises:
        ArgumentError: the dtype is not known.
        SpecError: the model's body is not known.
    """
    width = layer.dtype_bytes(dtype)
    parts_in_memory = weights_in_memory(model, active=active)
    return Weights(**{part: round(each.nbytes(width)) for part, each in parts_in_memory.items()})


@lru_cache(maxsize=64)
def weights_in_memory(model: ModelSpec, *, active: bool = False) -> Mapping[str, WeightsInMemory]:
    """The weights of a model in memory, by part.

    For example ``weights_in_memory(read_spec("llama-3-8b"))["head"].values`` is 525,336,576.

    Raises:
        SpecError: the model's body is not known.
    """
    body, E = _known_body(model), model.hidden_size
    outside = dict(model.stored.outside) if model.stored else {}
    vector_bytes = model.stored.vector_bytes if model.stored else None
    found = {part.name: WeightsInMemory() for part in fields(Weights)}
    for (spec, network, formats), times in distinct_layers(model, body.feed_forward).items():
        part_name = "mixers" if isinstance(spec, RecurrentSpec) else "attention"
        found[part_name] += layer.held_weights(spec, formats, vector_bytes) * times
        for part in parts(network) if network else ():
            number = times * (part.used if active else part.stored)
            for stage in part.stages:
                form = dict(formats).get(f"{part.name} {stage.name}")
                found[part.name] += held_stage(stage, form, vector_bytes) * number
    norms = (model.num_layers * body.norms + 1) * body.norm_vectors * E
    found["norms"] = held_matrix(0, 0, norms, None, vector_bytes)
    found["streams"] = held_matrix(1, _stream_weights(body.streams, E, model.num_layers))
    found["positions"] = held_matrix(body.positions, E)
    found["embedding"] = held_matrix(body.vocab_size, E, 0, outside.get("embedding"))
    rows, bias = 0 if body.tied else body.vocab_size, body.vocab_size if body.head_bias else 0
    found["head"] = held_matrix(rows, E, bias, outside.get("head") if rows else None, vector_bytes)
    return found


def distinct_layers(
    model: ModelSpec, networks: Sequence[FeedForwardSpec | None]
) -> Counter[tuple[AttentionSpec, FeedForwardSpec | None, Formats]]:
    """Each distinct layer and how many there are: its attention, its network, and the formats of its weights.

    For example ``len(distinct_layers(model, model.body.feed_forward))`` is 1 for Llama 3.
    """
    stored = model.stored
    formats = [()] * model.num_layers if stored is None else [stored.kinds[kind] for kind in stored.layers]
    return Counter(zip(model.layers, networks, formats, strict=True))


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
        batch: B, the number of sequences.
        causal: True counts only the pairs that the causal mask leaves, False all; see
            `headwise.cost.forward_flops`.
        impl: the implementation of layers whose mechanism has it; all others take ``auto``.

    Raises:
        ArgumentError: not 1 <= S <= T.
        SpecError: the model's body is not known.
    """
    body, E, tokens = _known_body(model), model.hidden_size, batch * new_tokens
    counts: Counter[str] = Counter()
    for (spec, network, _), times in distinct_layers(model, body.feed_forward).items():
        call = layer.call_of(spec, new_tokens, total_tokens, batch=batch, causal=causal)
        chosen = layer.chosen_impl(spec, impl if impl in layer.formulas(spec).IMPLS else "auto", call)
        outside = "mixers" if isinstance(spec, RecurrentSpec) else "attention_projections"
        for stage in layer.stages(spec, chosen, new_tokens=new_tokens):
            part = "attention_pairs" if isinstance(stage, Core | IndexScores) else outside
            counts[part] += times * int(stage.forward_flops(call, "unfused"))
        for network_part in parts(network) if network else ():
            counts[network_part.name] += times * tokens * network_part.used * network_part.flops
    if body.streams > 1:
        last = 2 * body.streams * body.streams * E
        counts["streams"] = tokens * (2 * model.num_layers * stream_flops(body.streams, E) + last)
    counts["head"] = 2 * tokens * E * body.vocab_size
    return Flops(**counts)


def attention_flops(
    model: ModelSpec, new_tokens: int, total_tokens: int | None = None, *, batch: int = 1, causal: bool | None = None
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


def _known_body(model: ModelSpec) -> BodySpec:
    if model.body is None:
        rule = (
            "has attention that is understood, but the layers around it are not: the config or its reader lacks them"
        )
        raise SpecError("model_type", model.model_type, rule)
    return model.body
