"""The kinds of work that an attention layer is made of, counted in whole numbers that remember their formula.

A mechanism's formulas are the list of its stages. Parameters, FLOPs forward and backward and thop's count are sums
over that one list, so that no number has two formulas, and a cost and its printed formula are one expression.
Symbols: B batch, S new tokens, T all key–value tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwise.errors import ArgumentError
from headwise.models.specs.model import MatrixFormat

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


Kernel = Literal["unfused", "fused", "padded"]
KERNELS: tuple[Kernel, ...] = ("unfused", "fused", "padded")
"""Ways to compute softmax(QKᵀ)V: ``unfused`` stores the scores; ``fused`` does not, and computes them again in the
backward pass; ``padded`` is fused and pads keys and values of a head to one width, as headwise does on the CPU."""

Over = Literal["new", "source", "total", "call"]
"""A stage is done once for each of these: each new token (``new``), each token whose keys and values are computed
(``source``), each token attended to (``total``), or each sequence (``call``)."""

SOFTMAX_FLOPS = 5
"""Elementwise FLOPs of a softmax for each score: scale, subtract the maximum, exponentiate, sum, divide."""


@dataclass(frozen=True)
class Call:
    """One forward pass: how many tokens of each kind, and how many (query, key) pairs.

    Attributes:
        batch: B, the number of sequences.
        new: S, the number of tokens passed in.
        source: the number of tokens whose keys and values are computed: the new ones, in cross-attention all of the
            other sequence, or none when a cache holds them.
        total: T, the number of tokens attended to.
        pairs: the number of (query, key) pairs that are computed for one head of one sequence.
    """

    batch: Size
    new: Size
    source: Size
    total: Size
    pairs: Size

    def pairs_within(self, most: int | None) -> Size:
        """The number of pairs where a query attends to no more than ``most`` of the tokens that it may see."""
        if most is None or int(self.total) <= most:
            return self.pairs
        selected = attended_pairs(int(self.new), int(self.total), causal=True, window=most)
        return self.pairs if int(self.pairs) <= selected else Size(selected, "selected")

    def entry_pairs(self, rate: int, most: int | None = None) -> Size:
        """The number of (query, entry) pairs, with ``rate`` tokens an entry and at most ``most`` entries a query."""
        if int(self.pairs) == int(self.new) * int(self.total):  # without a mask, or of one query, which sees all
            entries = int(self.total) // rate
            pairs = int(self.new) * (entries if most is None else min(entries, most))
        else:
            pairs = attended_entries(int(self.new), int(self.total), rate, most)
        return Size(pairs, "entries" if most is None else "chosen")

    def count(self, over: Over) -> Size:
        """The number of times that a stage runs in a call, if it runs once for each ``over``."""
        if over == "call":
            return self.batch
        return self.batch * {"new": self.new, "source": self.source, "total": self.total}[over]


@dataclass(frozen=True)
class Linear:
    """A projection ``y = x Wᵀ (+ b)``; ``reads`` says whether x is the layer's input, which may need no gradient.

    ``has_gradient`` is False where nothing flows back through it.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    over: Over = "new"
    reads: Literal["input", "inner"] = "input"
    has_gradient: bool = True

    @property
    def parameters(self) -> int:
        """Numbers in the weight and the bias."""
        return self.out_features * (self.in_features + self.bias)

    def forward_flops(self, call: Call, kernel: Kernel) -> Size:
        """FLOPs of the product, without the bias."""
        return 2 * call.count(self.over) * self.in_features * self.out_features

    def backward_flops(self, call: Call, kernel: Kernel, *, input_gradient: bool) -> Size:
        """FLOPs of the weight's gradient and, where it is needed, of the input's."""
        if not self.has_gradient:
            return Size(0)
        sides = 1 if self.reads == "input" and not input_gradient else 2
        return sides * self.forward_flops(call, kernel)


@dataclass(frozen=True)
class Product:
    """A product of each head with a small matrix of its own: ``macs`` multiply-adds, ``moved`` values in and out.

    ``outputs`` are the rows of all matrices as they are stored. ``part_of`` names the stage whose weights it
    multiplies with, where it has no parameters of its own.
    """

    name: str
    macs: int
    moved: int
    over: Over = "new"
    parameters: int = 0
    outputs: int = 1
    part_of: str = ""

    def forward_flops(self, call: Call, kernel: Kernel) -> Size:
        """FLOPs of the product."""
        return 2 * call.count(self.over) * self.macs

    def backward_flops(self, call: Call, kernel: Kernel, *, input_gradient: bool) -> Size:
        """FLOPs of the gradients of both factors."""
        return 2 * self.forward_flops(call, kernel)


