"""A run's options, declared once: types, defaults, help and rules for Python, the command line and run identity."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import MISSING, dataclass, field, fields
from inspect import cleandoc
from textwrap import wrap
from typing import Any, dataclass_transform, get_type_hints

from headwise.errors import ArgumentError
from headwise.type_checks import check_types

_WIDTH, _STEP = 114, "    "
"""The width of a docstring's lines, and one step of their indentation."""


@dataclass(frozen=True)
class Rule:
    """A rule that a value keeps besides its type.

    Attributes:
        words: the rule as an error says it, such as ``must be at least 1``.
        holds: whether a value keeps it; None is never asked about.
    """

    words: str
    holds: Callable[[Any], bool]


def at_least(least: float) -> Rule:
    """A number's lower bound."""
    return Rule(f"must be at least {least}", lambda number: bool(number >= least))


def not_empty(words: str) -> Rule:
    """A collection that holds something; a single string is as good as one in a list."""
    return Rule(words, lambda value: isinstance(value, str) or not isinstance(value, Sized) or len(value) > 0)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A field of an options class: the arguments of its `option`, its name and its type.

    Attributes:
        name: the keyword in Python.
        annotation: its type as it is written.
        type: its type.
        default: ``dataclasses.MISSING`` where it has to be given.
        help: see `option`; likewise the others.
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
    """A field of an `Options` class.

    Args:
        help: what it is, for docstrings and ``--help``: it begins in lower case and has no full stop.
        default: its value where it is not given; without one it has to be.
        metavar: what ``--help`` calls its value; its type when None.
        rule: what a value that is not None must be.
        flag: its name on the command line, such as ``--target`` or ``--plot/--no-plot``; made from the field's when
            None.
        identity: whether another value makes another result; False for what only says where or how it is made.
    """
    about = {"help": help, "metavar": metavar, "rule": rule, "flag": flag, "identity": identity}
    return field(default=default, metadata={"option": about})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
class Options:
    """A frozen keyword-only dataclass whose fields are made by `option`; its docstring gets their help.

    Values are held to their types and rules when an object is made. A subclass that holds several fields to each
    other extends ``__post_init__``. For example::

        class ReadOptions(Options):
            \"\"\"How a text is read.\"\"\"

            windows: int = option("how many windows of each text", default=6, rule=at_least(1))

    Raises:
        ArgumentError: a value is of another type, or breaks its rule.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.__doc__ = "\n".join([cleandoc(cls.__doc__ or cls.__name__), "", "Args:", *help_lines(cls)])

    def __post_init__(self) -> None:
        declared = declarations(type(self))
        values = {name: getattr(self, name) for name in declared}
        check_types(values, {name: one.type for name, one in declared.items()})
        for name, value in values.items():
            one = declared[name]
            if one.rule is not None and value is not None and not one.rule.holds(value):
                raise ArgumentError(name, value, one.rule.words)

    def identity(self) -> dict[str, Any]:
        """The options that tell this run's result from another's, by name."""
        return {name: getattr(self, name) for name, one in declarations(type(self)).items() if one.identity}


def declarations(kind: type[Options]) -> dict[str, Declaration]:
    """An options class's fields by name: its own first, and then those of the classes it is made from."""
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
    """The entries of an options class's fields in the Args section of a docstring, each ``name: help.``."""
    entries = (f"{one.name}: {one.metadata['option']['help']}." for one in _fields(kind))
    return [
        line for entry in entries for line in wrap(entry, _WIDTH, initial_indent=_STEP, subsequent_indent=2 * _STEP)
    ]


def _fields(kind: type[Options]) -> list[Any]:
    def generation(name: str) -> int:  # how many of a class's ancestors have the field, itself included
        return sum(name in getattr(ancestor, "__dataclass_fields__", ()) for ancestor in kind.__mro__)

    return sorted(fields(kind), key=lambda one: generation(one.name))  # type: ignore[arg-type]
