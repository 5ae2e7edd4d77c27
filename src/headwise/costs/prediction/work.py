"""What a model's operators compute and move, as sums over numbers of tokens: the same for every pass.

An operator's FLOPs are so many for each token, and so many for each pair of a query and a key; `operators` puts a
pass's numbers in, and so does a report's page, whose arithmetic is these sums. Symbols: B batch, S new tokens, T all
tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from headwise.costs.formulas import layer
from headwise.costs.formulas.model import Part, distinct_layers, join_weights, parts, stream_flops
from headwise.costs.formulas.stages import (
    Core,
    IndexScores,
    Linear,
    Product,
    Stage,
    WeightsInMemory,
    attended_entries,
    attended_pairs,
    held_matrix,
    held_stage,
)
from headwise.costs.prediction.curves import Kind
from headwise.errors import SpecError
from headwise.models.specs import AttentionSpec, CompressedSpec, GroupedSpec, IndexedLatentSpec, LatentSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec, MatrixFormat, ModelSpec
from headwise.models.specs.recurrent import RecurrentSpec

Count = Literal[
    "sequences", "new", "total", "square", "pairs", "selected", "read",
    "entry pairs", "chosen", "entries", "chosen read",
]  # fmt: skip
"""What numbers are multiplied with: sequences B; tokens B·S; tokens attended to, B·T or those within a window; the
product B·S·T; pairs that the mask leaves; pairs of tokens that are selected; cached tokens that are read. Of entries
that stand for several tokens: pairs with all, and with those that are chosen; all that are cached, and those that are
read."""

_Formats = Mapping[str, MatrixFormat]

_NAMES = {"experts": "experts' ", "shared_experts": "shared "}
"""What stands before the name of a matrix of these parts of a feed-forward network."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The tokens that a query of a layer attends to.

    Attributes:
        is_causal: whether a query sees no tokens behind it.
        window: the number of latest tokens that the query sees, or of a chunk's; None for all.
        chunked: whether ``window`` is a chunk, within which a query attends.
        most: the most tokens, where something selects them; or the window that stands beside entries.
        rate: the number of tokens of an entry; None without entries.
        chosen: the most entries that a query attends to; None for all.
    """

    is_causal: bool = True
    window: int | None = None
    chunked: bool = False
    most: int | None = None
    rate: int | None = None
    chosen: int | None = None

    def counts(self, batch: int, new: int, total: int) -> dict[Count, int]:
        """The numbers of a pass of ``batch`` sequences with ``new`` of ``total`` tokens.

        For example ``Reach().counts(2, 1, 100)["pairs"]`` is 200.
        """
        kept = total
        if self.window is not None:
            kept = new + (total - new) % self.window if self.chunked else min(total, new + self.window - 1)
        pairs = attended_pairs(new, total, causal=self.is_causal, window=self.window, chunked=self.chunked)
        pairs = pairs if self.is_causal else new * kept
        selected = pairs
        if self.most is not None and kept > self.most:
            selected = min(pairs, attended_pairs(new, kept, causal=True, window=self.most))
        read = kept if self.most is None else min(kept, new * self.most)
        rate = self.rate or total + 1  # without entries, none is full
        entries = total // rate
        numbers: dict[Count, int] = {
            "sequences": 1,
            "new": new,
            "total": kept,
            "square": new * kept,
            "pairs": pairs,
            "selected": selected,
            "read": read,
            "entry pairs": attended_entries(new, total, rate),
            "chosen": attended_entries(new, total, rate, self.chosen),
            "entries": entries,
            "chosen read": entries if self.chosen is None else min(entries, new * self.chosen),
        }
        return {name: batch * number for name, number in numbers.items()}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of operator, on one device.

    Attributes:
        name: the operator's name, such as ``q_proj``.
        part: ``attention``, ``mixer``, ``feed_forward``, ``norms``, ``embedding``, ``head`` or ``link``.
        times: how often it runs, once in each layer of its kind.
        flops: the FLOPs of one run, for each count.
        weights: values of weights that one run reads; of one expert's, where there are experts.
        packed: how many of them are stored in a format of their own.
        packed_bytes: the bytes of the packed weights.
        experts: how many are stored, how many a token uses, and ranks that share them; or None.
        cached: values of the cache that one run reads, for each count.
        state: values of a state that one run reads and writes, of one sequence.
        moved: values of activations that one run reads and writes, for each count.
        sent: values that one run sends to other devices, for each count.
        formula: the formula of the FLOPs.
        kind: a name that operators share whose times are read from the same curves.
        hidden_size: E, where the time depends on it.
    """

    name: str
    part: str
    times: int = 1
    flops: Mapping[Count, float] = field(default_factory=dict)
    weights: float = 0
    packed: float = 0
    packed_bytes: float = 0
    experts: tuple[int, int, int] | None = None
    cached: Mapping[Count, float] = field(default_factory=dict)
    state: float = 0
    moved: Mapping[Count, float] = field(default_factory=dict)
    sent: Mapping[Count, float] = field(default_factory=dict)
    formula: str = ""
    kind: Kind = "other"
    hidden_size: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The operators of one kind of layer.

    Attributes:
        spec: the spec of its attention, on one rank.
        times: the number of layers of this kind.
        reach: what a query attends to.
        step: the operators of its attention in a pass of one new token, by implementation.
        prompt: the same in a pass of several new tokens.
        network: the operators of its feed-forward network.
        values: the number of values cached for each token.
        state: the number of values of its state, of one sequence.
    """

    spec: AttentionSpec
    times: int
    reach: Reach
    step: Mapping[str, tuple[Work, ...]]
    prompt: Mapping[str, tuple[Work, ...]]
    network: tuple[Work, ...]
    values: int
    state: int

    def impl(self, wanted: str, new: int, total: int) -> str:
        """The implementation that a pass uses: the one wanted, or where it is ``auto`` or not there the cheapest."""
        if wanted in self.step:
            return wanted
        if len(self.step) == 1:
            return next(iter(self.step))
        counts = self.reach.counts(1, new, total)
        return layer.formulas(self.spec).best_impl(self.spec, new, counts["total"], counts["pairs"])


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """The operators of a model: its layers, and what stands around them."""

    layers: tuple[LayerWork, ...]
    body: tuple[Work, ...]


def known_body(model: ModelSpec) -> BodySpec:
    """The body of a model.

    Raises:
        SpecError: the body is not known.
    """
    if model.body is None:
        raise SpecError("model_type", model.model_type, "has a body that is not understood, so its time is not known")
    return model.body


@lru_cache(maxsize=64)
def model_work(model: ModelSpec, ranks: int = 1) -> ModelWork:
    """The operators of a model on one of several ranks.

    For example ``len(model_work(read_spec("llama-3-8b")).layers)`` is 1.

    Attention is fused: its scores are not stored. Of a mixture of experts, the weights are those of the experts that
    a batch is expected to choose when every expert is as likely.

    Args:
        model: the model's spec, with its body.
        ranks: tensor-parallel devices.

    Raises:
        ArgumentError: the heads cannot be split over the ranks.
        SpecError: the model's body is not known.
    """
    body, E = known_body(model), model.hidden_size
    kinds = distinct_layers(model, body.feed_forward)
    vocab, norms = body.vocab_size / ranks, body.norms * model.num_layers + 1
    around = [
        Work(name="embedding", part="embedding", moved={"new": 2 * E}, kind="embedding", hidden_size=E),
        # A norm reads and writes the tokens, and the residual sum beside it does once more.
        Work(name="norm", part="norms", times=norms, moved={"new": 4 * E}, kind="norm", hidden_size=E),
        *_streams(model, body),
        *(_links(model, body, ranks) if ranks > 1 else ()),
        _reading(
            Work(
                name="head",
                part="head",
                flops={"sequences": 2 * E * vocab},
                moved={"sequences": E + vocab},
                formula="2·B·E·vocabulary",
                kind="linear",
            ),
            _head(model, body),
            E * vocab,
        ),
    ]
    layers = (_layer(spec, network, dict(formats), times, ranks) for (spec, network, formats), times in kinds.items())
    return ModelWork(layers=tuple(layers), body=tuple(around))


def _head(model: ModelSpec, body: BodySpec) -> WeightsInMemory:
    """The weights that the head multiplies with: the embedding's where it is tied."""
    outside = dict(model.stored.outside) if model.stored else {}
    return held_matrix(body.vocab_size, model.hidden_size, form=outside.get("embedding" if body.tied else "head"))


