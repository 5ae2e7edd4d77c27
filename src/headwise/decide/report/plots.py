"""Plots of a report's page: what options take and lose, how time grows with the context, and rooflines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.base.pages import BLUE, COLOURS, GREEN, GREY, ORANGE, label_logarithms, new_figure
from headwise.costs.prediction import Device, Efficiency, Memory, Timed
from headwise.decide.advice import AS_IT_IS, Option

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST_LOSS = 1e-3
"""What loses less is drawn as if it lost this much, on an axis of logarithms."""

Point = tuple[str, float, float]
"""A name and where it lies."""


def quality(axes: Axes, options: Sequence[Option], limit: float | None) -> None:
    """Draw the known loss of options over their cache; hollow where it is predicted.

    Args:
        axes: the axes to draw on.
        options: the best first, where one is recommended.
        limit: the largest loss that is allowed; None for any.
    """
    known = [option for option in options if option.loss is not None and math.isfinite(option.loss)]
    for option in known:
        loss = 100 * max(option.loss or 0.0, _LEAST_LOSS)
        place_option(axes, option, loss, is_best=option is options[0], is_hollow=option.is_predicted)
    axes.set_yscale("log")
    axes.set_ylabel(
        f"{'known' if any(option.is_predicted for option in known) else 'measured'} rise of perplexity, %"
    )
    if limit:
        axes.axhline(100 * limit, color=GREY, linewidth=1)
    for axis in (axes.xaxis, axes.yaxis):
        label_logarithms(axis, "{x:g}")


def place_option(axes: Axes, option: Option, y: float, *, is_best: bool, is_hollow: bool = False) -> None:
    """Draw an option over its cache, on an axis of logarithms: named where no other dominates it.

    Args:
        axes: the axes to draw on.
        option: the option.
        y: the height at which the option is drawn.
        is_best: whether it comes first; where it is refused nothing is recommended.
        is_hollow: whether its place is predicted.
    """
    is_best = is_best and option.refused is None
    x, colour = option.cache_bytes_per_token / 1024, ORANGE if is_best else BLUE if option.refused is None else GREY
    axes.plot([x], [y], "o", color=colour, fillstyle="none" if is_hollow else "full", markersize=8 if is_best else 5)
    if is_best or (option.refused is None and not option.is_dominated) or option.target == AS_IT_IS:
        axes.annotate(option.target, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("cache, KiB a token")


def quality_figure(options: Sequence[Option], limit: float | None) -> Figure:
    """The known loss of options over their cache."""
    made, (axes,) = new_figure(6, 4.2)
    quality(axes, options, limit)
    return made


def memory_figure(names: Sequence[str], memories: Sequence[Memory], device: Device, usable: float) -> Figure:
    """What options take of a device's memory.

    Args:
        names: the names of the options.
        memories: the memory that each option takes.
        device: the device whose memory is divided.
        usable: bytes of it that may be used.
    """
    made, (axes,) = new_figure(6, 1.3 + 0.22 * len(names))
    left = [0.0] * len(names)
    for part, colour in zip(("weights", "cache", "workspace"), COLOURS, strict=False):
        sizes = [getattr(memory, part) / 2**30 for memory in memories]
        axes.barh(range(len(names)), sizes, left=left, color=colour, label=part)
        left = [one + other for one, other in zip(left, sizes, strict=True)]
    # Where the device's memory is far beyond all bars, it is named and not drawn.
    end = device.memory_bytes / 2**30 if device.memory_bytes / 2**30 < 4 * max(left) else max(left)
    for limit, style in ((usable, ":"), (device.memory_bytes, "-")):
        axes.axvline(limit / 2**30, color=GREY, linestyle=style, linewidth=1.5)
    axes.set_xlim(0, 1.05 * max(end, *left))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("GiB on one device")
    made.legend(loc="outside upper left", ncols=3, frameon=False)
    return made


def latency_figure(
    lines: Mapping[str, Sequence[float]], contexts: Sequence[int], context: int, timed: Iterable[Point]
) -> Figure:
    """Decode steps against the context.

    Args:
        lines: milliseconds of options at each context, the first one drawn thick.
        contexts: tokens of each sequence.
        context: the context of the question, in tokens.
        timed: measured steps, at their context and milliseconds.
    """
    made, (axes,) = new_figure(6, 4.6)
    for index, (name, milliseconds) in enumerate(lines.items()):
        width = 1.5 if index else 3.0
        axes.plot(contexts, milliseconds, color=COLOURS[index % len(COLOURS)], linewidth=width, label=name)
    _diamonds(axes, timed, "measured")
    axes.axvline(context, color=GREY, linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    label_logarithms(axes.yaxis, "{x:g}")
    axes.set_xlabel("tokens of each sequence")
    axes.set_ylabel("a decode step, ms (predicted)")
    made.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return made


def roofline_figure(
    work: Sequence[Timed], device: Device, dtype: str, efficiency: Efficiency, timed: Iterable[Point]
) -> Figure:
    """The operators of a pass below a device's peaks.

    Args:
        work: the operators, with their times.
        device: the device that the operators run on.
        dtype: the dtype of the pass.
        efficiency: the shares of the peaks that are assumed.
        timed: measured steps, at their FLOPs a byte and FLOP/s.
    """
    made, (axes,) = new_figure(6, 4.6)
    peak, bandwidth = device.peak(dtype), device.bytes_per_second
    ridge = peak / bandwidth
    ends = (min(0.1, ridge / 100), max(1e4, ridge * 10))
    _ceiling(axes, ends, peak, bandwidth, "-", "dense peak and bandwidth")
    shares = (peak * efficiency.compute, bandwidth * efficiency.memory)
    _ceiling(axes, ends, *shares, ":", "the shares that are assumed")
    points = [
        (each.name, each.flops / each.memory_bytes, each.flops / each.seconds)
        for each in work
        if each.flops and each.memory_bytes
    ]
    axes.plot([x for _, x, _ in points], [y for _, _, y in points], "o", color=BLUE, label="operators, predicted")
    for name, x, y in _apart(points):
        axes.annotate(name, (x, y), xytext=(0, 6), textcoords="offset points", fontsize=8, ha="center")
    _diamonds(axes, timed, "a measured step")
    _rates(axes)
    made.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    return made


def _ceiling(axes: Axes, ends: tuple[float, float], peak: float, bandwidth: float, style: str, name: str) -> None:
    ridge = peak / bandwidth
    heights = [ends[0] * bandwidth, peak, peak]
    axes.plot([ends[0], ridge, ends[1]], heights, style, color=GREY, linewidth=1.5, label=name)


def _rates(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.set_xlabel("FLOPs a byte")
    axes.set_ylabel("FLOP/s")


def _apart(points: Iterable[Point]) -> list[Point]:
    """The points whose names would not be printed over another's: a name is up to a decade wide."""
    named: list[Point] = []
    for name, x, y in points:
        distances = ((abs(math.log10(x / left)), abs(math.log10(y / top))) for _, left, top in named)
        if all(across > 1.0 or up > 0.3 for across, up in distances):
            named.append((name, x, y))
    return named


