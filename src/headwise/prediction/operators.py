"""What a forward pass does, operator by operator: FLOPs, and bytes of weights, cache and activations that it moves.

Symbols: B batch, S new tokens, T all tokens, E hidden size, w bytes of a weight, e bytes of an activation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headwise.cost import dtype_bytes, layer
from headwise.cost.feed_forward import Part, parts
from headwise.cost.stages import Call, Core, IndexScores, Linear, Product
from headwise.errors import ArgumentError, SpecError
from headwise.specs.base import AttentionSpec
from headwise.specs.grouped import GroupedSpec
from headwise.specs.indexed_latent import IndexedLatentSpec
from headwise.specs.model import BodySpec, ModelSpec
from headwise.specs.recurrent import RecurrentSpec

_NAMES = {"experts": "experts' ", "shared_experts": "shared "}
"""What stands before the name of a matrix of these parts of a feed-forward network."""

MOST = 2**30
"""The largest batch and context that are predicted."""


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

    def __post_init__(self) -> None:
        for name in ("batch", "new", "total", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise ArgumentError(name, value, f"must be a whole number from 1 to {MOST}")
        if self.new > self.total:
            raise ArgumentError("new, total", (self.new, self.total), "must satisfy new <= total")
        dtype_bytes(self.dtype)
        if self.cache_bits is not None and not 0 < self.cache_bits <= 64:
            raise ArgumentError("cache_bits", self.cache_bits, "must be above 0 and at most 64")
        if self.impl not in (impls := ("auto", "expanded", "absorbed", "cached_kv", "direct")):
            raise ArgumentError("impl", self.impl, f"must be one of {', '.join(impls)}")

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
    return list(_operators(model, known_body(model), forward))


def known_body(model: ModelSpec) -> BodySpec:
    """The body of a model.

    Raises:
        SpecError: it is not known.
    """
    if model.body is None:
        raise SpecError("model_type", model.model_type, "has a body that is not understood, so its time is not known")
    return model.body


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
        yield from _links(model, body, forward)
    vocab = body.vocab_size / forward.ranks
    yield Operator(
        name="head",
        part="head",
        flops=2 * forward.batch * E * vocab,
        weight_bytes=E * vocab * width,
        activation_bytes=forward.batch * (E + vocab) * width,
    )


def _links(model: ModelSpec, body: BodySpec, forward: Pass) -> Iterator[Operator]:
    """What one rank sends: sums behind every mixer, network and the embedding, and its part of the logits.

    In a ring, each number is sent 2(r - 1)/r times to be summed everywhere, and half as often to be collected.
    """
    width, ring = dtype_bytes(forward.dtype), (forward.ranks - 1) / forward.ranks
    mixers = sum(not (isinstance(spec, RecurrentSpec) and spec.form == "none") for spec in model.layers)
    sums = mixers + sum(network is not None for network in body.feed_forward) + 1
    sent = 2 * ring * forward.tokens * model.hidden_size * width
    yield Operator(name="all-reduce", part="link", times=sums, link_bytes=sent)
    logits = ring * forward.batch * body.vocab_size * width
    yield Operator(name="gather logits", part="link", link_bytes=logits)


def _attention(spec: AttentionSpec, forward: Pass) -> Iterator[Operator]:
    """The operators of one layer's attention on one of the ranks."""
    shard = layer.shard(spec, forward.ranks)
    call = layer.call_of(shard, forward.new, forward.total, batch=forward.batch)
    impls = layer.formulas(shard).IMPLS
    impl = layer.chosen_impl(shard, forward.impl if forward.impl in impls else "auto", call)
    stages = layer.stages(shard, impl, new_tokens=forward.new)
    if isinstance(shard, RecurrentSpec):
        held = layer.state_bytes(shard, batch=forward.batch, dtype=forward.dtype)
        yield Operator(name="state", part="mixer", cache_bytes=2 * held)  # read, and written
    # Keys and values that are decoded from a cached latent are written and read as activations; the latent is read
    # once, by what decodes it.
    decodes = any(isinstance(stage, Linear | Product) and stage.over == "total" for stage in stages)
    for stage in stages:
        if isinstance(stage, Core):
            yield _core(stage, shard, call, forward, decodes=decodes)
        elif isinstance(stage, IndexScores):
            yield _index_scores(stage, call, forward)
        elif isinstance(stage, Linear | Product):
            yield _product(stage, call, forward, "mixer" if isinstance(shard, RecurrentSpec) else "attention")


def _product(stage: Linear | Product, call: Call, forward: Pass, part: str) -> Operator:
    width, count = dtype_bytes(forward.dtype), int(call.count(stage.over))
    if isinstance(stage, Linear):
        weights = int(stage.parameters)
        moved = int(stage.out_features) + (0 if stage.over == "total" else int(stage.in_features))
    else:
        weights, moved = int(stage.macs), int(stage.moved)
    return Operator(
        name=stage.name,
        part=part,
        flops=int(stage.forward_flops(call, "fused")),
        weight_bytes=weights * width if count else 0,
        activation_bytes=count * moved * width,
    )


def _core(stage: Core, spec: AttentionSpec, call: Call, forward: Pass, *, decodes: bool) -> Operator:
    width, batch, total = dtype_bytes(forward.dtype), int(call.batch), int(call.total)
    widths = int(stage.heads) * (int(stage.qk_dim) + int(stage.v_dim))
    # A layer that shares another's keys and values stores none, and reads them all the same.
    owner = replace(spec, shares_kv=False) if isinstance(spec, GroupedSpec) and spec.shares_kv else spec
    if isinstance(spec, IndexedLatentSpec):  # each query reads what was selected, and the indexer reads its own keys
        owner = replace(spec, index_n_heads=0, index_head_dim=0)
        total = min(total, int(call.new) * spec.index_topk)
    return Operator(
        name=stage.name,
        part="attention",
        flops=int(stage.forward_flops(call, "fused")),
        cache_bytes=batch * total * layer.cache_values(owner) * forward.value_bytes,
        activation_bytes=(forward.tokens + (batch * total if decodes else 0)) * widths * width,
    )


def _index_scores(stage: IndexScores, call: Call, forward: Pass) -> Operator:
    batch, total, width = int(call.batch), int(call.total), dtype_bytes(forward.dtype)
    return Operator(
        name=stage.name,
        part="attention",
        flops=int(stage.forward_flops(call, "fused")),
        cache_bytes=batch * total * int(stage.width) * forward.value_bytes,
        activation_bytes=(forward.tokens * int(stage.heads) * int(stage.width) + batch * int(call.new) * total)
        * width,
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
                name=_NAMES.get(part.name, "") + stage.name,
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
