"""Whole numbers that remember the formula they came from, so that a cost and its formula are one expression."""

from __future__ import annotations


class Size(int):
    """An int with a formula: sums and products of sizes have the sum or product of their formulas.

    Plain ints take part as the number they are; adding 0 and multiplying by 1 leave no trace. ``symbols`` are the
    values of the formula's letters.

    >>> E, H, D = Size(4096, "E"), Size(32, "H"), Size(128, "D")
    >>> flops = 2 * E * (H * D + 64)
    >>> int(flops), flops.formula
    (34078720, '2·E·(H·D + 64)')
    """

    formula: str
    symbols: dict[str, int]
    _is_sum: bool

    def __new__(cls, value: int, symbol: str | None = None) -> Size:
        """A size of this value, with a letter for its formula, or its digits when none is given."""
        if symbol is None:
            return cls._of(value, str(int(value)), {})
        return cls._of(value, symbol, {symbol: int(value)})

    @classmethod
    def _of(cls, value: int, formula: str, symbols: dict[str, int], *, is_sum: bool = False) -> Size:
        size = super().__new__(cls, value)
        size.formula, size.symbols, size._is_sum = formula, symbols, is_sum
        return size

    def halved(self) -> Size:
        """Half of it, where that is a whole number."""
        assert not int(self) % 2
        return Size._of(int(self) // 2, f"{self._factor()}/2", self.symbols)

    def __add__(self, other: int) -> Size:
        other = _size(other)
        if _is_number(other, 0):
            return self
        if _is_number(self, 0):
            return other
        if self.formula == other.formula and int(self) == int(other):
            return 2 * self
        formula = f"{self.formula} + {other.formula}"
        return Size._of(int(self) + int(other), formula, self.symbols | other.symbols, is_sum=True)

    def __radd__(self, other: int) -> Size:
        return _size(other) + self

    def __sub__(self, other: int) -> Size:
        other = _size(other)
        if _is_number(other, 0):
            return self
        formula = f"{self.formula} − {other._factor()}"
        return Size._of(int(self) - int(other), formula, self.symbols | other.symbols, is_sum=True)

    def __mul__(self, other: int) -> Size:
        other = _size(other)
        if _is_number(other, 1) or _is_number(self, 0):
            return self
        if _is_number(self, 1) or _is_number(other, 0):
            return other
        (number, factors), (more, others) = self._factors(), other._factors()
        coefficient = [str(number * more)] if number * more != 1 else []
        formula = "·".join([*coefficient, *factors, *others])
        return Size._of(int(self) * int(other), formula, self.symbols | other.symbols)

    def __rmul__(self, other: int) -> Size:
        return _size(other) * self

    def _factor(self) -> str:
        return f"({self.formula})" if self._is_sum else self.formula

    def _factors(self) -> tuple[int, list[str]]:
        """The formula as a number and the factors after it."""
        if not self._is_sum:
            head, _, rest = self.formula.partition("·")
            if head.isdecimal():
                return int(head), [rest] if rest else []
        return 1, [self._factor()]


def _size(value: int) -> Size:
    return value if isinstance(value, Size) else Size(value)


def _is_number(size: Size, value: int) -> bool:
    """Whether it is this number and not a symbol that happens to have its value."""
    return int(size) == value and size.formula == str(value)