def _diamonds(axes: Axes, timed: Iterable[Point], what: str) -> None:
    for name, x, y in timed:
        axes.plot([x], [y], "D", color=GREEN, markersize=8, label=f"{name}, {what}")


def measured_roofline(points: Mapping[str, Sequence[tuple[float, float]]], peak: float, bandwidth: float) -> Figure:
    """Measured points below the ceilings that were measured beside them.

    Args:
        points: FLOPs a byte and FLOP/s, by the name of what was timed.
        peak: FLOP/s.
        bandwidth: bytes a second.
    """
    made, (axes,) = new_figure(6, 4.6)
    ridge = peak / bandwidth
    intensities = [x for found in points.values() for x, _ in found]
    ends = (min(0.5 * ridge, *intensities, ridge) / 2, max(2 * ridge, *intensities, ridge) * 2)
    _ceiling(axes, ends, peak, bandwidth, "-", "measured bandwidth and matmul peak")
    for index, (name, found) in enumerate(points.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot([x for x, _ in found], [y for _, y in found], "o", color=colour, label=name)
    _rates(axes)
    made.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    return made


Line = tuple[str, Sequence[float], Sequence[float]]
"""A name, and where its points lie."""


def positions_figure(lines: Sequence[tuple[Line, Line | None]]) -> Figure:
    """The cost of a token by its position.

    Args:
        lines: for each text, the line of a model and that of its reference, which is dotted.
    """
    made, (axes,) = new_figure(6, 4.2)
    for index, pair in enumerate(lines):
        for line, style in zip(pair, ("o-", "o:"), strict=True):
            if line is not None:
                name, x, y = line
                axes.plot(x, y, style, color=COLOURS[index % len(COLOURS)], label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("positions up to")
    axes.set_ylabel("nats a token")
    made.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    return made
