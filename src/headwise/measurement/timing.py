"""Time several things side by side: interleaved, so that a noisy machine disturbs them alike; medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from headwise.progress import Progress, silent


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 20,
    warmup: int = 3,
    stage: str = "timing",
    progress: Progress = silent,
) -> dict[str, float]:
    """Median seconds of each call, taken in turn.

    Args:
        calls: what to time, by name.
        repeats: timed rounds; each round calls every one once.
        warmup: rounds before those.
        stage: what ``progress`` calls it.
        progress: told of each round.
    """
    for index in range(warmup):
        progress(stage, index, warmup + repeats)
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(repeats):
        progress(stage, warmup + index, warmup + repeats)
        for name, call in calls.items():
            _synchronise()
            start = time.perf_counter()
            call()
            _synchronise()
            times[name].append(time.perf_counter() - start)
    progress(stage, warmup + repeats, warmup + repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def matmul_flops_per_second(dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """What this machine reaches in a square matrix product: the limit to set beside a measured rate."""
    a, b = torch.rand(size, size).to(dtype), torch.rand(size, size).to(dtype)
    return 2 * size**3 / time_interleaved({"matmul": lambda: a @ b}, repeats=5, warmup=2)["matmul"]


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
