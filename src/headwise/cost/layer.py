"""Parameters, FLOPs, cache and intensity of one attention layer, as closed forms over its spec.

One multiply-add is 2 FLOPs. Symbols: B batch, S new tokens, T all key–value tokens including the new ones.
"""

from __future__ import annotations

from typing import Protocol, cast

from headwise.cost.stages import Core, Linear, Stage, attended_pairs
from headwise.errors import ArgumentError, SpecError
from headwise.specs.base import AttentionSpec, mechanism_module

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


class Formulas(Protocol):
    """What ``headwise.cost.<kind>`` provides for a mechanism."""

    IMPLS: tuple[str, ...]

    def stages(self, spec: AttentionSpec, impl: str) -> tuple[Stage, ...]:
        """The work of one layer, in order."""

    def best_impl(self, spec: AttentionSpec, new_tokens: int, total_tokens: int) -> str:
        """The implementation with the fewest FLOPs."""

    def cache_values(self, spec: AttentionSpec) -> int:
        """Values cached for one token."""


def formulas(spec: AttentionSpec) -> Formulas:
    """The module of formulas for a spec's mechanism."""
    return cast(Formulas, mechanism_module("cost", spec.kind))


def dtype_bytes(dtype: str) -> int:
    """Bytes of one value of a dtype named as torch names it.

    Raises:
        ArgumentError: the name is not known.
    """
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ArgumentError("dtype", dtype, f"must be one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def stages(spec: AttentionSpec, impl: str | None = None) -> tuple[Stage, ...]:
    """The stages of a layer under an implementation (the mechanism's first when None)."""
    module = formulas(spec)
    return module.stages(spec, impl or module.IMPLS[0])


def parameters(spec: AttentionSpec) -> int:
    """Learned numbers in one layer: weights, biases, norms."""
    return sum(stage.parameters for stage in stages(spec))


def forward_flops(
    spec: AttentionSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    batch: int = 1,
    causal: bool | None = None,
    impl: str = "auto",
) -> int:
    """FLOPs of one forward pass of one layer, matrix products only.

    Args:
        spec: the layer.
        new_tokens: S, tokens passed in; 1 for a decode step.
        total_tokens: T, tokens attended to, S of them new; S when None (prefill).
        batch: B.
        causal: count only the pairs the causal mask (and the window) leaves; False counts all S·T, as kernels
            that do not skip would; None is what the spec says.
        impl: one of the mechanism's implementations, or ``auto`` for the one with the fewest FLOPs.
    """
    S, T = new_tokens, new_tokens if total_tokens is None else total_tokens
    if S < 1 or T < S:
        raise ArgumentError("new_tokens, total_tokens", (S, T), "must satisfy 1 <= new_tokens <= total_tokens")
    module = formulas(spec)
    if impl == "auto":
        impl = module.best_impl(spec, S, T)
    causal = spec.is_causal if causal is None else causal
    pairs = attended_pairs(S, T, causal=causal, window=spec.sliding_window)
    macs = 0
    for stage in module.stages(spec, impl):
        if isinstance(stage, Core):
            macs += batch * pairs * stage.macs_per_pair()
        else:
            macs += stage.macs(batch, S, T)
    return 2 * macs


def thop_count(spec: AttentionSpec, tokens: int, *, batch: int = 1) -> int:
    """What thop prints as "FLOPs": multiply-adds of the linear layers alone, the scores left out."""
    return sum(s.macs(batch, tokens, tokens) for s in stages(spec) if isinstance(s, Linear))


def cache_bytes_per_token(spec: AttentionSpec, dtype: str = "bfloat16") -> int:
    """Bytes one more token adds to the cache of one layer, while it still grows; 0 for an encoder."""
    return formulas(spec).cache_values(spec) * dtype_bytes(dtype) if spec.is_causal else 0


def cache_bytes(spec: AttentionSpec, tokens: int, *, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of one layer's cache at a context of ``tokens``; a sliding window holds no more than its width."""
    held = tokens if spec.sliding_window is None else min(tokens, spec.sliding_window)
    return batch * held * cache_bytes_per_token(spec, dtype) + state_bytes(spec, batch=batch, dtype=dtype)


def state_bytes(spec: AttentionSpec, *, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of one layer's cache that no token adds to: 0 but for the mechanisms that say ``state_values``."""
    values = getattr(formulas(spec), "state_values", None)
    return 0 if values is None else batch * int(values(spec)) * dtype_bytes(dtype)


def decode_intensity(spec: AttentionSpec, *, dtype: str = "bfloat16", new_tokens: int = 1) -> float:
    """FLOPs for each byte of cache read, in the limit of a long cache; the best implementation's.

    GQA ``2(H/K)S/e``; MLA absorbed ``2HS(2R+P)/((R+P)e)``, with e bytes a value.
    """
    module = formulas(spec)
    if not module.cache_values(spec):
        raise SpecError("attention", spec.label, "caches nothing that grows, so it has no intensity there")
    impl = module.best_impl(spec, new_tokens, 1_000_000 * new_tokens)
    macs = 0  # for each token of the cache: its pairs, and its decoding where the latent is expanded
    for stage in module.stages(spec, impl):
        if isinstance(stage, Core):
            macs += new_tokens * stage.macs_per_pair()
        elif isinstance(stage, Linear) and stage.over == "total":
            macs += stage.macs(1, new_tokens, 1)
    return 2 * macs / (module.cache_values(spec) * dtype_bytes(dtype))
