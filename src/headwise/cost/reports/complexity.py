"""Time and space of one attention layer, stage by stage: every number beside the formula it is the value of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.cost import layer
from headwise.cost.activations import kept_values, kept_width
from headwise.cost.latent import expanded_cache_values
from headwise.cost.size import Size
from headwise.cost.stages import Core, Kernel, check_kernel
from headwise.cost.training import kept_activations
from headwise.errors import SpecError
from headwise.specs.base import AttentionSpec
from headwise.specs.latent import LatentSpec
from headwise.specs.model import ModelSpec
from headwise.specs.sources import layer_spec

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
}


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
        label: the layer.
        impl: the implementation the stages are of.
        kernel: one of `headwise.cost.KERNELS`.
        dtype: of weights, activations and cache.
        symbols: the letters of the formulas and their values.
        stages: in order.
        softmax_flops: elementwise, not among the stages' products.
        forward_flops: of all stages.
        backward_flops: of all stages.
        parameters: of all stages.
        cache_bytes_per_token: what one token adds to the cache.
        cache_bytes: of all tokens, or those a window holds.
        activations: what a training step keeps for its backward pass, in bytes, by tensor; none where T is not S, or
            where headwise has no layer that would tell.
        activation_bytes: all of that, or None.
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
        """As JSON-able values."""
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
        new_tokens: S.
        total_tokens: T; S when None.
        index: which layer of a model.
        batch: B.
        causal: as `headwise.cost.forward_flops`.
        impl: as `headwise.cost.forward_flops`.
        kernel: one of `headwise.cost.KERNELS`.
        dtype: of weights, activations and cache.

    Raises:
        ArgumentError: a number is impossible, a name is not known, or there is no such source.
        SpecError: the architecture is not understood.
    """
    spec = layer_spec(source, index)
    call = layer.call_of(spec, new_tokens, total_tokens, batch=batch, causal=causal)
    check_kernel(kernel)
    impl = layer.chosen_impl(spec, impl, call)
    work = layer.stages(spec, impl, new_tokens=new_tokens)
    size = Size(layer.dtype_bytes(dtype), "e")
    kept_bytes = {}
    if call.total is call.new:
        try:
            kept, _ = kept_activations(
                spec, new_tokens, batch=batch, dtype=dtype, causal=causal, impl=impl, kernel=kernel
            )
        except SpecError:  # a layer that is inspected and not run here
            kept = ()
        kept_bytes = {
            tensor.name: kept_values(tensor, batch=call.batch, new=call.new, total=call.total)
            * (size if (width := kept_width(tensor, size)) == size else width)
            for tensor in kept
        }
    costs = [
        (stage, stage.forward_flops(call, kernel), stage.backward_flops(call, kernel, input_gradient=True))
        for stage in work
    ]
    per_token = _cached(spec, impl) * size
    held = layer.held_tokens(spec, new_tokens if total_tokens is None else total_tokens)
    softmax = sum((stage.softmax_flops(call) for stage in work if isinstance(stage, Core)), Size(0))
    symbols: dict[str, int] = {}
    for amount in (*(flops for _, flops, _ in costs), *kept_bytes.values(), per_token):
        symbols |= amount.symbols
    return Complexity(
        label=spec.label,
        impl=impl,
        kernel=kernel,
        dtype=dtype.removeprefix("torch."),
        symbols={name: symbols[name] for name in (*SYMBOLS, "e") if name in symbols},
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
        cache_bytes=batch * held * int(per_token) + layer.state_bytes(spec, batch=batch, dtype=dtype),
        activations={name: _amount(amount) for name, amount in kept_bytes.items() if amount},
        activation_bytes=sum(int(amount) for amount in kept_bytes.values()) if kept_bytes else None,
    )


def _cached(spec: AttentionSpec, impl: str) -> Size:
    """Values a token adds to the cache: none in an encoder, every head's where an MLA layer caches them decoded."""
    if not spec.is_causal:
        return Size(0)
    if isinstance(spec, LatentSpec) and impl == "cached_kv":
        return expanded_cache_values(spec)
    return layer.formulas(spec).cache_values(spec)


def _amount(value: int) -> Amount:
    return Amount(value=int(value), formula=value.formula if isinstance(value, Size) else str(value))
