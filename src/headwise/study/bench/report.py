"""The report of a benchmark: its cases, how each is timed, and its page.

A case has its limit and the ways that were timed. A report is printed in a terminal, or written as one self-contained
HTML page.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from headwise.base.pages import Text, web_page
from headwise.base.tables import Cell, Table
from headwise.measure.timing.machine import Limits, Probes, describe_machine, installed_versions
from headwise.measure.timing.timing import Spread, record_graph, spread_interleaved, time_call

OURS = "headwise"
"""The name of the way that the others are compared with."""

_PATIENCE = 10.0
"""The seconds beyond which a call is not repeated."""

BETWEEN = 256 << 20
"""Bytes of caches that are read in turn: more than a processor's own caches hold, so that each one comes from memory,
as it does in a model, which reads all other layers' caches in between."""

_REPLAYED = 64
"""The most calls of one CUDA graph."""

MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Timing:
    """One way's time for a case.

    Attributes:
        ms: the median milliseconds; None where the way could not be run.
        low_ms: the lower quartile, in milliseconds.
        high_ms: the upper quartile, in milliseconds.
        called_ms: the median milliseconds of calls that Python makes on a GPU, where the three times above are of
            calls that a CUDA graph replays. None on a CPU, and where the way cannot be recorded.
        error: the reason why the way could not be run; None where it was.
        note: the choice that the way made, or the work that it left out; None where there is nothing to say.
    """

    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    called_ms: float | None = None
    error: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Case:
    """One set of sizes, its limit and the times of all ways.

    Attributes:
        name: the name of the case in tables.
        values: the sizes of the case, by name.
        nbytes: the bytes that have to be read.
        flops: the FLOPs that have to be done.
        read_bytes_per_second: the bytes a second that the machine reads, measured in the same minute.
        matmul_flops_per_second: the FLOPs a second of the machine's matrix products in the case's dtype, measured in
            the same minute.
        limit_ms: the least time possible: the larger of bytes over bandwidth and FLOPs over 0.7 of the peak.
        ways: each way's timing, by its name.
    """

    name: str
    values: dict[str, Any]
    nbytes: int
    flops: int
    read_bytes_per_second: float
    matmul_flops_per_second: float
    limit_ms: float
    ways: dict[str, Timing]

    def ratio(self, way: str) -> float | None:
        """A way's time over the limit."""
        ms = self.ways[way].ms if way in self.ways else None
        return None if ms is None else ms / self.limit_ms

    def to_dict(self) -> dict[str, Any]:
        """The case as JSON-able values, with rates beside the times."""
        ways = {
            name: {key: value for key, value in asdict(timing).items() if value is not None}
            | (
                {}
                if timing.ms is None
                else {
                    "gb_per_s": self.nbytes / timing.ms / 1e6,
                    "gflop_per_s": self.flops / timing.ms / 1e6,
                    "of_limit": timing.ms / self.limit_ms,
                }
            )
            for name, timing in self.ways.items()
        }
        return {**{key: value for key, value in vars(self).items() if key != "ways"}, "ways": ways}