@dataclass(frozen=True)
class Vector:
    """Parameters whose arithmetic is elementwise and not counted: a norm's weight, sink logits."""

    name: str
    parameters: int

    def forward_flops(self, call: Call, kernel: Kernel) -> Size:
        """0: only matrix products are counted."""
        return Size(0)

    def backward_flops(self, call: Call, kernel: Kernel, *, input_gradient: bool) -> Size:
        """0, as in the forward pass."""
        return Size(0)


@dataclass(frozen=True)
class Core:
    """``softmax(QKᵀ)V`` of all heads, whose work depends on the number of pairs of tokens.

    ``can_fuse`` is False where the scores are a sum that no fused kernel computes. ``most`` is the largest number of
    tokens that a query attends to, where these are selected. With a ``rate``, a query attends to entries of ``rate``
    tokens instead of tokens.
    """

    heads: int
    qk_dim: int
    v_dim: int
    name: str = "attention"
    can_fuse: bool = True
    parameters: int = 0
    most: int | None = None
    rate: int | None = None

    def forward_flops(self, call: Call, kernel: Kernel) -> Size:
        """FLOPs of the two products over the pairs that are computed; `softmax_flops` has the softmax."""
        qk_dim, v_dim = self._widths(kernel)
        return 2 * call.batch * self.heads * self._pairs(call) * (qk_dim + v_dim)

    def backward_flops(self, call: Call, kernel: Kernel, *, input_gradient: bool) -> Size:
        """FLOPs of four products, or of five where the scores are computed again."""
        qk_dim, v_dim = self._widths(kernel)
        if kernel != "unfused" and self.can_fuse:
            pairs = self._pairs(call)
            return 2 * call.batch * self.heads * pairs * (3 * as_size(qk_dim) + 2 * as_size(v_dim))
        return 2 * self.forward_flops(call, kernel)

    def softmax_flops(self, call: Call) -> Size:
        """FLOPs of the softmax, `SOFTMAX_FLOPS` for each score."""
        return SOFTMAX_FLOPS * call.batch * self.heads * self._pairs(call)

    def _pairs(self, call: Call) -> Size:
        return call.pairs_within(self.most) if self.rate is None else call.entry_pairs(self.rate, self.most)

    def _widths(self, kernel: Kernel) -> tuple[int, int]:
        if kernel == "padded" and self.can_fuse:
            width = max(self.qk_dim, self.v_dim)
            return width, width
        return self.qk_dim, self.v_dim


@dataclass(frozen=True)
class IndexScores:
    """The scores of an indexer, which selects the tokens that a query attends to: heads' products and their sum.

    ``width`` is the width of a head; all heads share one key. With a ``rate``, entries of so many tokens are
    selected, and the sum over heads is not counted, because it is no matrix product.
    """

    heads: int
    width: int
    name: str = "index scores"
    parameters: int = 0
    rate: int | None = None

    def forward_flops(self, call: Call, kernel: Kernel) -> Size:
        """FLOPs of the products over all pairs, and of the weighted sum over heads."""
        if self.rate is not None:
            return 2 * call.batch * self.heads * call.entry_pairs(self.rate) * self.width
        return 2 * call.batch * self.heads * call.pairs * (as_size(self.width) + 1)

    def backward_flops(self, call: Call, kernel: Kernel, *, input_gradient: bool) -> Size:
        """0: a selection has no gradient."""
        return Size(0)


Stage = Linear | Product | Vector | Core | IndexScores


@dataclass(frozen=True)
class WeightsInMemory:
    """Weights in memory.

    Attributes:
        values: the number of weights.
        unquantised: the number of weights in the dtype that the model runs in.
        packed: bytes of all other weights, which are quantised.
    """

    values: float = 0
    unquantised: float = 0
    packed: float = 0

    def __add__(self, other: WeightsInMemory) -> WeightsInMemory:
        return WeightsInMemory(
            self.values + other.values, self.unquantised + other.unquantised, self.packed + other.packed
        )

    def __mul__(self, times: int) -> WeightsInMemory:
        return WeightsInMemory(self.values * times, self.unquantised * times, self.packed * times)

    def nbytes(self, width: int) -> float:
        """Bytes of all these weights, where one value of the model's dtype takes ``width`` bytes."""
        return self.unquantised * width + self.packed


