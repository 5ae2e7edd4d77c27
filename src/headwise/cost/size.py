"""Whole numbers that remember the formula they came from, so that a cost and its formula are one expression."""

from __future__ import annotations


class Size(int):
    """An int with a formula: sums and products of sizes have the sum or product of their formulas.

    Plain ints take part as the number they are; adding 0 and multiplying by 1 leave no trace.

    >>> E, H, D = Size(4096, "E"), Size(32, "H"), Size(128, "D")
    >>> flops = 2 * E * (H * D + 64)
    >>> int(flops), flops.formula
    (34078720, '2·E·(H·D + 64)')
    """

    formula: str
    _is_sum: bool

    def __new__(cls, value: int, formula: str | None = None, *, is_sum: bool = False) -> Size:
        """A size of this value; its formula is its digits when none is given."""
        size = super().__new__(cls, value)
        size.formula = str(int(value)) if formula is None else formula
        size._is_sum = is_sum
        return size

    def __add__(self, other: int) -> Size:
        other = _size(other)
        if _is_number(other, 0):
            return self
        if _is_number(self, 0):
            return other
        return Size(int(self) + int(other), f"{self.formula} + {other.formula}", is_sum=True)

    def __radd__(self, other: int) -> Size:
        return _size(other) + self

    def __sub__(self, other: int) -> Size:
        other = _size(other)
        return Size(int(self) - int(other), f"{self.formula} − {other._factor()}", is_sum=True)

    def __mul__(self, other: int) -> Size:
        other = _size(other)
        if _is_number(other, 1) or _is_number(self, 0):
            return self
        if _is_number(self, 1) or _is_number(other, 0):
            return other
        return Size(int(self) * int(other), f"{self._factor()}·{other._factor()}")

    def __rmul__(self, other: int) -> Size:
        return _size(other) * self

    def _factor(self) -> str:
        return f"({self.formula})" if self._is_sum else self.formula


def _size(value: int) -> Size:
    return value if isinstance(value, Size) else Size(value)


def _is_number(size: Size, value: int) -> bool:
    """Whether it is this number and not a symbol that happens to have its value."""
    return int(size) == value and size.formula == str(value)