@dataclass(frozen=True)
class Bench:
    """The report of a benchmark.

    Attributes:
        kind: ``decode``, ``prefill``, ``module`` or ``generate``.
        cases: the cases in the order in which they were timed.
        device: the device that the cases ran on.
        notes: remarks for the reader of the report.
    """

    kind: str
    cases: Sequence[Case]
    device: str = "cpu"
    notes: Sequence[str] = field(default_factory=tuple)

    def ways(self) -> list[str]:
        """The names of all ways of all cases, in the order of their first case."""
        return list(dict.fromkeys(way for case in self.cases for way in case.ways))

    def speedups(self) -> dict[str, float]:
        """Each other way's time over headwise's: the median over the cases that both ran."""
        speedups = {}
        for way in self.ways():
            pairs = ((case.ways.get(way, Timing()).ms, case.ways.get(OURS, Timing()).ms) for case in self.cases)
            ratios = [theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None]
            if way != OURS and ratios:
                speedups[way] = statistics.median(ratios)
        return speedups

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, with the machine and the versions it was made on."""
        return {
            "kind": self.kind,
            "machine": describe_machine(),
            "versions": installed_versions(),
            "speedups": self.speedups(),
            "notes": list(self.notes),
            "cases": [case.to_dict() for case in self.cases],
        }


Way = Callable[[], object]
"""A call that is timed; it raises `UnableError` where it cannot be run."""


class UnableError(Exception):
    """A way cannot compute a case; the message says why."""


def run_case(
    name: str,
    values: dict[str, Any],
    ways: Mapping[str, Callable[[], Way]],
    *,
    nbytes: int,
    flops: int,
    probes: Probes,
    budget: float,
    notes: Mapping[str, str] | None = None,
) -> Case:
    """Time the ways of one case in turn, and measure the machine's limits in between.

    Args:
        name: the name of the case.
        values: the sizes of the case, by name.
        ways: functions that prepare a way and return the call to time, by the way's name; both may raise
            `UnableError`.
        nbytes: the bytes that have to be read.
        flops: the FLOPs that have to be done.
        probes: the calls that measure the machine's limits.
        budget: the seconds for all ways together.
        notes: the choices of some ways, by the way's name.
    """
    calls: dict[str, Way] = {}
    errors: dict[str, str] = {}
    slow: dict[str, Timing] = {}
    for way, make in ways.items():
        try:
            call = make()
            first = time_call(call)
            if first > _PATIENCE:
                slow[way] = Timing(first * 1e3, note="one call: too slow to repeat")
            else:
                calls[way] = call
        except UnableError as error:
            errors[way] = str(error)
        except MEMORY_ERRORS:
            errors[way] = "not enough memory"
        except RuntimeError as error:
            errors[way] = str(error).strip().splitlines()[0][:200]
    times = max(1, min(_REPLAYED, BETWEEN // max(nbytes, 1)))
    replays = _record_replays(calls, times) if probes.device.type == "cuda" else {}
    timed = spread_interleaved({**probes.calls(), **calls}, budget=budget)
    replayed = spread_interleaved(replays, budget=budget)
    limits = probes.limits(timed["read"].median, timed["product"].median)
    failed = {way: Timing(error=error) for way, error in errors.items()}
    repeated = {way: _timing(timed[way], (notes or {}).get(way)) for way in calls}
    for way, spread in replayed.items():
        repeated[way] = replace(_timing(spread, repeated[way].note, times), called_ms=repeated[way].ms)
    timings = {way: (slow | failed | repeated)[way] for way in ways}
    return case_of(name, values, timings, nbytes=nbytes, flops=flops, limits=limits)


def case_of(
    name: str, values: dict[str, Any], ways: dict[str, Timing], *, nbytes: int, flops: int, limits: Limits
) -> Case:
    """Make a case from its timings, with its limit."""
    return Case(
        name=name,
        values=values,
        nbytes=nbytes,
        flops=flops,
        read_bytes_per_second=limits.bytes_per_second,
        matmul_flops_per_second=limits.flops_per_second,
        limit_ms=limits.seconds(nbytes, flops) * 1e3,
        ways=ways,
    )


def _record_replays(calls: Mapping[str, Way], times: int) -> dict[str, Way]:
    """Calls that replay a CUDA graph of ``times`` calls of each way, for the ways that can be recorded."""
    replays = {}
    for way, call in calls.items():
        with suppress(RuntimeError):
            replays[way] = record_graph(call, times)
    return replays


def _timing(spread: Spread, note: str | None, times: int = 1) -> Timing:
    """The timing of one call, from samples of ``times`` calls each."""
    low, median, high = (value * 1e3 / times for value in (spread.low, spread.median, spread.high))
    return Timing(median, low, high, note=note)


def page(bench: Bench, command: str) -> str:
    """Make the page: a row for each case, with each way's time and its ratio to the machine's limit.

    For example ``page(bench_prefill(quick=True), "headwise bench prefill --quick")``.

    Args:
        bench: the report.
        command: the command that made the report.
    """
    ways = bench.ways()
    table = Table(["", "limit ms", *ways])
    for case in bench.cases:
        rate = f"{case.read_bytes_per_second / 1e9:.1f} GB/s, {case.matmul_flops_per_second / 1e9:.0f} GFLOP/s"
        limit = Cell(f"{case.limit_ms:.3g}", hint=rate)
        table.add(case.name, limit, *(_cell(case, way) for way in ways))
    machine = {**describe_machine(), **installed_versions()}
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    notes = [
        *(f"{way}: {ratio:.1f} × the time of {OURS}, in the median" for way, ratio in bench.speedups().items()),
        *bench.notes,
    ]
    lead = (
        "Milliseconds, medians of interleaved runs, and how many times the machine's limit that is: the larger "
        "of bytes over the read bandwidth and FLOPs over 0.7 of the matmul peak, both measured beside each case."
    )
    return web_page(f"headwise bench {bench.kind}", [Text(lead), table, notes, Text(facts), Text(command, "code")])


def _cell(case: Case, way: str) -> Cell:
    """A way's time and its ratio to the limit; the fastest of a case stands out."""
    timing = case.ways.get(way)
    if timing is None or timing.ms is None:
        return Cell("–", hint=(timing.error if timing else None) or "not timed", mark="none")
    best = min(each.ms for each in case.ways.values() if each.ms is not None)
    marks = [name for name, holds in (("ours", way == OURS), ("best", timing.ms == best)) if holds]
    spread = None if timing.low_ms is None else f"quartiles {timing.low_ms:.3g} – {timing.high_ms:.3g} ms"
    hint = "; ".join(part for part in (spread, timing.note) if part)
    return Cell(f"{timing.ms:.3g} · {timing.ms / case.limit_ms:.2f} ×", hint=hint, mark=" ".join(marks))
