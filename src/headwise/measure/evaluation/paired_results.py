"""A base class for measurements of a model with those of its reference, which JSON holds side by side."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Self

from headwise.base.documents import plain

_PREFIX = "reference_"


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Measurements of a model and, where there is a reference, those of the reference.

    A subclass names the numbers that JSON shows for both: ``class Score(Paired, compared=("nll",))``. In JSON each of
    them is followed by the reference's, as ``reference_nll``. These keys are also the old names of attributes, which
    still work with a DeprecationWarning.

    Attributes:
        reference: the reference's measurements, an object of this class; None without a reference.
    """

    reference: Self | None = None

    compared: ClassVar[tuple[str, ...]] = ()
    """The numbers that are followed by the reference's in JSON."""

    def __init_subclass__(cls, *, compared: Sequence[str] = (), **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.compared = tuple(compared)

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values, each compared number followed by the reference's."""
        document: dict[str, Any] = {}
        names = (field.name for field in fields(self) if field.name != "reference")
        for is_compared, group in groupby(names, key=lambda name: name in self.compared):
            neighbours = tuple(group)
            document |= {name: plain(getattr(self, name)) for name in neighbours}
            if is_compared:
                document |= {_PREFIX + name: plain(getattr(self.reference, name, None)) for name in neighbours}
        return document

    if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            number = name.removeprefix(_PREFIX)
            if number == name or number not in self.compared:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warnings.warn(f"{name} is now reference.{number}", DeprecationWarning, stacklevel=2)
            return getattr(self.reference, number, None)
