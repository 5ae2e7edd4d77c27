"""Measurements of a model with those of its reference beside them, declared once and written as flat JSON."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Self

from headwise.documents import plain

_PREFIX = "reference_"


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Measurements of a model and, where there is a reference, the same measurements of it.

    A subclass names the numbers that both have: ``class Score(Paired, compared=("nll",))``. In JSON each of them is
    followed by the reference's, as ``reference_nll``; these keys were attributes once, and still are, with a warning.

    Attributes:
        reference: the same measurements of the reference, which has none itself; None without a reference.
    """

    reference: Self | None = None

    compared: ClassVar[tuple[str, ...]] = ()
    """The numbers of this class that stand beside the reference's in JSON."""

    def __init_subclass__(cls, *, compared: Sequence[str] = (), **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.compared = tuple(compared)

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values, the reference's beside the model's."""
        document: dict[str, Any] = {}
        names = (field.name for field in fields(self) if field.name != "reference")
        for is_compared, group in groupby(names, key=lambda name: name in self.compared):
            together = tuple(group)
            document |= {name: plain(getattr(self, name)) for name in together}
            if is_compared:
                document |= {_PREFIX + name: plain(getattr(self.reference, name, None)) for name in together}
        return document

    if not TYPE_CHECKING:  # a type checker shall not take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            number = name.removeprefix(_PREFIX)
            if number == name or number not in self.compared:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warnings.warn(f"{name} is now reference.{number}", DeprecationWarning, stacklevel=2)
            return getattr(self.reference, number, None)