def held_matrix(
    outputs: int, inputs: int, bias: int = 0, form: MatrixFormat | None = None, vector_bytes: float | None = None
) -> WeightsInMemory:
    """A matrix and its bias in memory.

    For example ``held_matrix(64, 64).nbytes(2)`` is 8,192.

    Args:
        outputs: rows of the matrix.
        inputs: columns of the matrix.
        bias: the number of values in its bias.
        form: the format of the matrix; None where it is in the model's dtype.
        vector_bytes: bytes of one value of the bias; None where it is in the model's dtype.
    """
    matrix = _held(outputs * inputs, None if form is None else form.nbytes(outputs, inputs))
    return matrix + _held(bias, None if vector_bytes is None else bias * vector_bytes)


def _held(values: int, packed: float | None) -> WeightsInMemory:
    return WeightsInMemory(values, values) if packed is None else WeightsInMemory(values, 0, packed)


def held_stage(stage: Stage, form: MatrixFormat | None = None, vector_bytes: float | None = None) -> WeightsInMemory:
    """The weights of a stage in memory; the arguments are those of `held_matrix`.

    For example ``held_stage(Linear("q_proj", 64, 64)).values`` is 4,096.
    """
    if isinstance(stage, Linear):
        outputs = int(stage.out_features)
        return held_matrix(outputs, int(stage.in_features), outputs * stage.bias, form, vector_bytes)
    if isinstance(stage, Product):
        outputs = int(stage.outputs)
        return held_matrix(outputs, int(stage.parameters) // outputs, 0, form, vector_bytes)
    return held_matrix(0, 0, int(stage.parameters), None, vector_bytes)


def check_kernel(kernel: str) -> None:
    """Raise an `ArgumentError` unless ``kernel`` is one of `KERNELS`."""
    if kernel not in KERNELS:
        raise ArgumentError("kernel", kernel, f"must be one of {', '.join(KERNELS)}")


def attended_pairs(
    new_tokens: int, total_tokens: int, *, causal: bool, window: int | None = None, chunked: bool = False
) -> int:
    """The number of (query, key) pairs that a causal mask and a window allow, for one head of one sequence.

    For example ``attended_pairs(2, 4, causal=True)`` is 7.

    The causal mask is bottom-right: the last of S queries sees all T keys. A query at position i (counted from 1)
    sees ``min(i, window)`` keys with it, and T without; in chunks of ``window`` tokens it sees ``(i - 1) % window +
    1``.
    """
    if not causal:
        return new_tokens * total_tokens
    if chunked and window is not None:
        return _within_chunks(total_tokens, window) - _within_chunks(total_tokens - new_tokens, window)
    first = total_tokens - new_tokens + 1
    if window is None or window >= total_tokens:
        return new_tokens * (first + total_tokens) // 2
    growing_last = min(window, total_tokens)
    if first >= growing_last:
        return new_tokens * window
    growing = growing_last - first + 1
    return growing * (first + growing_last) // 2 + (new_tokens - growing) * window


def attended_entries(new_tokens: int, total_tokens: int, rate: int, most: int | None = None) -> int:
    """The number of (query, entry) pairs, where an entry stands for ``rate`` tokens and is seen from its last one on.

    For example ``attended_entries(2, 8, 4)`` is 3: the seventh token sees one entry, and the eighth two.

    Args:
        new_tokens: S, the queries, which are the last tokens.
        total_tokens: T, all tokens attended to.
        rate: the number of tokens that one entry stands for.
        most: the most entries that a query attends to.
    """

    def seen(tokens: int) -> int:
        growing = tokens if most is None else min(tokens, rate * (most + 1) - 1)
        whole, rest = divmod(growing, rate)
        return rate * whole * (whole - 1) // 2 + whole * (rest + 1) + (tokens - growing) * (most or 0)

    return seen(total_tokens) - seen(total_tokens - new_tokens)


def _within_chunks(tokens: int, chunk: int) -> int:
    """The number of pairs of a text's first ``tokens`` tokens, each with the tokens of its own chunk up to itself."""
    whole, rest = divmod(tokens, chunk)
    return (whole * chunk * (chunk + 1) + rest * (rest + 1)) // 2
