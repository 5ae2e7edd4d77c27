"""What to measure next: the option that would be recommended if it lost what its measured neighbours suggest."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headwise.measure.points import Measured

_LEAST = 3e-4
"""The least loss whose logarithm is taken: differences below it are chance."""

_FAMILIES = (("latents in codes", r"mla@([\d.]+)"), ("latents", r"mla:([\d.]+)"), ("key–value heads", r"gqa:(\d+)"))


_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A loss that was not measured, and is only used to say what to measure.

    Attributes:
        target: the name of the option that was not measured.
        loss: the rise of perplexity that is expected, as a fraction.
        between: the two measured targets whose losses it is read from; none where it is predicted.
    """

    target: str
    loss: float
    between: tuple[str, ...]


def expected_losses(
    measured: Mapping[str, Measured], targets: Iterable[str], bits: Mapping[str, float] = _NOTHING
) -> dict[str, Expected]:
    """The loss of each target that was not measured, where two of its family were.

    The logarithm of the loss is taken to be linear in the size: between the nearest smaller and larger one, or beyond
    the two nearest. A bit more for each value, or a few more values, divide an error by a factor.

    For example ``expected_losses(read_measured(["./out"]), ["mla@0.15"])``.

    Args:
        measured: the measured losses by target.
        targets: the targets whose losses are wanted; those that were measured are left out.
        bits: the bits of one cached value in formats of the model's cache, by target; measured ones know their own.
    """
    families: dict[str, list[tuple[float, Measured]]] = {}
    for point in measured.values():
        place = _place(point.target, bits.get(point.target, 16 * point.cache_fraction))
        if place is not None and math.isfinite(point.loss):
            families.setdefault(place[0], []).append((place[1], point))
    found = {}
    for target in targets:
        place = None if target in measured else _place(target, bits.get(target))
        if place is None:
            continue
        family, size = place
        pair = _nearest(sorted(families.get(family, ()), key=lambda known: known[0]), size)
        if pair is not None:
            found[target] = Expected(
                target=target, loss=_on_line(*pair, size), between=(pair[0][1].target, pair[1][1].target)
            )
    return found


def _place(target: str, bits: float | None) -> tuple[str, float] | None:
    """The family of a target, and its size there; None where it has no family, or its size is not known."""
    if target == "mqa":
        return "key–value heads", 1.0
    for family, pattern in _FAMILIES:
        match = re.fullmatch(pattern, target)
        if match:
            return family, float(match[1])
    return ("kivi", bits) if bits is not None and target.startswith("kivi") else None


def _nearest(
    known: list[tuple[float, Measured]], size: float
) -> tuple[tuple[float, Measured], tuple[float, Measured]] | None:
    """The two measured sizes that a line is drawn through: the nearest on both sides, or the two nearest of one."""
    smaller, larger = ([each for each in known if (each[0] < size) is is_smaller] for is_smaller in (True, False))
    for pair in ((*smaller[-1:], *larger[:1]), tuple(smaller[-2:]), tuple(larger[:2])):
        if len(pair) == 2 and pair[0][0] < pair[1][0]:
            return pair[0], pair[1]
    return None


def _on_line(lower: tuple[float, Measured], upper: tuple[float, Measured], size: float) -> float:
    """The loss at a size, on the line of logarithms through two measurements."""
    first, last = (math.log(max(point.loss, _LEAST)) for _, point in (lower, upper))
    return math.exp(min(first + (last - first) * (size - lower[0]) / (upper[0] - lower[0]), 50.0))
