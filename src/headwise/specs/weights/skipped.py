"""Which matrices the lists and patterns of a ``quantization_config`` name: each quantiser matches in its own way."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from headwise.specs.weights.modules import Module

Matcher = Callable[[Module], bool]

_PLAIN = re.compile(r"[\w.]+")


def by_boundary(patterns: Sequence[str]) -> Matcher:
    """As transformers' quantisers: a pattern from the start of a name up to a dot or its end, or the end of a name.

    For example ``by_boundary(["model.layers.1"])`` matches ``model.layers.1.mlp.up_proj``, not ``model.layers.11``.
    """
    # Files list hundreds of whole names: a set is asked for these, and every other pattern is tried by itself.
    whole = {pattern for pattern in patterns if _PLAIN.fullmatch(pattern)}
    ends = tuple(pattern for pattern in patterns if ".layers." not in pattern and ".h." not in pattern)
    others = [re.compile(rf"(?:{_text(pattern)})(?:(?<=\.)|(?=\.|$))") for pattern in patterns if pattern not in whole]

    def matches(name: str) -> bool:
        parts = name.split(".")
        starts = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return (
            any(start in whole for start in starts)
            or name.endswith(ends)
            or any(pattern.match(name) for pattern in others)
        )

    return lambda module: any(map(matches, module.names))


def by_name(patterns: Sequence[str]) -> Matcher:
    """As compressed-tensors: a whole name, or behind ``re:`` an expression that a name begins with."""
    whole = {pattern for pattern in patterns if not pattern.startswith("re:")}
    others = [re.compile(_text(pattern[3:])) for pattern in patterns if pattern.startswith("re:")]

    def matches(name: str) -> bool:
        return name in whole or any(pattern.match(name) for pattern in others)

    return lambda module: any(map(matches, module.names))


def by_wildcard(patterns: Sequence[str]) -> Matcher:
    """As ModelOpt: a name with ``*`` for anything, or what holds it."""

    def matches(name: str) -> bool:
        return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)

    return lambda module: any(map(matches, module.names))


def _text(pattern: str) -> str:
    """A pattern as an expression; one that is none stands for itself."""
    try:
        re.compile(pattern)
    except re.error:
        return re.escape(pattern)
    return pattern
