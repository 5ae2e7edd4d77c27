"""Whole numbers that remember the formula they came from, so that a cost and its formula are one expression."""

from __future__ import annotations

from typing import Literal

Term = tuple[int, tuple[str, ...]]
"""A coefficient and the factors after it."""


class Size(int):
    """An int with a formula: sums, differences and products of sizes remember what they were made of.

    Plain ints take part as the number they are. The formula is written only when it is asked for.

    >>> E, H, D = Size(4096, "E"), Size(32, "H"), Size(128, "D")
    >>> flops = 2 * E * (H * D + H * D + 64)
    >>> int(flops), flops.formula
    (67633152, '2·E·(2·H·D + 64)')
    """

    _made: str | tuple[Literal["+", "-", "*", "/2"], Size, Size] | None

    def __new__(cls, value: int, symbol: str | None = None) -> Size:
        """A size of this value: a letter's, or a plain number."""
        size = super().__new__(cls, value)
        size._made = symbol
        return size

    @property
    def formula(self) -> str:
        """Such as ``2·E·(H·D + 64)``."""
        return _written(self._terms())

    @property
    def symbols(self) -> dict[str, int]:
        """The letters of the formula and their values."""
        if isinstance(self._made, tuple):
            return self._made[1].symbols | self._made[2].symbols
        return {} if self._made is None else {self._made: int(self)}

    def halved(self) -> Size:
        """Half of it, where that is a whole number."""
        assert not int(self) % 2
        return _made(int(self) // 2, "/2", self, self)

    def __add__(self, other: int) -> Size:
        return _made(int(self) + int(other), "+", self, as_size(other))

    def __radd__(self, other: int) -> Size:
        return _made(int(other) + int(self), "+", as_size(other), self)

    def __sub__(self, other: int) -> Size:
        return _made(int(self) - int(other), "-", self, as_size(other))

    def __mul__(self, other: int) -> Size:
        return _made(int(self) * int(other), "*", self, as_size(other))

    def __rmul__(self, other: int) -> Size:
        return _made(int(other) * int(self), "*", as_size(other), self)

    def _terms(self) -> list[Term]:
        """The formula as a sum; like terms are one."""
        if self._made is None:
            return [(int(self), ())] if self else []
        if isinstance(self._made, str):
            return [(1, (self._made,))]
        how, left, right = self._made
        if how == "/2":
            return [(1, (f"{_factor(left._terms())}/2",))]
        if how == "*":
            return _product(left._terms(), right._terms())
        sign = 1 if how == "+" else -1
        found: dict[tuple[str, ...], int] = {}
        for coefficient, factors in [*left._terms(), *((sign * c, f) for c, f in right._terms())]:
            found[factors] = found.get(factors, 0) + coefficient
        return [(coefficient, factors) for factors, coefficient in found.items() if coefficient]


def _made(value: int, how: Literal["+", "-", "*", "/2"], left: Size, right: Size) -> Size:
    size = Size(value)
    size._made = (how, left, right)
    return size


def as_size(value: int) -> Size:
    """A plain number as a size; a size passes."""
    return value if isinstance(value, Size) else Size(value)


def _product(left: list[Term], right: list[Term]) -> list[Term]:
    if not left or not right:
        return []
    coefficient = 1
    factors: list[str] = []
    for terms in (left, right):
        if len(terms) == 1:
            coefficient *= terms[0][0]
            factors.extend(terms[0][1])
        else:
            factors.append(_factor(terms))
    return [(coefficient, tuple(factors))]


def _factor(terms: list[Term]) -> str:
    return f"({_written(terms)})" if len(terms) > 1 else _written(terms)


def _written(terms: list[Term]) -> str:
    text = ""
    for coefficient, factors in terms:
        number = [] if abs(coefficient) == 1 and factors else [str(abs(coefficient))]
        sign = ("− " if coefficient < 0 else "+ ") if text else ("−" if coefficient < 0 else "")
        text += f"{' ' if text else ''}{sign}{'·'.join([*number, *factors])}"
    return text or "0"
