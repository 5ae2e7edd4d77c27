"""Times of a machine's operators that were measured over grids of sizes, and interpolated between them.

What layers and models do besides their operators has no time of its own that could be taken: it is what is left of
whole decoders' times. Whole decoders also correct the times of projections.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from headwise.errors import SpecError

Kind = Literal["linear", "product", "core", "latent core", "latent input", "norm", "embedding", "other"]
"""Kinds of operators, each with curves of its own: a projection; products of heads with small matrices; attention of
heads, and to latents; the projection to a latent, with what a latent layer does besides; a norm, with half of what
else a layer does; the embedding, with what a model does around its layers; all others, which have no curve."""

MANY = 64
"""Tokens from which on the time of a projection does not depend on where its weights come from."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Seconds over two sizes, which vary as powers of both between neighbours.

    For example ``Grid(x=(1, 2), y=(1, 4), seconds=((1, 4), (2, 8))).at(4, 2)`` is 8.0.

    Beyond the ends they go on as there, but never shrink as a size grows, nor grow faster than it.

    Attributes:
        x: sizes, growing.
        y: other sizes, growing.
        seconds: the measured seconds of each x, for each y.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("x", self.x), ("y", self.y)):
            if len(axis) < 2 or not all(0 < a < b < math.inf for a, b in pairwise(axis)):
                raise SpecError(name, axis, "must be at least two growing numbers above 0")
        rows = self.seconds
        if len(rows) != len(self.x) or any(
            len(row) != len(self.y) or not all(0 < time < math.inf for time in row) for row in rows
        ):
            raise SpecError("seconds", rows, "must have a number above 0 for each x and y")

    def at(self, x: float, y: float) -> float:
        """The seconds at a pair of sizes."""
        left, along, x_beyond = _place(self.x, x)
        low, up, y_beyond = _place(self.y, y)
        corners = [[math.log(self.seconds[left + side][low + above]) for above in (0, 1)] for side in (0, 1)]
        columns = [(1 - along) * corners[0][above] + along * corners[1][above] for above in (0, 1)]
        rows = [(1 - up) * one + up * other for one, other in corners]
        found = (1 - up) * columns[0] + up * columns[1]
        for beyond, ends, axis, index in ((x_beyond, rows, self.x, left), (y_beyond, columns, self.y, low)):
            power = (ends[1] - ends[0]) / math.log(axis[index + 1] / axis[index])
            found += beyond * min(max(power, 0.0), 1.0)
        return math.exp(found)


