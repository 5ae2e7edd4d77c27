"""Time several calls in turn and take medians; the latency of one attention layer, for any mechanism.

Calls are timed in turn, so that a noisy machine disturbs them alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from headwise.base.progress import Progress, silent
from headwise.costs.formulas import Comparison
from headwise.models.specs import AttentionSpec
from headwise.runtime.attention import AttentionCache, AttentionLayer, build

Timeable = Callable[[], object]
"""A call that is timed; what it returns does not matter."""

_ENOUGH = 1e-3
"""Seconds that a sample should take, so that the clock's resolution and the loop do not matter."""

_LONG = 0.5
"""A call that takes so many seconds is long: it needs no warming up, and three samples instead of five."""


@dataclass(frozen=True)
class Spread:
    """Seconds of one call: the median, and the lower and upper quartile."""

    median: float
    low: float
    high: float
    samples: int


def time_interleaved(
    calls: Mapping[str, Timeable],
    *,
    repeats: int = 20,
    warmup: int = 3,
    stage: str = "timing",
    progress: Progress = silent,
) -> dict[str, float]:
    """Median seconds of each of several calls, which take turns.

    For example ``time_interleaved({"product": lambda: a @ b, "sum": lambda: a + b})["sum"]``.

    Args:
        calls: the functions to time, by name.
        repeats: the number of timed rounds; each round makes every call once.
        warmup: the number of rounds before those, which are not timed.
        stage: the name that ``progress`` is given.
        progress: the callback that reports each round.
    """
    for index in range(warmup):
        progress(stage, index, warmup + repeats)
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(repeats):
        progress(stage, warmup + index, warmup + repeats)
        for name, call in calls.items():
            times[name].append(time_call(call))
    progress(stage, warmup + repeats, warmup + repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def spread_interleaved(
    calls: Mapping[str, Timeable], *, budget: float = 2.0, least: int = 5, most: int = 25
) -> dict[str, Spread]:
    """Median and quartiles of each of several calls, within a budget of time; every round has a new random order.

    A call too short for the clock is repeated within each sample. One that takes more than its share of the budget
    stops when it has ``least`` samples (three, if it is longer than half a second), and the others go on.

    Args:
        calls: the functions to time, by name.
        budget: the seconds for all calls together.
        least: the least number of samples of each call, however long they take.
        most: the most samples of each call.
    """
    within = {name: _find_repetitions(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent, share = dict.fromkeys(calls, 0.0), budget / max(1, len(calls))
    names, order = list(calls), random.Random(0)
    for index in range(most):
        order.shuffle(names)  # so that no call always finds the processor's caches as the same other call left them
        for name in names:
            call = calls[name]
            needed = least if spent[name] < _LONG * index else min(least, 3)
            if index < needed or spent[name] < share:
                duration = time_call(call, within[name])
                spent[name] += duration * within[name]
                times[name].append(duration)
    return {name: _quartiles(values) for name, values in times.items()}


def _find_repetitions(call: Timeable) -> int:
    """The number of repetitions of a call within a sample; timing the call for this also warms it up."""
    if time_call(call) > _LONG:
        return 1
    return max(1, min(200, round(_ENOUGH / max(time_call(call), 1e-7))))


def _quartiles(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Spread(median, low, high, len(values))


def time_call(call: Timeable, times: int = 1) -> float:
    """Seconds that one call takes, on average over ``times`` in a row."""
    _synchronise()
    start = time.perf_counter()
    for _ in range(times):
        call()
    _synchronise()
    return (time.perf_counter() - start) / times


def matmul_flops_per_second(dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """FLOPs a second that this machine reaches in a square matrix product: the limit to compare a rate with.

    For example ``matmul_flops_per_second(torch.bfloat16)``.
    """
    a, b = torch.rand(size, size).to(dtype), torch.rand(size, size).to(dtype)
    return 2 * size**3 / time_interleaved({"matmul": lambda: a @ b}, repeats=5, warmup=2)["matmul"]


def record_graph(call: Timeable, times: int) -> Timeable:
    """A call that replays a CUDA graph of ``times`` calls, so that a GPU does not wait for Python between them.

    It holds the call that was recorded, and with it the tensors at whose addresses the graph reads.

    For example ``time_call(record_graph(lambda: a @ b, 20)) / 20`` is the time of the product alone.

    Args:
        call: a function that starts work on the current GPU, and neither waits for it nor reads its results.
        times: the number of calls that are recorded, one after another.

    Raises:
        RuntimeError: the call cannot be recorded.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles kernels and allocates memory, which cannot be recorded
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, _: Timeable) -> None:
    graph.replay()


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
        specs: the specs of the layers.
        context: T, tokens in the cache after a decode step of one token, and in the prefill.
        batch: B, the number of sequences.
        dtype: the dtype of weights, activations and cache.
        repeats: the number of timed rounds over all layers.
        progress: the callback that reports each round.

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
        {str(i): partial(decode, i) for i in range(len(layers))}, repeats=repeats, stage="decoding", progress=progress
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
        dtype: the dtype of weights, activations and cache.
        progress: the callback that reports each round.

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
