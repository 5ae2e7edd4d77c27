"""Measured latency of one attention layer, for any mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from headwise.base.progress import Progress, silent
from headwise.costs.formulas import Comparison
from headwise.measure.timing.timing import time_interleaved
from headwise.models.specs import AttentionSpec
from headwise.runtime.attention import AttentionCache, AttentionLayer, build


@dataclass(frozen=True)
class LayerTimes:
    """Median milliseconds of one layer: a decode step, and a prefill."""

    decode_ms: float
    prefill_ms: float


@torch.inference_mode()
def measure_layers(
    specs: Sequence[AttentionSpec],
    *,
    context: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    repeats: int = 10,
    progress: Progress = silent,
) -> list[LayerTimes]:
    """Time layers of several specs side by side, with random weights and cache.

    For example ``measure_layers([layer_spec("smollm2-135m")], context=512)[0].decode_ms``.

    Args:
        specs: the layers.
        context: T, tokens in the cache after a decode step of one token, and in the prefill.
        batch: B, sequences.
        dtype: of weights, activations and cache.
        repeats: timed rounds over all layers.
        progress: called at each round.

    Returns:
        The times of each layer, in the order of ``specs``.
    """
    layers = [build(spec).to(dtype).eval() for spec in specs]
    prompt = [torch.randn(batch, context, spec.hidden_size, dtype=dtype) for spec in specs]
    caches = [filled_cache(layer, batch, context, context) for layer in layers]

    def decode(i: int) -> None:
        caches[i].length = context - 1  # not by `crop`, which refuses a full window; the contents make no difference
        layers[i](prompt[i][:, :1], is_causal=True, cache=caches[i])

    def prefill(layer: AttentionLayer, states: torch.Tensor) -> None:
        layer(states, is_causal=True)

    decoding = time_interleaved(
        {str(i): partial(decode, i) for i in range(len(layers))},
        repeats=repeats,
        stage="decoding",
        progress=progress,
    )
    prefilling = time_interleaved(
        {str(i): partial(prefill, layers[i], prompt[i]) for i in range(len(layers))},
        repeats=max(repeats // 3, 3),
        warmup=1,
        stage="prefilling",
        progress=progress,
    )
    return [LayerTimes(decoding[str(i)] * 1e3, prefilling[str(i)] * 1e3) for i in range(len(layers))]


def filled_cache(layer: AttentionLayer, batch: int, length: int, max_length: int) -> AttentionCache:
    """A cache of a layer, filled with noise in the place of ``length`` tokens.

    For example ``filled_cache(build(layer_spec("llama-3-8b")), 1, 512, 513).length`` is 512.
    """
    cache = layer.new_cache(batch, max_length)
    for buffer in cache.buffers:
        buffer.normal_()
    cache.length = length
    return cache


def measure_comparison(
    comparison: Comparison, *, dtype: torch.dtype = torch.float32, progress: Progress = silent
) -> Comparison:
    """Measure one layer of every row of a comparison.

    For example ``measure_comparison(compare("smollm2-135m", context=512)).rows[0].decode_ms``.

    Args:
        comparison: a result of `headwise.compare`.
        dtype: of weights, activations and cache.
        progress: called at each round.

    Returns:
        The comparison with ``decode_ms`` and ``prefill_ms`` in its rows.
    """
    context, batch = comparison.context, comparison.batch
    times = measure_layers(comparison.specs, context=context, batch=batch, dtype=dtype, progress=progress)
    rows = tuple(
        replace(row, decode_ms=time.decode_ms, prefill_ms=time.prefill_ms)
        for row, time in zip(comparison.rows, times, strict=True)
    )
    return replace(comparison, rows=rows)
