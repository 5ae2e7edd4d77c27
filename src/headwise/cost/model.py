"""Costs of a whole stack of attention layers: sums over `headwise.cost.layer`."""

from __future__ import annotations

from headwise.cost import layer
from headwise.specs.model import ModelSpec


def parameters(model: ModelSpec) -> int:
    """Attention parameters of all layers."""
    return sum(layer.parameters(spec) for spec in model.layers)


def cache_bytes_per_token(model: ModelSpec, dtype: str = "bfloat16") -> int:
    """Bytes one more token adds to the cache of all layers, while every layer's still grows."""
    return sum(layer.cache_bytes_per_token(spec, dtype) for spec in model.layers)


def cache_bytes(model: ModelSpec, tokens: int, *, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of the whole cache at a context of ``tokens``."""
    return sum(layer.cache_bytes(spec, tokens, batch=batch, dtype=dtype) for spec in model.layers)


def forward_flops(
    model: ModelSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    batch: int = 1,
    causal: bool | None = None,
    impl: str = "auto",
) -> int:
    """FLOPs of one forward pass through every attention layer (not the MLPs or the head)."""
    return sum(
        layer.forward_flops(spec, new_tokens, total_tokens, batch=batch, causal=causal, impl=impl)
        for spec in model.layers
    )
