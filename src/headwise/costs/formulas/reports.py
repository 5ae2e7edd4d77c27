"""Two reports without weights: `inspect` of a model and its costs, and `complexity` of one layer by stage."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.costs.formulas import layer, model
from headwise.costs.formulas.latent import expanded_cache_values
from headwise.costs.formulas.stages import Core, Kernel, Size, check_kernel
from headwise.errors import SpecError
from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpec, layer_spec, read_spec
from headwise.models.specs.model import BodySpec, FeedForwardSpec, ModelSpec


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

    def common(values: Iterable[int | None]) -> int | None:
        found = set(values)
        return found.pop() if len(found) == 1 else None

    def head_dim(one: AttentionSpec) -> int | None:
        return one.qk_head_dim if isinstance(one, LatentSpec) else getattr(one, "head_dim", None)

    def v_head_dim(one: AttentionSpec) -> int | None:
        return one.value_dim if isinstance(one, GroupedSpec) else getattr(one, "v_head_dim", None)

    names = ("num_heads", "num_kv_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    return {
        **{name: common(getattr(one, name, None) for one in spec.layers) for name in names},
        "head_dim": common(map(head_dim, spec.layers)),
        "v_head_dim": common(map(v_head_dim, spec.layers)),
        "attention_parameters_per_layer": common(map(layer.parameters, spec.layers)),
    }


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


SYMBOLS = {
    "B": "sequences",
    "S": "new tokens",
    "T": "tokens attended to",
    "E": "hidden size",
    "H": "heads",
    "K": "key–value heads",
    "D": "head dim",
    "V": "value head dim",
    "R": "latent width",
    "Q": "query latent width",
    "N": "content dims of a head",
    "P": "rotated dims",
    "C": "width of a latent head",
    "X": "experts",
    "R/H": "latent width of a head",
    "M": "numbers of state a value",
    "Δ": "rank of the time step",
    "w": "sliding window",
    "c": "tokens of the same chunk before the new ones",
    "in chunks": "pairs of a query and a token of its chunk",
    "selected": "pairs of a query and a token that is selected, or in its window",
    "I": "heads of the indexer",
    "J": "width of an indexer's head",
    "G": "groups of heads",
    "O": "width of a group's output",
    "m": "tokens of an entry",
    "entries": "pairs of a query and an entry",
    "chosen": "pairs of a query and an entry that is chosen",
}
"""The letters of formulas, and what they stand for."""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A number and its formula in the letters of `SYMBOLS`."""

    value: int
    formula: str


@dataclass(frozen=True)
class StageCost:
    """One stage of a layer: its parameters, and its FLOPs forward and backward."""

    name: str
    parameters: Amount
    forward_flops: Amount
    backward_flops: Amount


@dataclass(frozen=True, kw_only=True)
class Complexity:
    """A layer's time and space by stage, for one call.

    Attributes:
        label: the layer's mechanism and sizes.
        impl: the implementation whose stages these are.
        kernel: one of `headwise.cost.KERNELS`.
        dtype: the dtype of weights, activations and cache.
        symbols: the letters of the formulas and their values.
        stages: the stages, in the order in which they run.
        softmax_flops: elementwise FLOPs of the softmax, which the FLOPs of the stages leave out.
        forward_flops: FLOPs of the forward pass, the sum over the stages.
        backward_flops: FLOPs of the backward pass, the sum over the stages.
        parameters: learned parameters, the sum over the stages.
        cache_bytes_per_token: bytes that one token adds to the cache.
        cache_bytes: bytes of the cache of all tokens, or of those that a window holds.
        activations: bytes that a training step keeps for its backward pass, by tensor; empty where T is not S, or
            where headwise has no such layer.
        activation_bytes: the sum of ``activations``; None where that is empty.
    """

    label: str
    impl: str
    kernel: str
    dtype: str
    symbols: dict[str, int]
    stages: tuple[StageCost, ...]
    softmax_flops: Amount
    forward_flops: int
    backward_flops: int
    parameters: int
    cache_bytes_per_token: Amount
    cache_bytes: int
    activations: dict[str, Amount]
    activation_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return asdict(self)


