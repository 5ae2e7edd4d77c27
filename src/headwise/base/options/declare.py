"""Options declared once: type, default, help and rule, for Python, the command line and a run's identity.

A class of options has a field for each. `takes_options` lets a function take them as one object or as keywords, and
writes their help into its docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Sized
from dataclasses import MISSING, dataclass, field, fields
from functools import wraps
from inspect import cleandoc
from math import isfinite
from numbers import Integral, Number
from textwrap import wrap
from typing import Any, Self, TypeVar, dataclass_transform, get_type_hints

from headwise.base.type_checks import check_types
from headwise.errors import ArgumentError

_WIDTH, _STEP = 114, "    "
"""The width of a docstring's lines, and one step of their indentation."""


@dataclass(frozen=True)
class Rule:
    """A condition on an option's value besides its type.

    Attributes:
        words: the condition as errors state it, such as ``must be at least 1``.
        holds: whether a value meets it; not called for None.
        each: whether it is a rule for each item of a collection, rather than for the whole.
    """

    words: str
    holds: Callable[[Any], bool]
    each: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that does not meet the rule; None meets every rule.

        Args:
            name: what an error calls the value.
            value: the value.

        Raises:
            ArgumentError: the value, or one of its items, does not meet the rule.
        """
        if value is None:
            return
        for one in value if self.each else (value,):
            if not self.holds(one):
                raise ArgumentError(name, one, self.words)


def at_least(least: float) -> Rule:
    """A rule that sets a lower bound for a number."""
    return Rule(f"must be at least {least}", lambda number: bool(number >= least))


def not_empty(words: str) -> Rule:
    """A rule that refuses empty collections; a single string counts as a list of one.

    Args:
        words: the rule as errors state it.
    """
    return Rule(words, lambda value: isinstance(value, str) or not isinstance(value, Sized) or len(value) > 0)


def each_of(names: Sequence[str]) -> Rule:
    """A rule for collections that may hold only some names."""
    return Rule(f"must be one of {', '.join(names)}", lambda name: name in names, each=True)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A field of an options class: its name, its type and the arguments of its `option`.

    Attributes:
        name: the keyword in Python.
        annotation: the type as it is written in the class.
        type: the type itself.
        default: ``dataclasses.MISSING`` where the option is required.
        help: the text of the option; it and the attributes below are arguments of `option`.
    """

    name: str
    annotation: str
    type: Any
    default: Any
    help: str
    metavar: str | None
    rule: Rule | None
    flag: str | None
    identity: bool


def option(
    help: str,  # noqa: A002
    *,
    default: Any = MISSING,
    metavar: str | None = None,
    rule: Rule | None = None,
    flag: str | None = None,
    identity: bool = True,
) -> Any:
    """Declare a field of an `Options` class.

    Args:
        help: a description for docstrings and ``--help``, in lower case at its beginning and without a full stop.
        default: the default value; the option is required when there is none.
        metavar: the name of the value in ``--help``; the type when None.
        rule: the rule that a value other than None must meet.
        flag: the name on the command line, such as ``--target``; derived from the field's name when None.
        identity: whether the value decides the result; False for options that only say where or how it is made.
    """
    about = {"help": help, "metavar": metavar, "rule": rule, "flag": flag, "identity": identity}
    return field(default=default, metadata={"option": about})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
class Options:
    """The base of frozen keyword-only dataclasses with fields declared by `option`; docstrings get the fields' help.

    Values are checked against their types and rules when an object is made. A subclass with a rule for several fields
    together extends ``__post_init__``. For example::

        class ReadOptions(Options):
            \"\"\"How a text is read.\"\"\"

            windows: int = option("how many windows of each text", default=6, rule=at_least(1))

    Raises:
        ArgumentError: a value has another type, or breaks its rule.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.__doc__ = "\n".join([cleandoc(cls.__doc__ or cls.__name__), "", "Args:", *help_lines(cls)])

    def __post_init__(self) -> None:
        by_name = declarations(type(self))
        values = {name: getattr(self, name) for name in by_name}
        check_types(values, {name: declaration.type for name, declaration in by_name.items()})
        for name, value in values.items():
            if (rule := by_name[name].rule) is not None:
                rule.check(name, value)
            if isinstance(value, float) and not isfinite(value):
                raise ArgumentError(name, value, "must be finite")
            # NumPy's numbers, for which JSON has no form.
            if isinstance(value, Number) and not isinstance(value, bool | int | float):
                object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))  # type: ignore[arg-type]

    @classmethod
    def of(cls, other: Options, **fields: Any) -> Self:
        """Options with the values of another object's fields of the same names, apart from fields given here."""
        shared = declarations(cls).keys() & declarations(type(other)).keys() - fields.keys()
        return cls(**{name: getattr(other, name) for name in shared}, **fields)

    def identity(self) -> dict[str, Any]:
        """The options that decide a run's result, by name."""
        return {name: getattr(self, name) for name, one in declarations(type(self)).items() if one.identity}


def declarations(kind: type[Options]) -> dict[str, Declaration]:
    """The fields of an options class by name: the class's own first, and then those of its base classes."""
    hints = get_type_hints(kind)
    return {
        one.name: Declaration(
            name=one.name,
            annotation=str(one.type),
            type=hints[one.name],
            default=one.default,
            **one.metadata["option"],
        )
        for one in _fields(kind)
    }


def help_lines(kind: type[Options]) -> list[str]:
    """The lines of a docstring's Args section for the fields of an options class, each entry ``name: help.``."""
    entries = (f"{one.name}: {one.metadata['option']['help']}." for one in _fields(kind))
    return [
        line for entry in entries for line in wrap(entry, _WIDTH, initial_indent=_STEP, subsequent_indent=2 * _STEP)
    ]


def _fields(kind: type[Options]) -> list[Any]:
    def generation(name: str) -> int:  # how many of a class's ancestors have the field, itself included
        return sum(name in getattr(ancestor, "__dataclass_fields__", ()) for ancestor in kind.__mro__)

    return sorted(fields(kind), key=lambda one: generation(one.name))  # type: ignore[arg-type]


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