def _reading(work: Work, matrix: WeightsInMemory, values: float) -> Work:
    """An operator that reads so many values of a matrix."""
    share = values / matrix.values if matrix.packed else 0
    packed = (matrix.values - matrix.unquantised) * share
    return replace(work, weights=values, packed=packed, packed_bytes=matrix.packed * share)


def _streams(model: ModelSpec, body: BodySpec) -> Iterator[Work]:
    """What joins several residual streams before each block, and adds its output to them behind it."""
    if body.streams == 1:
        return
    width, numbers = body.streams * model.hidden_size, join_weights(body.streams)
    yield Work(
        name="streams",
        part="norms",
        times=2 * model.num_layers,
        flops={"new": stream_flops(body.streams, model.hidden_size)},
        weights=numbers * width,
        moved={"new": 3 * width},
        formula=f"2·B·S·{width:,}·{numbers + body.streams}",
    )
    yield Work(
        name="streams' end",
        part="norms",
        flops={"new": 2 * width * body.streams},
        weights=body.streams * width,
        moved={"new": width},
        formula=f"2·B·S·{width:,}·{body.streams}",
    )


def _links(model: ModelSpec, body: BodySpec, ranks: int) -> Iterator[Work]:
    """What one rank sends: sums behind every mixer, network and the embedding, and its part of the logits.

    In a ring, each number is sent 2(r - 1)/r times to be summed everywhere, and half as often to be collected.
    """
    ring = (ranks - 1) / ranks
    mixers = sum(not (isinstance(spec, RecurrentSpec) and spec.form == "none") for spec in model.layers)
    sums = mixers + sum(network is not None for network in body.feed_forward) + 1
    yield Work(name="all-reduce", part="link", times=sums, sent={"new": 2 * ring * model.hidden_size})
    yield Work(name="gather logits", part="link", sent={"sequences": ring * body.vocab_size})


