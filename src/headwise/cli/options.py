"""Options that several commands have, and the scores that they print.

Questions about a model on a device share theirs. Each field of an options class becomes an option or a flag of a
typer command. Evaluations are printed as tables, the model beside its reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from headwise.base.options import Declaration, Options, declarations
from headwise.base.tables import Table
from headwise.cli.app import out
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.measure.evaluation import (
        ChoiceEvaluation,
        Evaluation,
        PlantedEvaluation,
        Rate,
        RetrievalEvaluation,
        RulerEvaluation,
    )
    from headwise.measure.evaluation.results import Paired


Context = Annotated[int, typer.Option(help="Tokens of each sequence.")]
Batch = Annotated[int, typer.Option(help="Sequences that are decoded together.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of weights and activations; quantised weights as they are stored, all else bfloat16, by default."
    ),
]
HardwareFile = Annotated[Path | None, typer.Option(help="A TOML file with devices of your own.")]
Ranks = Annotated[int, typer.Option(help="Tensor-parallel devices.")]
Usable = Annotated[float, typer.Option(help="The share of a device's memory that may be used.")]

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


COLUMNS = ("model", "reference")


def show_text(result: Evaluation, *, columns: tuple[str, str] = COLUMNS) -> None:
    """Print an evaluation on text.

    Args:
        result: the evaluation.
        columns: headings for the model and for its reference.
    """
    begin = f" that begin with {escape(' '.join(result.begin))}" if result.begin else ""
    threads = f"{result.threads} thread{'s' * (result.threads != 1)}"
    how = f"windows of {result.window}{begin}; {result.engine or result.dtype}, {threads}"
    cache = "" if result.cache is None else f"; the model's cache in {result.cache}"
    out.print(f"{result.tokens:,} tokens of {escape(result.text)}, {how}{cache}")
    table = _table("", result.against, columns)
    for score in result.texts if len(result.texts) > 1 else ():
        _row(table, f"perplexity of {score.text}", score, "perplexity", ".3f")
    _row(table, "perplexity", result, "perplexity", ".3f")
    _row(table, "cache B/token", result, "cache_bytes_per_token", ",.0f")
    if result.engine is not None:
        _row(table, "cache B", result, "cache_bytes", ",")
    _row(table, f"decode ms/token at {result.context}", result, "decode_ms", ".1f")
    if result.engine is not None:
        _row(table, "decode tokens/s", result, "decode_tokens_per_second", ".1f")
    out.print_table(table)
    for score in result.texts if result.against is not None else ():
        name = f"{escape(score.text)}: " if len(result.texts) > 1 else ""
        out.print(
            f"{name}perplexity ratio {score.perplexity_ratio:.4f} · KL {score.kl:.4f} nats a token"
            f" · top-1 agreement {score.top1_agreement:.1%}"
        )
        out.print(
            f"{name}KL above {score.kl_999:.4f} nats at one token in 1,000"
            f" · top-1 changed at {score.top1_changed:,} of {score.tokens:,}"
        )
    if result.continuations is not None:
        out.print(result.continuations.line)


def _show_by_position(result: Evaluation) -> None:
    for score in result.texts:
        table = _table(f"nats at positions of {score.text}", result.against)
        for bucket in score.by_position:
            _row(table, f"{bucket.start}–{bucket.stop - 1}", bucket, "nll", ".4f")
        out.print_table(table)


def _show_choices(result: ChoiceEvaluation) -> None:
    cache = "" if result.cache is None else f"; the model's cache in {result.cache}"
    out.print(f"{result.items:,} items of {escape(result.file)}, zero-shot{cache}")
    rates = {"accuracy": result.accuracy, "accuracy by length": result.accuracy_norm}
    _show_rates(rates, result.against)


def _show_planted(result: PlantedEvaluation) -> None:
    one, several = ("a fact", "facts") if result.strings is None else ("a random string", "random strings")
    facts = one if result.keys == 1 else f"{result.keys} {several}"
    if result.strings is not None:
        facts += f" of {result.strings} tokens"
    trials = "one trial" if result.trials == 1 else f"{result.trials} trials"
    out.print(f"{facts} planted in {result.context:,} tokens of {escape(result.text)}, {trials} at each depth")
    table = _table(f"probability among {result.codes} codes", result.against)
    for row in result.depths:
        _row(table, f"at depth {row.depth:.0%}", row, "probability", ".3f")
    for row in result.depths:
        _row(table, f"nats at depth {row.depth:.0%}", row, "nll", ".3f")
    out.print_table(table)
    _show_rates({"likeliest of the codes": result.first, "generated": result.found}, result.against)


def _show_ruler(result: RulerEvaluation) -> None:
    samples = "one sample" if result.samples == 1 else f"{result.samples} samples"
    chat = ", in the chat template" if result.chat else ""
    cache = "" if result.cache is None else f"; the model's cache in {result.cache}"
    out.print(
        f"RULER's tasks in {result.length:,} tokens, {samples} of each, from {escape(result.text)}{chat}{cache}"
    )
    table = _table("share of answers found", result.against)
    for score in result.tasks:
        _row(table, score.task, score, "score", ".1%")
    _row(table, "mean", result, "score", ".1%")
    out.print_table(table)
    _show_rates({f"all of {score.task}": score.complete for score in result.tasks}, result.against)


def _show_retrieval(result: RetrievalEvaluation) -> None:
    out.print(f"{result.questions:,} questions, {result.passages:,} passages of {escape(result.file)}")
    _show_rates({"R@1": result.recall_at_1, "R@10": result.recall_at_10}, result.against)
    reference = "" if result.reference is None else f", reference {result.reference.mrr:.4f}"
    out.print(f"MRR {result.mrr:.4f}{reference}")


def _show_rates(rates: dict[str, Rate], against: str | None) -> None:
    """Print rates with their 95 % intervals, and differences in percentage points."""
    table = _table("with 95 % intervals", against)
    for name, rate in rates.items():
        models = [rate] if rate.reference is None else [rate, rate.reference]
        table.add(name, *(f"{model.rate:.1%} ({_span(model.low, model.high)})" for model in models))
    out.print_table(table)
    for name, rate in rates.items():
        if rate.difference is not None:
            out.print(
                f"{name} {100 * rate.difference:+.1f} points"
                f" ({_span(rate.difference_low, rate.difference_high, '+.1f')});"
                f" only the model {rate.only_model}, only the reference {rate.only_reference}"
            )


def _span(low: float | None, high: float | None, style: str = ".1f") -> str:
    assert low is not None
    assert high is not None
    return f"{100 * low:{style}} to {100 * high:{style}}"


def _table(heading: str, against: str | None, columns: tuple[str, str] = COLUMNS) -> Table:
    return Table([heading, *columns[: 1 if against is None else 2]])


def _row(table: Table, name: str, result: Paired, number: str, style: str) -> None:
    """Add a row with one number of a result, followed by the reference's."""
    models = [result] if result.reference is None else [result, result.reference]
    table.add(name, *(format(getattr(model, number), style) for model in models))


SHOW: dict[str, Callable[[Any], None]] = {
    "text": show_text,
    "by_position": _show_by_position,
    "choices": _show_choices,
    "planted": _show_planted,
    "ruler": _show_ruler,
    "retrieval": _show_retrieval,
}
"""The function that prints the result of each task, by the task's name."""
