"""The pace of a machine that others share: three calls whose time is known, measured again beside every measurement.

The same call takes a tenth or a third longer at one minute than at another where other programs use the memory or the
processor. What is measured is therefore divided by what a call of the same kind takes at that moment.

On a GPU a call is recorded as a CUDA graph and replayed, as engines that serve models do it: otherwise the GPU would
wait for Python, and all mechanisms would take equally long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Literal

import torch
from torch import nn

from headwise.hf.linear import take_over_linears
from headwise.measurement.timing import recorded, seconds

HERE = torch.device("cpu")
"""The device that is measured where none is named."""

Bound = Literal["caches", "memory", "products"]
"""What a call is bounded by: reading what the processor's caches hold, or memory; or the processor's products."""

READING = {"caches": 20 << 20, "memory": 160 << 20}
"""Bytes of the projections of one token that take turns, by what they are bounded by."""

_WEIGHTS = 1 << 22
"""Weights of each: enough for several threads."""

_BETWEEN = 56 << 20
"""Bytes from which a call is bounded by memory."""

PRODUCTS = (256, 1 << 21)
"""Tokens, and weights of a projection: bounded by the processor."""

_ENOUGH = 1e-3
"""Seconds that a replay should take, so that starting it does not matter."""

_FEW, _MOST = 4, 400
"""Calls that are recorded together at least and at most."""

_ROUNDS = 3
"""The least number of turns of a call and its yardstick."""


class Pace:
    """Measures calls beside yardsticks.

    For example ``Pace(torch.float32).median(lambda: a @ b, "products")``.

    Args:
        dtype: of the yardsticks.
        reference: their seconds at the pace that times are given at; those of now when None.
        device: that calls run on; see `repeated`.
    """

    def __init__(
        self, dtype: torch.dtype, reference: Sequence[float] | None = None, device: torch.device = HERE
    ) -> None:
        self.device = device
        copies = {name: max(read // (_WEIGHTS * dtype.itemsize), 1) for name, read in READING.items()}
        yardsticks: dict[Bound, Callable[[], object]] = {
            "caches": projections(dtype, 1, _WEIGHTS, copies["caches"], device),
            "memory": projections(dtype, 1, _WEIGHTS, copies["memory"], device),
            "products": projections(dtype, *PRODUCTS, 2, device),
        }
        with chosen(device):
            for call in yardsticks.values():
                call()
            self._calls = {name: repeated(call, device) for name, call in yardsticks.items()}
            now = tuple(statistics.median(_seconds(*call) for _ in range(7)) for call in self._calls.values())
        self._reference: dict[Bound, float] = dict(zip(self._calls, reference or now, strict=True))

    @property
    def reference(self) -> tuple[float, ...]:
        """Seconds of the yardsticks at the pace that times are given at, in the order of `Bound`."""
        return tuple(self._reference.values())

    def median(self, call: Callable[[], object], by: Bound, *, least: int = 5, patience: float = 0.05) -> float:
        """Median seconds of a call, at the reference's pace; see `measure`."""
        measured, pace = self.measure(call, by, least=least, patience=patience)
        return measured / pace

    def measure(
        self, call: Callable[[], object], by: Bound, *, least: int = 5, patience: float = 0.05
    ) -> tuple[float, float]:
        """Median seconds of a call, and how many times as long as the reference its yardstick takes meanwhile.

        Args:
            call: is made ``least`` times or more, for ``patience`` seconds; the yardstick is measured before, after
                and between, and after it the call is made once more, to have the processor's caches back.
            by: the yardstick.
            least: the least number of calls.
            patience: in seconds.
        """
        with torch.inference_mode(), chosen(self.device):
            return self._measure(*repeated(call, self.device), by, least, patience)

    def _measure(
        self, run: Callable[[], object], count: int, by: Bound, least: int, patience: float
    ) -> tuple[float, float]:
        times: list[float] = []
        yardstick = [self._now(by)]
        start = time.perf_counter()
        while len(times) < least or (time.perf_counter() - start < patience and len(times) < 15 * least):
            run()
            until = time.perf_counter() + patience / _ROUNDS
            while True:
                times.append(_seconds(run, count))
                if time.perf_counter() >= until or len(times) >= 15 * least:
                    break
            yardstick.append(self._now(by))
        return statistics.median(times), statistics.median(yardstick) / self._reference[by]

    def _now(self, by: Bound) -> float:
        """Seconds of a yardstick, after a call that brings what it reads back into the processor's caches."""
        call, count = self._calls[by]
        call()
        return _seconds(call, count)


def chosen(device: torch.device) -> AbstractContextManager[object]:
    """A block in which a GPU is the one that torch waits for and records on; for a processor, any block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def repeated(call: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], int]:
    """A call that makes another so often that the clock can measure it, and how often.

    On a GPU it replays a CUDA graph.

    For example ``repeated(lambda: a @ b, torch.device("cuda"))``.

    Raises:
        RuntimeError: the call cannot be recorded, as one that waits for the GPU.
    """
    if device.type != "cuda":
        return call, 1
    few = recorded(call, _FEW)
    few()
    count = max(_FEW, min(round(_FEW * _ENOUGH / seconds(few)), _MOST))
    del few  # its memory is needed for the next
    return recorded(call, count), count


def _seconds(call: Callable[[], object], count: int) -> float:
    """Seconds of one of the calls that a call makes."""
    return seconds(call) / count


def bound_by(read: float) -> Bound:
    """What a call is bounded by that reads so many bytes again and again."""
    return "memory" if read >= _BETWEEN else "caches"


def projections(
    dtype: torch.dtype, tokens: int, weights: int, copies: int, device: torch.device = HERE
) -> Callable[[], object]:
    """A call of ``copies`` projections one after another, each of as many values of weights."""
    width = 1 << ((weights.bit_length() - 1) // 2)
    sizes = width, weights // width
    one = nn.Linear(*sizes, bias=False, device=device, dtype=dtype)
    layers = nn.ModuleList([one, *(deepcopy(one) for _ in range(copies - 1))])  # drawing each would take long
    take_over_linears(layers)
    states = torch.randn(1, tokens, width, device=device).to(dtype)
    return in_turn([partial(layer, states) for layer in layers])


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One call of several."""

    @torch.inference_mode()
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them
