"""``headwise guide``: what the selection guide says that headwise began with."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headwise.cli.app import DECIDE, SOURCES_OR_NAME, Json, app, emit, out
from headwise.cli.options import Context
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.study.guide import Guidance, Thresholds

_DIGITS = 18
"""The most digits of a number that a threshold may have."""


@app.command(epilog="Example: headwise guide llama-2-7b --context 4096", rich_help_panel=DECIDE)
def guide(
    source: Annotated[str | None, typer.Argument(help=SOURCES_OR_NAME, show_default=False)] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads, without SOURCE.")] = None,
    parameters: Annotated[int | None, typer.Option(help="About so many, without SOURCE.")] = None,
    context: Context = 4096,
    goal: Annotated[str, typer.Option(help="accuracy, balanced or speed.")] = "balanced",
    accuracy_critical: Annotated[bool, typer.Option("--accuracy-critical", help="No accuracy may be lost.")] = False,
    extreme_speed: Annotated[bool, typer.Option("--extreme-speed", help="Speed matters most.")] = False,
    memory_limited: Annotated[bool, typer.Option("--memory-limited", help="Memory is scarce.")] = False,
    ample_parameters: Annotated[bool, typer.Option("--ample-parameters", help="Parameters may be many.")] = False,
    application: Annotated[
        str | None, typer.Option(help="research, serving, mobile, documents or very-long-documents.")
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option(help="Where a word of the guide begins, such as long=4096; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Follow the selection guide that headwise began with: it chooses a mechanism by words, and measures nothing."""
    from headwise.study.guide import Needs
    from headwise.study.guide import guide as followed

    thresholds = _thresholds(threshold or ())
    found, stored = _sizes(source, heads, parameters)
    needs = Needs(
        context=context,
        heads=found,
        parameters=stored,
        accuracy_critical=accuracy_critical,
        extreme_speed=extreme_speed,
        memory_limited=memory_limited,
        ample_parameters=ample_parameters,
        goal=goal,  # type: ignore[arg-type]  # Needs checks it
        application=application,  # type: ignore[arg-type]  # and this
        thresholds=thresholds,
    )
    guidance = followed(needs)
    emit(guidance.to_dict()) if as_json else _print_guidance(guidance)


def _sizes(source: str | None, heads: int | None, parameters: int | None) -> tuple[int, int | None]:
    """The query heads and, where they are known, the parameters of a model, or those that are given without one."""
    if source is None:
        if heads is None:
            raise ArgumentError("heads", None, "is required without SOURCE, which would say how many there are")
        return heads, parameters
    if (heads, parameters) != (None, None):
        name, given = ("heads", heads) if heads is not None else ("parameters", parameters)
        raise ArgumentError(name, given, "goes without SOURCE, which says it")
    from headwise.costs.formulas.model import weights
    from headwise.models.specs import RecurrentSpec, read_spec

    model = read_spec(source)
    mixers = (layer for layer in model.layers if not isinstance(layer, RecurrentSpec))
    found = [layer.num_heads for layer in mixers if hasattr(layer, "num_heads")]
    if not found:
        raise ArgumentError("source", source, "has no attention heads")
    return int(found[0]), None if model.body is None else weights(model).total


def _thresholds(given: list[str] | tuple[str, ...]) -> Thresholds:
    """The guide's thresholds with the user's, each ``NAME=NUMBER``."""
    from headwise.study.guide import Thresholds

    names = [field.name for field in fields(Thresholds)]
    values = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in names or not number.isdecimal() or len(number) > _DIGITS:
            raise ArgumentError("threshold", text, f"must be NAME=NUMBER, with {', '.join(names)}")
        values[name] = int(number)
    return Thresholds(**values)


def _print_guidance(guidance: Guidance) -> None:
    needs = guidance.needs
    out.print(f"the guide, for {needs.context:,} tokens and {needs.heads} query heads (nothing in it is measured)")
    for rule in guidance.rules:
        differs = "; not the flow's" if rule.name in guidance.disagreements else ""
        pairs = zip(rule.mechanisms, rule.kv_heads, strict=True)
        names = [name if heads is None else f"{name} ({heads} KV heads)" for name, heads in pairs]
        out.print(f"[bold]{rule.name}[/bold]: {escape(' or '.join(names))}{differs}", soft_wrap=True)
        for step in rule.path:
            out.print(f"  {step}", markup=False, soft_wrap=True)
    words = [f"{name}={value}" for name, value in vars(needs.thresholds).items()]
    out.print(f"thresholds: {', '.join(words[:4])} tokens;")
    out.print(f"  {', '.join(words[4:])} parameters, which the guide leaves open")
