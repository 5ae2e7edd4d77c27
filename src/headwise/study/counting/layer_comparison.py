"""One attention layer counted three ways: by its closed forms, by `headwise.count` and by other packages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.costs.formulas import forward_flops, parameters
from headwise.measure.timing.layer_latency import filled_cache
from headwise.models.specs import AttentionSpec, ModelSpec, layer_spec
from headwise.runtime.attention import AttentionLayer, build
from headwise.study.counting.module import count
from headwise.study.counting.other_counters import PeerCount, peer_counts


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """FLOPs and parameters of one call of a layer: by closed form, by `headwise.count` and by other counters.

    Attributes:
        label: the layer.
        new_tokens: S.
        total_tokens: T, those in the cache included.
        parameters: by closed form, which is the number the layer has.
        formula_flops: by closed form, all S·T pairs.
        counted_flops: by `headwise.count`, all pairs.
        causal_flops: by `headwise.count`, causal kernels charged for the pairs they compute.
        peers: the other counters' answers.
    """

    label: str
    new_tokens: int
    total_tokens: int
    parameters: int
    formula_flops: int
    counted_flops: int
    causal_flops: int
    peers: tuple[PeerCount, ...]

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON-able values, with each peer's FLOPs beside the number it printed."""
        return {**asdict(self), "peers": [{**asdict(peer), "flops": peer.flops} for peer in self.peers]}


@torch.inference_mode()
def count_layer(
    source: str | Path | ModelSpec | AttentionSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    index: int = 0,
) -> LayerCounts:
    """Build one layer with random float32 weights, run one causal call of it, and ask every counter.

    For example ``count_layer("smollm2-135m", 16).formula_flops`` is 28,901,376.

    Args:
        source: a layer's spec, or a model as `headwise.inspect` takes it.
        new_tokens: S; 1 for a decode step.
        total_tokens: T; S when None (prefill). T − S tokens are in the cache.
        index: which layer of a model.

    Raises:
        ArgumentError: a number is impossible, or there is no such source.
        SpecError: the architecture is not understood, or there is no such layer to run.
    """
    spec = layer_spec(source, index)
    total = new_tokens if total_tokens is None else total_tokens
    formula = forward_flops(spec, new_tokens, total, causal=False)
    layer = build(spec)
    states, kwargs = _call(layer, new_tokens, total)
    counted = count(layer, states, **kwargs)
    states, kwargs = _call(layer, new_tokens, total)
    return LayerCounts(
        label=spec.label,
        new_tokens=new_tokens,
        total_tokens=total,
        parameters=parameters(spec),
        formula_flops=formula,
        counted_flops=counted.forward_flops,
        causal_flops=counted.causal_flops,
        peers=tuple(peer_counts(layer, states, **kwargs)),
    )


def _call(layer: AttentionLayer, new_tokens: int, total_tokens: int) -> tuple[torch.Tensor, dict[str, Any]]:
    states = torch.randn(1, new_tokens, layer.spec.hidden_size)
    kwargs: dict[str, Any] = {"is_causal": layer.spec.is_causal}
    if total_tokens > new_tokens:
        kwargs["cache"] = filled_cache(layer, 1, total_tokens - new_tokens, total_tokens)
    return states, kwargs