def _layer(
    spec: AttentionSpec, network: FeedForwardSpec | None, formats: _Formats, times: int, ranks: int
) -> LayerWork:
    shard = layer.shard(spec, ranks)
    impls = layer.formulas(shard).IMPLS
    values = layer.cache_values(shard) if shard.is_causal else 0
    return LayerWork(
        spec=shard,
        times=times,
        reach=_reach(shard),
        step={impl: tuple(_attention(shard, impl, formats, 1, times)) for impl in impls},
        prompt={impl: tuple(_attention(shard, impl, formats, 2, times)) for impl in impls},
        network=tuple(
            replace(work, times=times)
            for part in (parts(network) if network else ())
            for work in _network(part, formats, ranks)
        ),
        values=values,
        state=layer.state_bytes(shard, dtype="int8"),
    )


def _reach(spec: AttentionSpec) -> Reach:
    plain = Reach(is_causal=spec.is_causal, window=spec.sliding_window, chunked=spec.chunked)
    if isinstance(spec, IndexedLatentSpec):
        return replace(plain, most=spec.index_topk)
    if isinstance(spec, CompressedSpec):
        return replace(plain, most=spec.window, rate=spec.rate, chosen=spec.index_topk)
    return plain


def _attention(spec: AttentionSpec, impl: str, formats: _Formats, new: int, times: int) -> Iterator[Work]:
    """The operators of one layer's attention in passes of one new token, or of more."""
    is_mixer = isinstance(spec, RecurrentSpec)
    if is_mixer:
        held = layer.state_bytes(spec, dtype="int8")
        yield Work(name="state", part="mixer", times=times, state=2 * held)  # read, and written
    stages = layer.stages(spec, impl, new_tokens=new)
    # Keys and values that are decoded from a cached latent are written and read as activations; the latent is read
    # once, by what decodes it.
    matrices = {stage.name: held_stage(stage, formats.get(stage.name)) for stage in layer.stages(spec)}
    decodes = any(isinstance(stage, Linear | Product) and stage.over == "total" for stage in stages)
    for stage in stages:
        work = None
        if isinstance(stage, Core) and isinstance(spec, CompressedSpec):
            work = _shared_core(stage, spec)
        elif isinstance(stage, Core):
            work = _core(stage, spec, decodes=decodes)
        elif isinstance(stage, IndexScores):
            work = _index_scores(stage)
        elif isinstance(stage, Linear | Product):
            name = stage.part_of if isinstance(stage, Product) and stage.part_of else stage.name
            work = _product(stage, "mixer" if is_mixer else "attention", matrices.get(name, WeightsInMemory()))
        if work is not None:
            yield replace(work, times=times, formula=_formula(stage, spec, new))


