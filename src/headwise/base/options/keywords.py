"""A decorator for functions that take their options as one object or as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from typing import Any, TypeVar

from headwise.base.options.declare import Options, declarations, help_lines

R = TypeVar("R")


def takes_options(kind: type[Options]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let callers pass the fields of a function's ``options`` as keywords; the function gets the object either way.

    ``inspect.signature`` and ``help`` show the keywords with their types, defaults and help. For example::

        @takes_options(ReadOptions)
        def read(text: str, options: ReadOptions, *, progress: Progress = silent) -> Reading: ...

        read("a.txt", windows=3)
        read("a.txt", ReadOptions(windows=3))

    Args:
        kind: the options class. The function's docstring must have an entry ``options:`` in its Args, after which the
            entries of the keywords are inserted.

    Raises:
        TypeError: raised by the decorated function: a keyword is unknown or missing, or passed beside an object.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)
        place = list(signature.parameters).index("options")

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            fields = {name: keywords.pop(name) for name in list(keywords) if name not in signature.parameters}
            options = args[place] if len(args) > place else keywords.pop("options", None)
            if options is None:
                options = _build(kind, fields, function.__name__)
            elif fields:
                raise TypeError(f"{function.__name__}() takes options or keywords, not both: {', '.join(fields)}")
            return function(*args[:place], *args[place + 1 :], options=options, **keywords)

        call.__signature__ = _with_keywords(signature, kind)  # type: ignore[attr-defined]
        call.__doc__ = function.__doc__ and _with_help(function.__doc__, kind)
        return call

    return decorate


def _build(kind: type[Options], keywords: dict[str, Any], name: str) -> Options:
    """Make the options object; errors about keywords name the function ``name`` rather than the class.

    Raises:
        TypeError: a keyword is unknown or missing.
    """
    try:
        return kind(**keywords)
    except TypeError as error:
        raise TypeError(str(error).replace(f"{kind.__qualname__}.__init__()", f"{name}()", 1)) from None


def _with_keywords(signature: inspect.Signature, kind: type[Options]) -> inspect.Signature:
    keywords = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=one.annotation,
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in declarations(kind).values()
    ]
    parameters = list[inspect.Parameter]()
    for parameter in signature.parameters.values():
        if parameter.name == "options":
            parameter = parameter.replace(default=None, annotation=f"{parameter.annotation} | None")  # noqa: PLW2901
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            parameters, keywords = parameters + keywords, []
        parameters.append(parameter)
    return signature.replace(parameters=parameters + keywords)


def _with_help(docstring: str, kind: type[Options]) -> str:
    lines = inspect.cleandoc(docstring).splitlines()
    end = next(at for at, line in enumerate(lines) if line.startswith("    options:")) + 1
    while end < len(lines) and lines[end].startswith("     "):  # the entry's further lines
        end += 1
    return "\n".join([*lines[:end], *help_lines(kind), *lines[end:]])
