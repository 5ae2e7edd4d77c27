"""The pace of a machine that other programs share: two calls of known time, timed again beside every measurement.

The same call takes a tenth or a third longer at one minute than at another where other programs use the memory or the
processor. Two calls, the yardsticks, are therefore timed beside each measurement: one reads memory, the other
computes large products. The measurement is divided by the pace, the geometric mean of the yardsticks' times over
those of a reference. The mean follows models of every size better than either yardstick alone. A third one that reads
the processor's caches does not help: its time depends on the calls just before.

On a GPU a call is recorded as a CUDA graph and replayed, as serving engines do it: otherwise the GPU would wait for
Python, and all mechanisms would take equally long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from headwise.measure.timing.timing import Timeable, record_graph, time_call
from headwise.runtime.hf.linears import take_over_linears

HERE = torch.device("cpu")
"""The device that is measured where none is named."""

READING = 96 << 20
"""Bytes of the projections of the reading yardstick, which take turns: more than the processor's caches hold."""

_WEIGHTS = 1 << 22
"""The number of weights of each such projection: enough for several threads."""

PRODUCTS = (128, 1 << 21)
"""Tokens and weights of the projection of the other yardstick, whose time is that of arithmetic."""

_ENOUGH = 1e-3
"""Seconds that a replay should take, so that starting it does not matter."""

_FEW, _MOST = 4, 400
"""Calls that are recorded together at least and at most."""

_LONG = 0.02
"""Seconds of a call so long that what it read first is no longer in the processor's caches at its end."""

_ROUNDS = 3
"""The number of rounds of calls that are measured together, with the yardsticks between them."""

_OFTEN = 0.5
"""Seconds between yardsticks."""

_YARDSTICKS = 3
"""The number of times that each yardstick is timed between two rounds."""


