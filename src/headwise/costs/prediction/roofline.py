"""The time of operators on a device: the longer of computing and of moving bytes, and an overhead for each run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headwise.costs.formulas import dtype_bytes
from headwise.costs.prediction.curves import MANY, Sizes
from headwise.costs.prediction.hardware import Device
from headwise.costs.prediction.operators import Operator, Pass
from headwise.errors import ArgumentError

Bound = Literal["compute", "memory", "link", "overhead"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a device's peaks that operators reach, and what each run costs besides.

    Attributes:
        compute: of the dense peak.
        memory: of the bandwidth.
        link: of the bandwidth between devices.
        seconds: of each run, whatever it does.
        is_measured: whether the device has curves of the dtype, in whose place these shares then stand for what was
            not measured; otherwise they are assumed for all.
    """

    compute: float = 0.7
    memory: float = 0.8
    link: float = 0.7
    seconds: float = 4e-6
    is_measured: bool = False


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One kind of operator and its time.

    Attributes:
        name: of the operator.
        part: of the model.
        times: how often it runs.
        flops: of all runs together, as for the bytes and the seconds.
        memory_bytes: that they move between memory and processor.
        link_bytes: that they send to other devices.
        seconds: that they take.
        bound: what most of the seconds are spent on.
    """

    name: str
    part: str
    times: int
    flops: float
    memory_bytes: float
    link_bytes: float
    seconds: float
    bound: Bound


def seconds(
    work: Sequence[Operator], device: Device, forward: Pass, efficiency: Efficiency | None = None
) -> list[Timed]:
    """The time of each operator of a pass on a device.

    For example ``sum(timed.seconds for timed in seconds(work, device("h100"), Pass(total=1024)))``.

    Args:
        work: of `operators`.
        device: one of the ranks.
        forward: the pass.
        efficiency: of the device; assumed when None.

    Raises:
        ArgumentError: the device has no peak for the dtype, or several devices are not joined.
    """
    reached = efficiency or Efficiency()
    peak = device.peak(forward.dtype) * reached.compute
    result = []
    measured = device.curves.get(forward.dtype.removeprefix("torch."))
    read = 0.0 if measured is None else pass_bytes(work)
    for operator in work:
        link = 0.0
        if operator.link_bytes:
            if device.link_bytes_per_second is None:
                raise ArgumentError("ranks", forward.ranks, f"must be 1: {device.label} has no link to others")
            link = operator.link_bytes / (device.link_bytes_per_second * reached.link)
        times: dict[Bound, float] = {
            "compute": operator.flops / peak,
            "memory": operator.memory_bytes / (device.bytes_per_second * reached.memory),
            "link": link,
            "overhead": reached.seconds,
        }
        bound: Bound = max(times, key=lambda kind: times[kind])
        longest = max(times["compute"], times["memory"], times["link"])
        times_run = operator.times
        alone = longest + reached.seconds
        if measured is not None:
            found = measured.seconds(operator.kind, _sizes(operator, forward, read))
            alone = alone if found is None else found
        result.append(
            Timed(
                name=operator.name,
                part=operator.part,
                times=times_run,
                flops=times_run * operator.flops,
                memory_bytes=times_run * operator.memory_bytes,
                link_bytes=times_run * operator.link_bytes,
                seconds=times_run * alone,
                bound=bound,
            )
        )
    return merged(result)


def pass_bytes(work: Iterable[Operator]) -> float:
    """The bytes of weights and cache that a pass reads, which decide what a processor's caches hold.

    For example ``pass_bytes(operators(read_spec("llama-3-8b"), Pass(total=1024)))``.
    """
    return sum(operator.times * (operator.weight_bytes + operator.cache_bytes) for operator in work)


def _sizes(operator: Operator, forward: Pass, read: float) -> Sizes:
    """What the measured time of one run depends on.

    A pass of few tokens waits for the bytes of weights: one of quantised weights counts as one of the dtype's.
    """
    rows = operator.flops / (2 * operator.weights) if operator.weights else 1.0
    weights = operator.weights if rows >= MANY else operator.weight_bytes / dtype_bytes(forward.dtype)
    return Sizes(
        tokens=forward.tokens,
        new=forward.new,
        rows=rows,
        weights=max(weights, 1.0),
        flops=operator.flops,
        cache_bytes=max(operator.cache_bytes, 1.0),
        bits=0 if forward.value_bytes >= dtype_bytes(forward.dtype) else 8 * forward.value_bytes,
        hidden_size=operator.hidden_size,
        pass_bytes=max(read, 1.0),
    )


def merged(timed: Iterable[Timed]) -> list[Timed]:
    """One entry for each name: layers of several kinds, and several passes, have some in common.

    For example ``merged([*prompt, *step])``.

    Args:
        timed: in any order.

    Returns:
        Their sums, bound by what the longest of them is bound by.
    """
    found: dict[str, list[Timed]] = {}
    for each in timed:
        found.setdefault(each.name, []).append(each)
    return [_sum(runs) for runs in found.values()]


def _sum(runs: Sequence[Timed]) -> Timed:
    longest = max(runs, key=lambda each: each.seconds)
    sums = {
        name: sum(getattr(each, name) for each in runs)
        for name in ("times", "flops", "memory_bytes", "link_bytes", "seconds")
    }
    return replace(longest, **sums)
