"""The formats in which a model's weights are stored, where these are not one dtype for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

Formats = tuple[tuple[str, "MatrixFormat"], ...]
"""The format of each matrix that has one of its own, by the name of its stage in `headwise.cost`; those of a
feed-forward network stand behind the name of its part, as in ``experts up_proj``."""


@dataclass(frozen=True, kw_only=True)
class MatrixFormat:
    """The memory that a matrix takes: its values, and scales and zero points beside them.

    For example ``MatrixFormat(name="mxfp4", bits=4, block=(1, 32), scale_bits=8).nbytes(64, 64)`` is 2176.

    Attributes:
        name: the format's name in reports.
        bits: the bits of one value.
        block: the numbers of outputs and of inputs that share a scale; None for all of them.
        scale_bits: the bits of one block's scale and zero point.
        input_bits: the bits that each input takes besides, for the number of its group.
        matrix_bytes: the bytes that a whole matrix takes besides, such as a table.
    """

    name: str
    bits: float
    block: tuple[int | None, int | None] = (None, None)
    scale_bits: float = 0
    input_bits: int = 0
    matrix_bytes: int = 0

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix of ``outputs`` rows and ``inputs`` columns."""
        rows, columns = self.block
        blocks = -(-outputs // (rows or outputs)) * -(-inputs // (columns or inputs))
        bits = outputs * inputs * self.bits + blocks * self.scale_bits + inputs * self.input_bits
        return int(-(-bits // 8)) + self.matrix_bytes


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The formats of a model's matrices; what has none is in the dtype that the model runs in.

    For example ``read_spec("gpt-oss-20b").stored.scheme`` is ``"mxfp4"``.

    Attributes:
        scheme: the scheme's name in reports.
        kinds: the different sets of formats that layers have, each once.
        layers: the index in ``kinds`` of each layer's set.
        outside: the formats of ``embedding`` and ``head``.
        vector_bytes: the bytes of one value of norms and biases; None where these are in the model's dtype.
        is_bound: whether some matrices are stored in an unknown format of fewer bits, so that their count in the
            dtype is an upper bound.
        notes: remarks on what is not known of the formats, for reports.
    """

    scheme: str
    kinds: tuple[Formats, ...]
    layers: tuple[int, ...]
    outside: Formats = ()
    vector_bytes: float | None = None
    is_bound: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def of_layers(
        cls,
        scheme: str,
        layers: Sequence[Mapping[str, MatrixFormat]],
        outside: Mapping[str, MatrixFormat],
        *,
        vector_bytes: float | None = None,
        is_bound: bool = False,
        notes: tuple[str, ...] = (),
    ) -> Self:
        """Make the stored weights of a model from the formats of each layer."""
        each = [tuple(sorted(formats.items(), key=lambda item: item[0])) for formats in layers]
        kinds = tuple(dict.fromkeys(each))
        places = {formats: place for place, formats in enumerate(kinds)}
        return cls(
            scheme=scheme,
            kinds=kinds,
            layers=tuple(places[formats] for formats in each),
            outside=tuple(outside.items()),
            vector_bytes=vector_bytes,
            is_bound=is_bound,
            notes=notes,
        )

    def counted(self, dtype: str) -> str:
        """A phrase for reports on how weights are counted, where those without a format are in a dtype."""
        dtype = dtype.removeprefix("torch.")
        if not any((*self.kinds, self.outside)):
            return dtype
        return self.scheme if self.vector_bytes is not None else f"{self.scheme}, the rest {dtype}"

    def warnings(self) -> tuple[str, ...]:
        """What is not known of the formats, in sentences."""
        bound = ("what is not known of the weights counts in the dtype, which is an upper bound",)
        return (*self.notes, *(bound if self.is_bound else ()))
