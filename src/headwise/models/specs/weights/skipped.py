"""Which matrices the lists and patterns of a ``quantization_config`` name: each quantiser matches in its own way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate

from headwise.models.specs.weights.modules import Module

_PLAIN = re.compile(r"[\w.]+")
_TEXT_PART = re.compile(r"(?:model\\?\.)?language_model\\?\.(?:model\\?\.)?")
_OTHER_LAYERS = re.compile(
    r"\b(?:transformer\\?\.h|gpt_neox\\?\.layers|model\\?\.decoder\\?\.layers|backbone\\?\.layers)"
)


@dataclass(frozen=True)
class Patterns:
    """Patterns of one quantiser. Files list hundreds of whole names, which are looked up and not tried one by one.

    For example ``by_boundary(["lm_head"])(Module("head", ("lm_head",)))`` is True.

    Attributes:
        names: whole names.
        starts: what names begin with, up to a dot or their end.
        ends: what names end with.
        expressions: what a name's beginning matches, by the pattern.
    """

    names: frozenset[str] = frozenset()
    starts: frozenset[str] = frozenset()
    ends: tuple[str, ...] = ()
    expressions: Mapping[str, re.Pattern[str]] = field(default_factory=dict)

    def __call__(self, module: Module) -> bool:
        """Whether a pattern matches one of a matrix's names."""
        return any(map(self._matches, module.names))

    def unmatched(self, modules: Iterable[Module]) -> Iterator[str]:
        """The patterns that match none of some matrices."""
        names = {name for module in modules for name in module.names}
        starts = {start for name in names for start in _starts(name)}
        for pattern in sorted({*self.names, *self.starts, *self.ends, *self.expressions}):
            is_found = (
                pattern in (names if pattern in self.names else starts)
                or (pattern in self.ends and any(name.endswith(pattern) for name in names))
                or (pattern in self.expressions and any(map(self.expressions[pattern].match, names)))
            )
            if not is_found:
                yield pattern

    def _matches(self, name: str) -> bool:
        return (
            name in self.names
            or name.endswith(self.ends)
            or (bool(self.starts) and not self.starts.isdisjoint(_starts(name)))
            or any(pattern.match(name) for pattern in self.expressions.values())
        )


def by_boundary(patterns: Sequence[str]) -> Patterns:
    """As transformers' quantisers: a pattern from the start of a name up to a dot or its end, or the end of a name.

    For example ``by_boundary(["model.layers.1"])`` matches ``model.layers.1.mlp.up_proj``, not ``model.layers.11``.
    """
    found = [_as_model(pattern) for pattern in patterns]
    plain = frozenset(pattern for pattern in found if _PLAIN.fullmatch(pattern))
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return Patterns(
        starts=plain,
        ends=tuple(pattern for pattern in plain if ".layers." not in pattern),
        expressions={each: _compiled(each, f"(?:{each}){boundary}") for each in found if each not in plain},
    )


def by_name(patterns: Sequence[str]) -> Patterns:
    """As compressed-tensors: a whole name, or behind ``re:`` an expression that a name begins with."""
    found = [_as_model(pattern) for pattern in patterns]
    return Patterns(
        names=frozenset(pattern for pattern in found if not pattern.startswith("re:")),
        expressions={each: _compiled(each, each[3:]) for each in found if each.startswith("re:")},
    )


def by_wildcard(patterns: Sequence[str]) -> Patterns:
    """As ModelOpt: a name with ``*`` for anything, or what holds it."""
    found = [_as_model(pattern) for pattern in patterns]
    return Patterns(
        starts=frozenset(pattern for pattern in found if _PLAIN.fullmatch(pattern)),
        expressions={
            each: re.compile(f"{translate(each)}|{translate(f'{each}.*')}")
            for each in found
            if not _PLAIN.fullmatch(each)
        },
    )


def _as_model(pattern: str) -> str:
    """A pattern as one for a model of text alone, whose layers are ``model.layers``."""
    return _OTHER_LAYERS.sub("model.layers", _TEXT_PART.sub("model.", pattern))


def _starts(name: str) -> Iterator[str]:
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def _compiled(pattern: str, expression: str) -> re.Pattern[str]:
    """An expression; where it is none, the pattern as it stands."""
    try:
        return re.compile(expression)
    except re.error:
        return re.compile(re.escape(pattern))
