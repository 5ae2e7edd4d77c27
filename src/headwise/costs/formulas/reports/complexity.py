"""`complexity`: time and space of one attention layer by stage, each number with its formula."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.costs.formulas import layer
from headwise.costs.formulas.latent import expanded_cache_values
from headwise.costs.formulas.size import Size
from headwise.costs.formulas.stages import Core, Kernel, check_kernel
from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.latent import LatentSpec
from headwise.models.specs.model import ModelSpec
from headwise.models.specs.sources import layer_spec

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


@dataclass(frozen=True, kw_only=True)
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
            kept = layer.kept_activations(spec, call, dtype=dtype, causal=causal, impl=impl, kernel=kernel)
            kept_bytes = {tensor.name: tensor.nbytes(call, value_bytes) for tensor in kept}
    costs = [
        (stage, stage.forward_flops(call, kernel), stage.backward_flops(call, kernel, input_gradient=True))
        for stage in work
    ]
    per_token = _cached_values(spec, impl) * value_bytes
    cached_tokens = layer.held_tokens(spec, new_tokens if total_tokens is None else total_tokens)
    softmax = sum((stage.softmax_flops(call) for stage in work if isinstance(stage, Core)), Size(0))
    return Complexity(
        label=spec.label,
        impl=impl,
        kernel=kernel,
        dtype=dtype.removeprefix("torch."),
        symbols=_symbols(*(flops for _, flops, _ in costs), *kept_bytes.values(), per_token),
        stages=tuple(
            StageCost(
                name=stage.name,
                parameters=_amount(stage.parameters),
                forward_flops=_amount(forward),
                backward_flops=_amount(backward),
            )
            for stage, forward, backward in costs
            if stage.parameters or forward
        ),
        softmax_flops=_amount(softmax),
        forward_flops=sum(int(forward) for _, forward, _ in costs),
        backward_flops=sum(int(backward) for _, _, backward in costs),
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
