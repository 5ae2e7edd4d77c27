"""Functions that take their options as one object or as keywords, and show every keyword either way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from typing import Any, TypeVar

from headwise.options.declare import Options, declarations, help_lines

R = TypeVar("R")


def takes_options(kind: type[Options]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let callers give a function's ``options``, an object of a kind, as keywords; its body always gets the object.

    ``inspect.signature`` and ``help`` show the keywords with their types, defaults and help. For example::

        @takes_options(ReadOptions)
        def read(text: str, options: ReadOptions, *, progress: Progress = silent) -> Reading: ...

        read("a.txt", windows=3)
        read("a.txt", ReadOptions(windows=3))

    Args:
        kind: the options class. The function's docstring has an entry ``options:`` in its Args; the entries of the
            keywords are put behind it.

    Raises:
        TypeError: by the function, in Python's words: a keyword is unknown or missing, or stands beside an object.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)
        place = list(signature.parameters).index("options")

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            given = {name: keywords.pop(name) for name in list(keywords) if name not in signature.parameters}
            options = args[place] if len(args) > place else keywords.pop("options", None)
            if options is None:
                options = _made(kind, given, function.__name__)
            elif given:
                raise TypeError(f"{function.__name__}() takes options or keywords, not both: {', '.join(given)}")
            return function(*args[:place], *args[place + 1 :], options=options, **keywords)

        call.__signature__ = _with_keywords(signature, kind)  # type: ignore[attr-defined]
        call.__doc__ = function.__doc__ and _with_help(function.__doc__, kind)
        return call

    return decorate


def _made(kind: type[Options], given: dict[str, Any], name: str) -> Options:
    """The object of these keywords; what is unknown or missing is told as of the function."""
    try:
        return kind(**given)
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
    shown = list[inspect.Parameter]()
    for parameter in signature.parameters.values():
        if parameter.name == "options":
            parameter = parameter.replace(default=None, annotation=f"{parameter.annotation} | None")  # noqa: PLW2901
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            shown, keywords = shown + keywords, []
        shown.append(parameter)
    return signature.replace(parameters=shown + keywords)


def _with_help(docstring: str, kind: type[Options]) -> str:
    lines = inspect.cleandoc(docstring).splitlines()
    behind = next(at for at, line in enumerate(lines) if line.startswith("    options:")) + 1
    while behind < len(lines) and lines[behind].startswith("     "):
        behind += 1
    return "\n".join([*lines[:behind], *help_lines(kind), *lines[behind:]])
