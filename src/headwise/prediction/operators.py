"""What a forward pass does, operator by operator: FLOPs, and bytes of weights, cache and activations that it moves.

Symbols: B batch, S new tokens, T all tokens, E hidden size, w bytes of a weight, e bytes of an activation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headwise.cost import dtype_bytes, layer
from headwise.cost.feed_forward import Part, parts
from headwise.cost.stages import Call, Core, Linear, Product
from headwise.errors import ArgumentError, SpecError
from headwise.specs.base import AttentionSpec
from headwise.specs.model import BodySpec, ModelSpec
from headwise.specs.recurrent import RecurrentSpec


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass.

    Attributes:
        batch: B, sequences.
        new: S, tokens of each that are passed in; 1 for a decode step.
        total: T, tokens of each that are attended to, the new ones included.
        dtype: of weights and activations.
        cache_bits: of one cached value; those of ``dtype`` when None.
        ranks: tensor-parallel devices that share the pass.
        impl: of the layers whose mechanism has several implementations; ``auto`` takes the one of fewest FLOPs.
    """

    batch: int = 1
    new: int = 1
    total: int = 1
    dtype: str = "bfloat16"
    cache_bits: float | None = None
    ranks: int = 1
    impl: str = "auto"

    @property
    def tokens(self) -> int:
        """B·S."""
        return self.batch * self.new

    @property
    def value_bytes(self) -> float:
        """Bytes of one cached value."""
        return dtype_bytes(self.dtype) if self.cache_bits is None else self.cache_bits / 8


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One kind of operator of a pass, on one device.

    Attributes:
        name: such as ``q_proj``.
        part: ``attention``, ``mixer``, ``feed_forward``, ``norms``, ``embedding``, ``head`` or ``link``.
        times: how often it runs, once in each layer of its kind.
        flops: of one run.
        weight_bytes: of weights that one run reads.
        cache_bytes: of cached keys and values that one run reads.
        activation_bytes: that one run reads and writes.
        link_bytes: that one run sends to other devices.
    """

    name: str
    part: str
    times: int = 1
    flops: float = 0
    weight_bytes: float = 0
    cache_bytes: float = 0
    activation_bytes: float = 0
    link_bytes: float = 0

    @property
    def memory_bytes(self) -> float:
        """All bytes that one run moves between memory and processor."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


def operators(model: ModelSpec, forward: Pass) -> list[Operator]:
    """The operators of one forward pass on one device; the head is computed for the last token of each sequence.

    For example ``sum(o.times * o.weight_bytes for o in operators(read_spec("llama-3-8b"), Pass(total=1024)))``.

    Attention is fused: its scores are not stored. Of a mixture of experts, the weights are those of the experts that
    a batch is expected to choose when every expert is as likely.

    Args:
        model: with its body.
        forward: the pass.

    Raises:
        ArgumentError: a count is impossible, or the heads cannot be split over the ranks.
        SpecError: the model's body is not known.
    """
    if model.body is None:
        raise SpecError("model_type", model.model_type, "has a body that is not understood, so its time is not known")
    if forward.ranks < 1:
        raise ArgumentError("ranks", forward.ranks, "must be at least 1")
    return list(_operators(model, model.body, forward))


def _operators(model: ModelSpec, body: BodySpec, forward: Pass) -> Iterator[Operator]:
    E, tokens, width = model.hidden_size, forward.tokens, dtype_bytes(forward.dtype)
    yield Operator(name="embedding", part="embedding", activation_bytes=2 * tokens * E * width)
    layers = Counter(zip(model.layers, body.feed_forward, strict=True))
    for (spec, network), times in layers.items():
        for operator in _attention(spec, forward):
            yield replace(operator, times=times)
        for part in parts(network) if network else ():
            for operator in _network(part, forward):
                yield replace(operator, times=times)
    # A norm reads and writes the tokens, and the residual sum beside it does once more.
    rows = 4 * tokens * E * width
    yield Operator(name="norm", part="norms", times=body.norms * model.num_layers + 1, activation_bytes=rows)
    if forward.ranks > 1:
        # A ring sends each number 2(r - 1)/r times: once to be summed, once to be spread.
        sent = 2 * (forward.ranks - 1) / forward.ranks * tokens * E * width
        yield Operator(name="all-reduce", part="link", times=2 * model.num_layers, link_bytes=sent)
    vocab = body.vocab_size / forward.ranks
    yield Operator(
        name="head",
        part="head",
        flops=2 * forward.batch * E * vocab,
        weight_bytes=E * vocab * width,
        activation_bytes=forward.batch * (E + vocab) * width,
    )


def _attention(spec: AttentionSpec, forward: Pass) -> Iterator[Operator]:
    """The operators of one layer's attention on one of the ranks."""
    shard = layer.shard(spec, forward.ranks)
    call = layer.call_of(shard, forward.new, forward.total, batch=forward.batch)
    impls = layer.formulas(shard).IMPLS
    impl = layer.chosen_impl(shard, forward.impl if forward.impl in impls else "auto", call)
    part = "mixer" if isinstance(spec, RecurrentSpec) else "attention"
    for stage in layer.stages(shard, impl, new_tokens=forward.new):
        if isinstance(stage, Core):
            yield _core(stage, shard, call, forward, part)
        elif isinstance(stage, Linear | Product):
            yield _product(stage, call, forward, part)


def _product(stage: Linear | Product, call: Call, forward: Pass, part: str) -> Operator:
    width, count = dtype_bytes(forward.dtype), int(call.count(stage.over))
    if isinstance(stage, Linear):
        weights = int(stage.parameters)
        moved = int(stage.in_features) + int(stage.out_features)
    else:  # a matrix for each head
        weights, moved = int(stage.macs), 0
    return Operator(
        name=stage.name,
        part=part,
        flops=int(stage.forward_flops(call, "fused")),
        weight_bytes=weights * width if count else 0,
        activation_bytes=count * moved * width,
    )


def _core(stage: Core, spec: AttentionSpec, call: Call, forward: Pass, part: str) -> Operator:
    width, batch, total = dtype_bytes(forward.dtype), int(call.batch), int(call.total)
    queries = forward.tokens * int(stage.heads) * (int(stage.qk_dim) + int(stage.v_dim))
    return Operator(
        name=stage.name,
        part=part,
        flops=int(stage.forward_flops(call, "fused")),
        cache_bytes=batch * total * layer.cache_values(spec) * forward.value_bytes,
        activation_bytes=queries * width,
    )


def _network(part: Part, forward: Pass) -> Iterator[Operator]:
    """The operators of one part of a layer's feed-forward network on one of the ranks."""
    width, tokens, ranks = dtype_bytes(forward.dtype), forward.tokens, forward.ranks
    read = float(part.stored)
    if part.name == "experts":
        read = expected_experts(part.stored, part.used, tokens)
    for stage in part.stages:
        if isinstance(stage, Linear):
            yield Operator(
                name=stage.name if part.name in ("feed_forward", stage.name) else f"{part.name} {stage.name}",
                part="feed_forward",
                flops=2 * tokens * part.used * stage.in_features * stage.out_features / ranks,
                weight_bytes=read * stage.parameters * width / ranks,
                activation_bytes=tokens * part.used * (stage.in_features + stage.out_features) * width / ranks,
            )


def expected_experts(stored: int, used: int, tokens: int) -> float:
    """How many of ``stored`` experts a batch reads, where each token uses ``used`` and all are as likely.

    For example ``expected_experts(8, 2, 1)`` is 2.0.
    """
    return stored * (1 - (1 - used / stored) ** tokens)