def _place(axis: Sequence[float], size: float) -> tuple[int, float, float]:
    """The neighbour below a size, how far it is on the way to the next one, and beyond the ends, in logarithms."""
    within = min(max(size, axis[0]), axis[-1])
    index = min(max(bisect_right(axis, within) - 1, 0), len(axis) - 2)
    low, high = math.log(axis[index]), math.log(axis[index + 1])
    along = (math.log(within) - low) / (high - low)
    return index, along, math.log(max(size, 1e-12)) - math.log(within)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Measured times of one dtype.

    Attributes:
        few: times of a projection of fewer than `MANY` tokens, by the values of its weight (small ones are read by
            one thread), over tokens and the bytes that a pass reads, some of which a processor's own caches may hold.
            Empty on a GPU, whose caches hold no model's weights from one pass to the next.
        many: times of a projection of more, or of any number on a GPU, over tokens and values of its weight.
        product: times of products of heads with matrices, over tokens and values of all matrices.
        core: times of attention of one new token a sequence, for each byte of cache, by bits of a cached value (0 for
            those of the dtype), over the bytes that a pass reads (where ``few`` is empty, that the run reads) and
            FLOPs a byte.
        latent_core: the same to latents of the dtype.
        coded_latent_core: times of attention of one new token a sequence to latents in codes, by bits of a value,
            over the bytes that it reads and FLOPs a byte. Decoding takes as long for every value, whatever its bits.
            Empty where it was not measured.
        coded: what a layer whose cache is in fewer bits does besides, by its bits.
        coded_latent: the same of latents in codes.
        prompt: times of attention of many new tokens, over these and FLOPs for each pair of them.
        latent_input: what a latent layer does besides, over values of a hidden state (tokens · E) and E.
        norm: a norm and half of what else a layer does, over the same.
        embedding: what a model does around its layers, over the same.
        pace: times of the yardsticks of `headwise.measure.profiling.pace.Pace`, at the pace of all of these.
    """

    few: Mapping[float, Grid] = field(hash=False)
    many: Grid
    product: Grid
    core: Mapping[float, Grid] = field(hash=False)
    latent_core: Grid
    coded_latent_core: Mapping[float, Grid] = field(hash=False)
    coded: Mapping[float, float] = field(hash=False)
    coded_latent: Mapping[float, float] = field(hash=False)
    prompt: Grid
    latent_input: Grid
    norm: Grid
    embedding: Grid
    pace: tuple[float, ...]

    def seconds(self, kind: Kind, sizes: Sizes) -> float | None:
        """The time of one run of an operator; None where it was not measured."""
        if kind in ("linear", "latent input"):
            is_few = self.few and sizes.rows < MANY
            time = self._of_few(sizes) if is_few else self.many.at(sizes.rows, sizes.weights)
            return time + (self.latent_input.at(*_state(sizes)) if kind != "linear" else 0)
        if kind == "product":
            return self.product.at(sizes.rows, sizes.weights)
        if kind in ("norm", "embedding"):
            return (self.norm if kind == "norm" else self.embedding).at(*_state(sizes))
        if kind not in ("core", "latent core"):
            return None
        if sizes.new > 1:
            return self.prompt.at(sizes.new, sizes.flops / pairs(sizes.new))
        if kind == "latent core" and sizes.bits and self.coded_latent_core:
            bits = _nearest(self.coded_latent_core, sizes.bits)
            cached = sizes.cache_bytes * bits / sizes.bits
            read = self.coded_latent_core[bits].at(cached, sizes.flops / cached)
            return read + self.coded_latent.get(bits, 0.0)
        grid, besides = self.latent_core, 0.0
        if kind == "core":
            bits = _nearest(self.core, sizes.bits)
            grid, besides = self.core[bits], self.coded.get(bits, 0.0)
        together = sizes.pass_bytes if self.few else sizes.cache_bytes
        of_a_byte = grid.at(_within(grid.x, together), sizes.flops / sizes.cache_bytes)
        return sizes.cache_bytes * of_a_byte + besides

    def _of_few(self, sizes: Sizes) -> float:
        """A projection of few tokens: by a grid over values of weights, made for the tokens and the bytes."""
        weights = tuple(sorted(self.few))
        grids = [self.few[each] for each in weights]
        column = tuple(grid.at(sizes.rows, _within(grid.y, sizes.pass_bytes)) for grid in grids)
        return Grid(x=(1, 2), y=weights, seconds=(column, column)).at(1, sizes.weights)


def pairs(tokens: int) -> float:
    """Pairs of a token and one that it attends to, where each attends to itself and those before.

    For example ``pairs(3)`` is 6.0.
    """
    return tokens * (tokens + 1) / 2


def _nearest(measured: Mapping[float, Any], bits: float) -> float:
    """Those of the measured bits that are nearest to some."""
    return min(sorted(measured), key=lambda each: abs(each - bits))


def _state(sizes: Sizes) -> tuple[int, int]:
    """Values of a hidden state, by whose number torch works on them in one thread or several; and its width."""
    return sizes.tokens * sizes.hidden_size, sizes.hidden_size


def _within(axis: Sequence[float], size: float) -> float:
    """A size, at most as far as it was measured: beyond all caches, a byte takes as long however many there are."""
    return min(max(size, axis[0]), axis[-1])


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the time of one run depends on.

    Attributes:
        tokens: the new tokens of all sequences, B·S.
        new: the new tokens of a sequence, S.
        rows: the number of a projection's input rows.
        weights: the number of values of its weight.
        flops: the FLOPs of the run.
        cache_bytes: the bytes of cache that the run reads.
        bits: the bits of a cached value; 0 for those of the dtype.
        hidden_size: the width of a hidden state, E.
        pass_bytes: weights and cache that the whole pass reads.
    """

    tokens: int
    new: int
    rows: float
    weights: float
    flops: float
    cache_bytes: float
    bits: float
    hidden_size: int
    pass_bytes: float


FORM = 4
"""The version of the form of curves in a file; raised whenever what their sizes mean is changed."""

_GRIDS = ("many", "product", "prompt", "latent_core", "latent_input", "norm", "embedding")
_BY_SIZE = ("few", "core", "coded_latent_core")
_CODED = ("coded", "coded_latent")


def curves_of(entry: Any) -> Curves:
    """Curves of the JSON-able values that `to_table` makes.

    For example ``curves_of(to_table(curves))``.

    Raises:
        SpecError: the values are no curves.
    """
    if isinstance(entry, Mapping) and entry.get("form") != FORM:
        raise SpecError("form", entry.get("form"), f"must be {FORM} in curves: run headwise profile again")
    try:
        if len(entry["few"]) == 1:
            raise ValueError("few has one weight, and needs two to tell how time grows")
        if not entry["core"]:
            raise ValueError("it has no bits")
        fields: dict[str, Any] = {name: _grid(entry[name]) for name in _GRIDS}
        fields |= {name: {float(size): _grid(grid) for size, grid in entry[name].items()} for name in _BY_SIZE}
        fields |= {name: {float(bits): float(time) for bits, time in entry[name].items()} for name in _CODED}
        return Curves(pace=tuple(map(float, entry["pace"])), **fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError("curves", type(entry).__name__, f"must be as headwise profile writes them: {error}") from None


def _grid(entry: Mapping[str, Any]) -> Grid:
    x, y = (tuple(map(float, entry[axis])) for axis in ("x", "y"))
    return Grid(x=x, y=y, seconds=tuple(tuple(map(float, row)) for row in entry["seconds"]))


def to_table(curves: Curves) -> dict[str, Any]:
    """Curves as JSON-able values.

    For example ``to_table(curves)["many"]["x"]``.
    """
    plain: dict[str, Any] = {name: _table(getattr(curves, name)) for name in _GRIDS}
    plain |= {"form": FORM, "pace": list(curves.pace)}
    for name in _CODED:
        plain[name] = {f"{bits:g}": time for bits, time in getattr(curves, name).items()}
    for name in _BY_SIZE:
        plain[name] = {f"{size:.12g}": _table(grid) for size, grid in getattr(curves, name).items()}
    return plain


def _table(grid: Grid) -> dict[str, Any]:
    return {"x": list(grid.x), "y": list(grid.y), "seconds": [list(row) for row in grid.seconds]}