def _formula(stage: Stage, spec: AttentionSpec, new: int) -> str:
    """The FLOPs of a stage in the letters of the cost model."""
    total = max(100 * new, (spec.sliding_window or 0) + 100)
    return stage.forward_flops(layer.call_of(spec, new, total, batch=3), "fused").formula


def _product(stage: Linear | Product, part: str, matrix: WeightsInMemory) -> Work:
    over: Count = {"new": "new", "source": "new", "total": "total", "call": "sequences"}[stage.over]  # type: ignore[assignment]
    if isinstance(stage, Linear):
        read = 0 if stage.over == "total" else int(stage.in_features)
        macs, weights = int(stage.in_features) * int(stage.out_features), int(stage.parameters)
        moved = int(stage.out_features) + read
        kind: Kind = "latent input" if stage.name == "kv_a_proj_with_mqa" else "linear"
    else:
        macs, weights, moved, kind = int(stage.macs), int(stage.macs), int(stage.moved), "product"
    work = Work(
        name=stage.name,
        part=part,
        flops={over: 2 * macs},
        moved={over: moved},
        kind=kind,
        hidden_size=int(stage.in_features) if isinstance(stage, Linear) else 1,
    )
    return _reading(work, matrix, weights)


def _core(stage: Core, spec: AttentionSpec, *, decodes: bool) -> Work:
    widths = int(stage.heads) * (int(stage.qk_dim) + int(stage.v_dim))
    # A layer that shares another's keys and values stores none, and reads them all the same.
    owner = replace(spec, shares_kv=False) if isinstance(spec, GroupedSpec) and spec.shares_kv else spec
    if isinstance(spec, IndexedLatentSpec):  # each query reads what was selected, and the indexer reads its own keys
        owner = replace(spec, index_n_heads=0, index_head_dim=0)
    return Work(
        name=stage.name,
        part="attention",
        flops={"selected": 2 * widths},
        cached={"read": layer.cache_values(owner)},
        moved={"new": widths, "read": widths} if decodes else {"new": widths},
        kind="latent core" if isinstance(spec, LatentSpec) else "core",
    )


def _shared_core(stage: Core, spec: CompressedSpec) -> Work:
    """Attention to the window, which is part of a sequence's state, or to entries, each of which is key and value."""
    heads, width = int(stage.heads), spec.head_dim
    is_window = stage.rate is None
    return Work(
        name=stage.name,
        part="attention",
        flops={"selected" if is_window else "chosen": 4 * heads * width},
        cached={} if is_window else {"chosen read": width},
        state=spec.window * width if is_window else 0,
        moved={"new": 2 * heads * width},
        kind="core",
    )


def _index_scores(stage: IndexScores) -> Work:
    heads, width = int(stage.heads), int(stage.width)
    is_plain = stage.rate is None
    scores: Count = "square" if is_plain else "entry pairs"
    return Work(
        name=stage.name,
        part="attention",
        flops={"pairs": 2 * heads * (width + 1)} if is_plain else {"entry pairs": 2 * heads * width},
        cached={"total" if is_plain else "entries": width},
        moved={"new": heads * width, scores: 1},
    )


def _network(part: Part, formats: _Formats, ranks: int) -> Iterator[Work]:
    """The operators of one part of a layer's feed-forward network on one of the ranks."""
    has_experts = part.name == "experts"
    for stage in part.stages:
        if isinstance(stage, Linear):
            read = stage.parameters / (1 if has_experts else ranks / part.stored)
            sizes = f"{int(stage.in_features):,}·{int(stage.out_features):,}"
            work = Work(
                name=_NAMES.get(part.name, "") + stage.name,
                part="feed_forward",
                flops={"new": 2 * part.used * stage.in_features * stage.out_features / ranks},
                experts=(part.stored, part.used, ranks) if has_experts else None,
                moved={"new": part.used * (stage.in_features + stage.out_features) / ranks},
                kind="linear",
                formula=f"2·B·S·{sizes}{f'·{part.used}' if part.used > 1 else ''}{f'/{ranks}' if ranks > 1 else ''}",
            )
            yield _reading(work, held_stage(stage, formats.get(f"{part.name} {stage.name}")), read)


def expected_experts(stored: int, used: int, tokens: int) -> float:
    """How many of ``stored`` experts a batch reads, where each token uses ``used`` and all are as likely.

    For example ``expected_experts(8, 2, 1)`` is 2.0.
    """
    return stored * (1 - (1 - used / stored) ** tokens)