def complexity(
    source: str | Path | ModelSpec | AttentionSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    index: int = 0,
    batch: int = 1,
    causal: bool | None = None,
    impl: str = "auto",
    kernel: Kernel = "fused",
    dtype: str = "bfloat16",
) -> Complexity:
    """Time and space of one layer by stage, as formulas and as numbers.

    Args:
        source: a layer's spec, or a model as `headwise.inspect` takes it.
        new_tokens: S, tokens passed in; 1 for a decode step.
        total_tokens: T, tokens attended to; S when None.
        index: the layer's number in a model, from 0.
        batch: B, the number of sequences.
        causal: True counts only the pairs that the causal mask leaves, False all; see
            `headwise.cost.forward_flops`.
        impl: the implementation, see `headwise.cost.forward_flops`.
        kernel: one of `headwise.cost.KERNELS`.
        dtype: the dtype of weights, activations and cache.

    Raises:
        ArgumentError: a number is impossible, a name is not known, or the source does not exist.
        SpecError: the architecture is not understood.

    >>> headwise.complexity("llama-3-8b", 1, 8192).cache_bytes_per_token.formula
    '2·K·D·e'
    """
    spec = layer_spec(source, index)
    call = layer.call_of(spec, new_tokens, total_tokens, batch=batch, causal=causal)
    check_kernel(kernel)
    impl = layer.chosen_impl(spec, impl, call)
    work = layer.stages(spec, impl, new_tokens=new_tokens)
    value_bytes = Size(layer.dtype_bytes(dtype), "e")
    kept_bytes: dict[str, Size] = {}
    if call.total is call.new:
        with suppress(SpecError):  # headwise inspects such layers and does not run them
            kept = layer.kept_activations(
                spec, call, cross=False, dtype=dtype, causal=causal, impl=impl, kernel=kernel
            )
            kept_bytes = {tensor.name: tensor.nbytes(call, value_bytes) for tensor in kept}
    forward = [stage.forward_flops(call, kernel) for stage in work]
    backward = [stage.backward_flops(call, kernel, input_gradient=True) for stage in work]
    per_token = _cached_values(spec, impl) * value_bytes
    cached_tokens = layer.held_tokens(spec, new_tokens if total_tokens is None else total_tokens)
    softmax = sum((stage.softmax_flops(call) for stage in work if isinstance(stage, Core)), Size(0))
    return Complexity(
        label=spec.label,
        impl=impl,
        kernel=kernel,
        dtype=dtype.removeprefix("torch."),
        symbols=_symbols(*forward, *kept_bytes.values(), per_token),
        stages=tuple(
            StageCost(stage.name, _amount(stage.parameters), _amount(one), _amount(other))
            for stage, one, other in zip(work, forward, backward, strict=True)
            if stage.parameters or one
        ),
        softmax_flops=_amount(softmax),
        forward_flops=sum(map(int, forward)),
        backward_flops=sum(map(int, backward)),
        parameters=sum(int(stage.parameters) for stage in work),
        cache_bytes_per_token=_amount(per_token),
        cache_bytes=batch * cached_tokens * int(per_token) + layer.state_bytes(spec, batch=batch, dtype=dtype),
        activations={name: _amount(amount) for name, amount in kept_bytes.items() if amount},
        activation_bytes=sum(int(amount) for amount in kept_bytes.values()) if kept_bytes else None,
    )


def _symbols(*amounts: Size) -> dict[str, int]:
    """The letters of some formulas and their values, in the order of `SYMBOLS`."""
    values: dict[str, int] = {}
    for amount in amounts:
        values |= amount.symbols
    return {name: values[name] for name in (*SYMBOLS, "e") if name in values}


def _cached_values(spec: AttentionSpec, impl: str) -> Size:
    """Values that a token adds to the cache: none in an encoder, every head's where MLA caches decoded keys."""
    if not spec.is_causal:
        return Size(0)
    if isinstance(spec, LatentSpec) and impl == "cached_kv":
        return expanded_cache_values(spec)
    return layer.formulas(spec).cache_values(spec)


def _amount(value: int) -> Amount:
    return Amount(value=int(value), formula=value.formula if isinstance(value, Size) else str(value))
