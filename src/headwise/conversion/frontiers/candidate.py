"""A candidate of a frontier, and how a user spells its target.

A target is a conversion (``mla:0.5``), a format that the source's own cache is stored in (``kivi4``), or a conversion
with its cache in codes, of so many of the bytes of the source's cache in bfloat16 (``mla@0.25``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headwise.conversion.methods import Method, all_methods, find_method
from headwise.costs.formulas.target import Target, parse_target, target_options
from headwise.errors import ArgumentError, HeadwiseError
from headwise.runtime.quantization.formats import ENGINES, parse_format

Kind = Literal["quantised", "converted", "both", "published"]
"""What is done to the cache: the source's own in fewer bits, a conversion, or a conversion with a cache in codes.

``published`` is a method of others that is no candidate of `headwise.frontier`: its results are measured elsewhere.
"""

TARGETS = (
    "a conversion, such as mla:0.5, gqa:2, mqa or mla@0.25, or a format of the cache, such as int8 or llama.cpp:q4_0;"
    " docs/frontier.md has all"
)
"""The kinds of targets, in words."""


class Tried(Protocol):
    """What a point needs of what was tried; see `Candidate`."""

    @property
    def target(self) -> str:
        """Its name."""

    @property
    def kind(self) -> Kind:
        """What is done to the cache."""

    @property
    def way(self) -> str:
        """The method, in words."""


@dataclass(frozen=True)
class Candidate:
    """One conversion, or one format of the source's cache, to try.

    Attributes:
        target: as `read_target` spells it.
        method: the spelling of a method; headwise's own when None.
        without: the stages to leave out.
    """

    target: str
    method: str | None = None
    without: tuple[str, ...] = ()

    @property
    def cache(self) -> str | None:
        """The format that the source's own cache is stored in; None for a conversion."""
        return self.target if _is_format(self.target) else None

    @property
    def kind(self) -> Kind:
        """What is done to the cache."""
        mechanism, _, fraction = self.target.partition("@")
        if self.cache is not None or mechanism == "same":
            return "quantised"
        return "both" if fraction else "converted"

    @property
    def way(self) -> str:
        """The method and the missing stages, in words."""
        if self.cache is not None:
            return "plain quantisation"
        if self.method is not None:
            return self.method
        if self._is_without_any_stage:
            return "headwise without any stage"
        return " ".join(("headwise", *(("without", ", ".join(self.without)) if self.without else ())))

    @property
    def _is_without_any_stage(self) -> bool:
        """Whether all stages of headwise's own method for the target are left out."""
        mechanism = self.parsed().mechanism
        defaults = (method for method in all_methods() if method.is_default and mechanism in method.targets)
        return any(set(self.without) == set(method.stages) for method in defaults if method.stages)

    @property
    def parsed_method(self) -> Method | None:
        """The method; None for headwise's own."""
        return None if self.method is None else find_method(self.method)

    @property
    def is_variant(self) -> bool:
        """Whether it is one of several variants of a method, of which the best is shown."""
        return self.parsed_method is not None and bool(self.parsed_method.variants)

    @property
    def slug(self) -> str:
        """A name for files, which tells it from other candidates."""
        parts = (self.target, *([] if self.way in ("headwise", "plain quantisation") else [self.way]))
        return re.sub(r"[^a-z0-9.+@]+", "-", "-".join(parts))

    def options(self) -> dict[str, Any]:
        """The arguments of `headwise.convert` for a conversion."""
        return {**target_options(self.target), "method": self.method, "without": self.without}

    def parsed(self) -> Target:
        """The target of a conversion as a `Target`."""
        return parse_target(**target_options(self.target))


def read_target(text: str) -> str:
    """A user's target in its one spelling, such as ``mla:0.5`` for ``MLA: .50`` and ``int8`` for ``int8/int8``.

    Raises:
        ArgumentError: it is no target.
    """
    target = re.sub(r"\s", "", text).lower()
    if _is_format(target) or target.partition(":")[0] in ENGINES:
        return str(parse_format(target, name="target"))
    mechanism, at, fraction = target.partition("@")
    kind, _, size = mechanism.partition(":")
    try:
        if kind == "mla" and "+" in size:
            rank, rope = map(int, size.split("+"))
            mechanism = f"mla:{rank}+{rope}"
        elif kind == "mla" and not (at and mechanism == "mla"):  # a budget of bytes needs no other
            mechanism = f"mla:{float(size):.12g}"
        elif kind == "gqa":
            mechanism = f"gqa:{int(size)}"
        target = f"{mechanism}@{float(fraction):.12g}" if at else mechanism
        parse_target(**target_options(target))
    except (ValueError, OverflowError) as error:
        rule = f"must be {TARGETS}"
        if isinstance(error, HeadwiseError) and error.field != "to":  # a size of a known kind
            rule = f"{error.field} {error.rule}"
        raise ArgumentError("target", text, rule) from None
    return target


def _is_format(target: str) -> bool:
    """Whether a target is a format of the source's own cache."""
    try:
        parse_format(target)
    except ArgumentError:
        return False
    return True
