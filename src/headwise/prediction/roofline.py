"""The time of operators on a device: the longer of computing and of moving bytes, and an overhead for each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headwise.errors import ArgumentError
from headwise.prediction.hardware import Device
from headwise.prediction.operators import Operator, Pass

Bound = Literal["compute", "memory", "link", "overhead"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a device's peaks that operators reach, and what each run costs besides.

    Attributes:
        compute: of the dense peak.
        memory: of the bandwidth.
        link: of the bandwidth between devices.
        seconds: of each run, whatever it does.
        is_measured: whether it was measured on the device; otherwise it is assumed.
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
        operator: it.
        seconds: of all its runs in a pass.
        bound: what its time is mostly spent on.
    """

    operator: Operator
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
        result.append(Timed(operator=operator, seconds=operator.times * (longest + reached.seconds), bound=bound))
    return result
