"""Parameters of a typer command from an options class: each field becomes an option or a flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from headwise.base.options import Declaration, Options, declarations
from headwise.errors import ArgumentError

_NO = "no_"
"""Prefix of a parameter whose flag sets a field to False."""


def takes_options(kind: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a typer command a command-line option for each field of its ``options``.

    A field's type decides the form: ``bool`` makes a flag, ``Sequence[str]`` an option that may be repeated, and
    ``bool | str`` an option and a flag ``--no-…`` for False. For example::

        @app.command()
        @takes_options(ReadOptions)
        def read(source: Annotated[str, typer.Argument()], options: ReadOptions, as_json: Json = False) -> None: ...

    Args:
        kind: the options class; its defaults apply to options that are left out on the command line.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters = list[inspect.Parameter]()
        for name, parameter in inspect.signature(command).parameters.items():
            if name == "options":
                for declaration in declarations(kind).values():
                    parameters += _parameters(declaration)
            else:
                parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

        @wraps(command)
        def run(**arguments: Any) -> None:
            others = {name: arguments.pop(name) for name in hints if name in arguments}
            command(**others, options=kind(**_values(kind, arguments)))

        # typer reads the signature, and the types from the annotations.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameters(declaration: Declaration) -> list[inspect.Parameter]:
    """The command's parameters for one field: two where a field takes a value and has a flag for False."""
    kinds = _alternatives(declaration.type)
    dashed = declaration.name.replace("_", "-")
    text = (declaration.help[0].upper() + declaration.help[1:]).replace("``", "")
    if kinds == {bool}:
        flag = declaration.flag or (f"--{dashed}/--no-{dashed}" if declaration.default is True else f"--{dashed}")
        return [_parameter(declaration.name, bool, declaration.default, typer.Option(flag, help=f"{text}."))]
    item = next((get_args(kind)[0] for kind in kinds if isinstance(get_origin(kind), type)), None)
    scalars = kinds if item is None else _alternatives(item)
    scalar = next((number for number in (int, float) if number in scalars), str)
    option = typer.Option(
        *([declaration.flag] if declaration.flag else []),
        metavar=declaration.metavar,
        help=f"{text}{'' if item is None else '; may be repeated'}.",
        show_default=declaration.default is not MISSING,
    )
    is_kept = declaration.default is MISSING or type(declaration.default) is scalar
    default = declaration.default if is_kept else None
    value: Any = scalar if item is None else list[scalar]  # type: ignore[valid-type]
    parameters = [_parameter(declaration.name, value if default is MISSING else value | None, default, option)]
    if bool in kinds:
        flag_for_false = typer.Option(f"--no-{dashed}", help=f"Leave it out; cannot be used with --{dashed}.")
        parameters.append(_parameter(_NO + declaration.name, bool, False, flag_for_false))
    return parameters


def _parameter(name: str, value: Any, default: Any, option: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[value, option], default=default
    )


def _alternatives(hint: Any) -> set[Any]:
    """The types of a union without None, or the one type of another hint."""
    is_union = get_origin(hint) in (Union, UnionType)
    return {choice for choice in (get_args(hint) if is_union else (hint,)) if choice is not NoneType}


def _values(kind: type[Options], arguments: dict[str, Any]) -> dict[str, Any]:
    """The values of fields that were set on the command line.

    Raises:
        ArgumentError: an option and its ``--no-…`` flag were both used.
    """
    values = {name: value for name, value in arguments.items() if value not in (None, [], ())}
    for name in declarations(kind):
        if values.pop(_NO + name, False):
            if name in values:
                raise ArgumentError(name, values[name][0], f"cannot be used with --no-{name.replace('_', '-')}")
            values[name] = False
    return values