class Pace:
    """Measures calls beside yardsticks.

    For example ``Pace(torch.float32).medians([lambda: a @ b])``.

    Args:
        dtype: the dtype of the yardsticks.
        reference: the yardsticks' seconds at the pace that all times are converted to; those of now when None.
        device: the device that calls run on, see `repeat_for_clock`.

    Attributes:
        reference: the yardsticks' seconds at the pace that all times are converted to.
    """

    def __init__(
        self, dtype: torch.dtype, reference: Sequence[float] | None = None, device: torch.device = HERE
    ) -> None:
        self.device = device
        copies = max(READING // (_WEIGHTS * dtype.itemsize), 1)
        yardsticks = [
            project_in_turn(dtype, 1, _WEIGHTS, copies, device),
            project_in_turn(dtype, *PRODUCTS, 1, device),
        ]
        with on_device(device):
            self._calls = [repeat_for_clock(call, device) for call in yardsticks]
            now = tuple(_median_seconds(*call, 7, 0.0) for call in self._calls)
        self.reference = now if reference is None else tuple(reference)

    def medians(self, calls: Sequence[Timeable], *, least: int = 5, patience: float = 0.05) -> list[float]:
        """Median seconds of each call, at the reference's pace; see `measure`."""
        found = self.measure(calls, least=least, patience=patience)
        return [measured / pace for measured, pace in found]

    def measure(
        self, calls: Sequence[Timeable], *, least: int = 5, patience: float = 0.05
    ) -> list[tuple[float, float]]:
        """Measure calls in turns, so that what slows one of them down slows the others as well.

        There are three rounds; in each a call is made once before it is timed, to have the processor's caches back,
        unless it is so long that this does not matter. The yardsticks are measured at the ends of the rounds and, in
        long ones, between.

        Args:
            calls: any number. The more there are, the further apart their rounds: what disturbs one does not count.
            least: the least number of times that each is timed, in all rounds together.
            patience: seconds that each is timed for, in all rounds together.

        Returns:
            For each call, the median seconds in one round, and the time of the yardsticks around that round over
            their reference. The round is the one whose quotient of both is the median.
        """
        found: list[list[tuple[float, int]]] = [[] for _ in calls]
        with torch.inference_mode(), on_device(self.device):
            runs = [repeat_for_clock(call, self.device) for call in calls]
            yardsticks, latest = [self._now()], time.perf_counter()
            for _ in range(_ROUNDS):
                for index, run in enumerate(runs):
                    if time.perf_counter() - latest > _OFTEN:
                        yardsticks.append(self._now())
                        latest = time.perf_counter()
                    seconds = _median_seconds(*run, -(-least // _ROUNDS), patience / _ROUNDS)
                    found[index].append((seconds, len(yardsticks)))
                yardsticks.append(self._now())
                latest = time.perf_counter()
        paces = [statistics.geometric_mean(pair) for pair in pairwise(yardsticks)]
        medians = []
        for times in found:
            rounds = [(seconds, paces[after - 1]) for seconds, after in times]
            medians.append(sorted(rounds, key=lambda each: each[0] / each[1])[_ROUNDS // 2])
        return medians

    def _now(self) -> float:
        """The time of the yardsticks now over that of the reference, in the geometric mean."""
        ratios = []
        for (call, count), before in zip(self._calls, self.reference, strict=True):
            ratios.append(_median_seconds(call, count, _YARDSTICKS, 0.0) / before)
        return statistics.geometric_mean(ratios)


def _median_seconds(run: Timeable, count: int, least: int, patience: float) -> float:
    """Median seconds of a call; its first run, which brings what it reads back into the processor's caches, counts if
    it takes so long that this does not matter."""
    first = _seconds_a_call(run, count)
    times = [first] if first * count > _LONG else []
    until = time.perf_counter() + patience
    while len(times) < least or (time.perf_counter() < until and len(times) < 15 * least):
        times.append(_seconds_a_call(run, count))
    return statistics.median(times)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch waits for and records on a GPU; for a processor, one that does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def repeat_for_clock(call: Timeable, device: torch.device) -> tuple[Timeable, int]:
    """A call that repeats another often enough for the clock, and the number of repetitions.

    On a GPU it replays a CUDA graph.

    For example ``repeat_for_clock(lambda: a @ b, torch.device("cuda"))``.

    Raises:
        RuntimeError: the call cannot be recorded, as one that waits for the GPU.
    """
    if device.type != "cuda":
        return call, 1
    few = record_graph(call, _FEW)
    few()
    count = max(_FEW, min(round(_FEW * _ENOUGH / time_call(few)), _MOST))
    del few  # its memory is needed for the next graph
    return record_graph(call, count), count


def _seconds_a_call(call: Timeable, count: int) -> float:
    """Seconds of one call, where a function makes ``count`` of them."""
    return time_call(call) / count


def project_in_turn(
    dtype: torch.dtype, tokens: int, weights: int, copies: int, device: torch.device = HERE
) -> Timeable:
    """A call of ``copies`` projections one after another, each of ``weights`` weights."""
    return pass_through(equal_projections(dtype, weights, copies, device), tokens)


def equal_projections(dtype: torch.dtype, weights: int, copies: int, device: torch.device = HERE) -> nn.ModuleList:
    """``copies`` equal projections of ``weights`` weights each."""
    width = 1 << ((weights.bit_length() - 1) // 2)
    one = nn.Linear(width, weights // width, bias=False, device=device, dtype=dtype)
    layers = nn.ModuleList([one, *(deepcopy(one) for _ in range(copies - 1))])  # drawing each would take long
    take_over_linears(layers)
    return layers


def pass_through(layers: Iterable[nn.Module], tokens: int) -> Timeable:
    """A call that passes ``tokens`` tokens through each of several equal projections."""
    found = list(layers)
    weight = found[0].weight
    assert isinstance(weight, torch.Tensor)
    states = torch.randn(1, tokens, weight.shape[1], device=weight.device).to(weight.dtype)
    return make_in_turn([partial(layer, states) for layer in found])


def make_in_turn(calls: Sequence[Timeable]) -> Timeable:
    """One call that makes several others, one after another."""

    @torch.inference_mode()
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them
