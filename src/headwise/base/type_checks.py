"""Check the types of arguments against their annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from headwise.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = {
    str: "a string",
    Path: "a path",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    NoneType: "None",
}


def checked_types(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to check its arguments against their annotations.

    A string is no collection of strings: where several values are expected, a single string is refused.

    Raises:
        ArgumentError: raised by the decorated function: an argument has another type.
    """
    signature, hints = inspect.signature(function), get_type_hints(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        with suppress(TypeError):  # an argument is missing or unknown: the call below raises Python's own error
            check_types(signature.bind(*args, **kwargs).arguments, hints)
        return function(*args, **kwargs)

    return checked


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuse a value that does not have its type.

    Args:
        values: the values by name.
        hints: the types, by the same names.

    Raises:
        ArgumentError: naming the first value that has another type.
    """
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ArgumentError(name, value, f"must be {_in_words(hints[name])}")


def _fits(value: Any, hint: Any) -> bool:
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in choices)
    if origin is Literal:
        return value in choices
    if isinstance(origin, type) and issubclass(origin, Collection):
        is_collection = isinstance(value, origin) and not isinstance(value, str | bytes)
        return is_collection and all(_fits(item, choices[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _in_words(hint: Any) -> str:
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        *others, last = (_in_words(choice) for choice in choices)
        return f"{', '.join(others)} or {last}"
    if origin is Literal:
        return " or ".join(map(str, choices))
    if isinstance(origin, type) and issubclass(origin, Collection):
        return f"several, each {_in_words(choices[0])}"
    return _WORDS.get(hint) or str(getattr(hint, "__name__", hint))
