"""A typer command's parameters, made from an options class: each field becomes an option or a flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from headwise.errors import ArgumentError
from headwise.options import Declaration, Options, declarations

_NO = "no_"
"""Begins the name of the parameter whose flag sets a field to False."""


def takes_options(kind: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a typer command that takes ``options``, an object of a kind, an option for each of the kind's fields.

    The field's type decides: ``bool`` makes a flag, ``Sequence[str]`` an option that may be repeated, and
    ``bool | str`` an option and a flag ``--no-…`` that stands for False. For example::

        @app.command()
        @takes_options(ReadOptions)
        def read(source: Annotated[str, typer.Argument()], options: ReadOptions, as_json: Json = False) -> None: ...

    Args:
        kind: the options class. What is left out on the command line has the default of its field.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters = list[inspect.Parameter]()
        for name, parameter in inspect.signature(command).parameters.items():
            if name == "options":
                parameters += [each for one in declarations(kind).values() for each in _parameters(one)]
            else:
                parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

        @wraps(command)
        def run(**given: Any) -> None:
            others = {name: given.pop(name) for name in hints if name in given}
            command(**others, options=kind(**_values(kind, given)))

        # typer reads the signature, and its types a second time.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameters(one: Declaration) -> list[inspect.Parameter]:
    """The command's parameters for one field: a second one where a flag stands for False beside a value."""
    kinds = _alternatives(one.type)
    dashed = one.name.replace("_", "-")
    text = (one.help[0].upper() + one.help[1:]).replace("``", "")
    if kinds == {bool}:
        flag = one.flag or (f"--{dashed}/--no-{dashed}" if one.default is True else f"--{dashed}")
        return [_parameter(one.name, bool, one.default, typer.Option(flag, help=f"{text}."))]
    several = next((get_args(kind)[0] for kind in kinds if isinstance(get_origin(kind), type)), None)
    scalars = kinds if several is None else _alternatives(several)
    scalar = next((number for number in (int, float) if number in scalars), str)
    about = typer.Option(
        *([one.flag] if one.flag else []),
        metavar=one.metavar,
        help=f"{text}{'' if several is None else '; may be repeated'}.",
        show_default=one.default is not MISSING,
    )
    default = one.default if one.default is MISSING or type(one.default) is scalar else None
    value: Any = scalar if several is None else list[scalar]  # type: ignore[valid-type]
    parameters = [_parameter(one.name, value if default is MISSING else value | None, default, about)]
    if bool in kinds:
        no = typer.Option(f"--no-{dashed}", help=f"Leave it out; goes without --{dashed}.")
        parameters.append(_parameter(_NO + one.name, bool, False, no))
    return parameters


def _parameter(name: str, value: Any, default: Any, about: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[value, about], default=default
    )


def _alternatives(hint: Any) -> set[Any]:
    """The types that a field may have, None apart."""
    is_union = get_origin(hint) in (Union, UnionType)
    return {choice for choice in (get_args(hint) if is_union else (hint,)) if choice is not NoneType}


def _values(kind: type[Options], given: dict[str, Any]) -> dict[str, Any]:
    """The fields that were given on the command line; lists that nothing was put in are not among them."""
    values = {name: value for name, value in given.items() if value not in (None, [], ())}
    for name in declarations(kind):
        if values.pop(_NO + name, False):
            if name in values:
                raise ArgumentError(name, values[name][0], f"goes without --no-{name.replace('_', '-')}")
            values[name] = False
    return values
