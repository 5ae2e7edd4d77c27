"""Whole numbers that remember their formula, so that a cost and its formula are one expression."""

from __future__ import annotations

from typing import Literal

Term = tuple[int, tuple[str, ...]]
"""A coefficient and the factors after it."""


class Size(int):
    """An int with a formula: sums, differences and products of sizes remember their operands.

    Plain ints appear in formulas as numbers. A formula is written only when it is asked for.

    >>> E, H, D = Size(4096, "E"), Size(32, "H"), Size(128, "D")
    >>> flops = 2 * E * (H * D + H * D + 64)
    >>> int(flops), flops.formula
    (67633152, '2·E·(2·H·D + 64)')
    """

    _origin: str | tuple[Literal["+", "-", "*", "/2"], Size, Size] | None

    def __new__(cls, value: int, symbol: str | None = None) -> Size:
        """Make a size of this value, named by a letter or, without one, a plain number."""
        size = super().__new__(cls, value)
        size._origin = symbol
        return size

    @property
    def formula(self) -> str:
        """The formula, such as ``2·E·(H·D + 64)``."""
        return _format_terms(self._terms())

    @property
    def symbols(self) -> dict[str, int]:
        """The letters of the formula and their values."""
        if isinstance(self._origin, tuple):
            return self._origin[1].symbols | self._origin[2].symbols
        return {} if self._origin is None else {self._origin: int(self)}

    def halved(self) -> Size:
        """Half of an even size."""
        assert not int(self) % 2
        return _combine(int(self) // 2, "/2", self, self)

    def __add__(self, other: int) -> Size:
        return _combine(int(self) + int(other), "+", self, as_size(other))

    def __radd__(self, other: int) -> Size:
        return _combine(int(other) + int(self), "+", as_size(other), self)

    def __sub__(self, other: int) -> Size:
        return _combine(int(self) - int(other), "-", self, as_size(other))

    def __mul__(self, other: int) -> Size:
        return _combine(int(self) * int(other), "*", self, as_size(other))

    def __rmul__(self, other: int) -> Size:
        return _combine(int(other) * int(self), "*", as_size(other), self)

    def _terms(self) -> list[Term]:
        """The formula as a sum, with like terms combined."""
        if self._origin is None:
            return [(int(self), ())] if self else []
        if isinstance(self._origin, str):
            return [(1, (self._origin,))]
        how, left, right = self._origin
        if how == "/2":
            return [(1, (f"{_factor(left._terms())}/2",))]
        if how == "*":
            return _product(left._terms(), right._terms())
        sign = 1 if how == "+" else -1
        coefficients: dict[tuple[str, ...], int] = {}
        for coefficient, factors in [*left._terms(), *((sign * c, f) for c, f in right._terms())]:
            coefficients[factors] = coefficients.get(factors, 0) + coefficient
        return [(coefficient, factors) for factors, coefficient in coefficients.items() if coefficient]


def _combine(value: int, how: Literal["+", "-", "*", "/2"], left: Size, right: Size) -> Size:
    size = Size(value)
    size._origin = (how, left, right)
    return size


def as_size(value: int) -> Size:
    """Make a plain number a size; a size stays as it is."""
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
    return f"({_format_terms(terms)})" if len(terms) > 1 else _format_terms(terms)


def _format_terms(terms: list[Term]) -> str:
    text = ""
    for coefficient, factors in terms:
        number = [] if abs(coefficient) == 1 and factors else [str(abs(coefficient))]
        sign = ("− " if coefficient < 0 else "+ ") if text else ("−" if coefficient < 0 else "")
        text += f"{' ' if text else ''}{sign}{'·'.join([*number, *factors])}"
    return text or "0"
