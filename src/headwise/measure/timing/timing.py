"""Time several calls in turn, so that a noisy machine disturbs them alike, and take medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from headwise.base.progress import Progress, silent

_ENOUGH = 1e-3
"""Seconds that a sample should take, so that the clock's resolution and the loop do not matter."""

_LONG = 0.5
"""Seconds from which a call is long: it needs no warming up, and three samples instead of five."""


@dataclass(frozen=True)
class Spread:
    """Seconds of one call: the median, and the lower and upper quartile."""

    median: float
    low: float
    high: float
    samples: int


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 20,
    warmup: int = 3,
    stage: str = "timing",
    progress: Progress = silent,
) -> dict[str, float]:
    """Median seconds of each of several calls, which take turns.

    For example ``time_interleaved({"product": lambda: a @ b, "sum": lambda: a + b})["sum"]``.

    Args:
        calls: what to time, by name.
        repeats: timed rounds; each round makes every call once.
        warmup: rounds before those.
        stage: the name that ``progress`` is given.
        progress: called at each round.
    """
    for index in range(warmup):
        progress(stage, index, warmup + repeats)
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(repeats):
        progress(stage, warmup + index, warmup + repeats)
        for name, call in calls.items():
            times[name].append(seconds(call))
    progress(stage, warmup + repeats, warmup + repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def spread_interleaved(
    calls: Mapping[str, Callable[[], object]], *, budget: float = 2.0, least: int = 5, most: int = 25
) -> dict[str, Spread]:
    """Median and quartiles of each of several calls, within a budget of time; every round has a new random order.

    A call too short for the clock is repeated within each sample. One that takes more than its share of the budget
    stops when it has ``least`` samples (three, if it is longer than half a second), and the others go on.

    Args:
        calls: what to time, by name.
        budget: seconds for all of them together.
        least: samples of each, however long they take.
        most: the most samples of each.
    """
    within = {name: _warmed(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent, share = dict.fromkeys(calls, 0.0), budget / max(1, len(calls))
    names, order = list(calls), random.Random(0)
    for index in range(most):
        order.shuffle(names)  # so that no call always finds the processor's caches as the same other call left them
        for name in names:
            call = calls[name]
            needed = least if spent[name] < _LONG * index else min(least, 3)
            if index < needed or spent[name] < share:
                duration = seconds(call, within[name])
                spent[name] += duration * within[name]
                times[name].append(duration)
    return {name: _spread(values) for name, values in times.items()}


def _warmed(call: Callable[[], object]) -> int:
    """The number of repetitions of a call within a sample; timing the call for this also warms it up."""
    if seconds(call) > _LONG:
        return 1
    return max(1, min(200, round(_ENOUGH / max(seconds(call), 1e-7))))


def _spread(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Spread(median, low, high, len(values))


def seconds(call: Callable[[], object], times: int = 1) -> float:
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


def recorded(call: Callable[[], object], times: int) -> Callable[[], object]:
    """A call that replays a CUDA graph of so many calls, so that a GPU does not wait for Python between them.

    It holds the call that was recorded, and with it the tensors at whose addresses the graph reads.

    For example ``seconds(recorded(lambda: a @ b, 20)) / 20`` is the time of the product alone.

    Args:
        call: starts work on the current GPU, and neither waits for it nor reads its results.
        times: how many calls are recorded, one after another.

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
    return partial(_replayed, graph, call)


def _replayed(graph: torch.cuda.CUDAGraph, _: Callable[[], object]) -> None:
    graph.replay()


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
