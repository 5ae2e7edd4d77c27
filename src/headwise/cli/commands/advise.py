"""``headwise advise``: what to do with a model's cache on a device."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headwise.cli.app import (
    LINE,
    SOURCES_OR_NAME,
    Json,
    app,
    bytes_text,
    count_text,
    emit,
    numbers_table,
    out,
    progress_bar,
    say,
)
from headwise.cli.commands.predict import DTYPE, beyond
from headwise.cli.pages import Html, model_page, refuse_no_page, write_page
from headwise.cli.plots import Plot, advice_figure, refuse_no_plot, write_plot
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.decide.advice import Advice, Measured, Option, Question
    from headwise.models.specs import ModelSpec
    from headwise.study.guide import Guidance, Thresholds


_COST, _GUIDE, _DESIGN = "Costs and measurements", "The guide", "A model that does not exist yet, without SOURCE"
_DIGITS = 18
"""The most digits of a number that a threshold may have."""


@app.command(epilog="Example: headwise advise llama-3-8b --hardware h100 --context 32768 --batch 16")
def advise(
    source: Annotated[str | None, typer.Argument(help=SOURCES_OR_NAME, show_default=False)] = None,
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 4096,
    goal: Annotated[
        str | None,
        typer.Option(help="latency, throughput, memory or balanced; of --guide: accuracy, balanced or speed."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A device; headwise predict --list names them.", rich_help_panel=_COST)
    ] = None,
    hardware_file: Annotated[
        Path | None, typer.Option(help="A TOML file with devices of your own.", rich_help_panel=_COST)
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences that are decoded together.", rich_help_panel=_COST)] = 1,
    dtype: Annotated[str | None, typer.Option(help=DTYPE, rich_help_panel=_COST)] = None,
    ranks: Annotated[int, typer.Option(help="Tensor-parallel devices.", rich_help_panel=_COST)] = 1,
    usable: Annotated[
        float, typer.Option(help="The share of a device's memory that may be used.", rich_help_panel=_COST)
    ] = 0.9,
    engine: Annotated[
        str | None,
        typer.Option(
            help="What is to run it: llama.cpp, vllm, sglang, mlx, transformers or tensorrt-llm.",
            show_default="any",
            rich_help_panel=_COST,
        ),
    ] = None,
    max_quality_loss: Annotated[
        float | None,
        typer.Option(
            help="The largest known rise of perplexity, such as 0.05, which it is with --measured or --calibrate.",
            rich_help_panel=_COST,
        ),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="A folder that headwise frontier or convert wrote of this model.", rich_help_panel=_COST),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A text to predict on what formats of the cache lose, by running the model: minutes.",
            rich_help_panel=_COST,
        ),
    ] = None,
    by_guide: Annotated[
        bool, typer.Option("--guide", help="Follow the selection guide instead.", rich_help_panel=_GUIDE)
    ] = False,
    heads: Annotated[int | None, typer.Option(help="Query heads, without SOURCE.", rich_help_panel=_GUIDE)] = None,
    parameters: Annotated[
        int | None, typer.Option(help="About so many, in the place of a hidden size.", rich_help_panel=_DESIGN)
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Of a llama.", rich_help_panel=_DESIGN)] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.", rich_help_panel=_DESIGN)] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="As many by default.", rich_help_panel=_DESIGN)] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Which need not divide the hidden size.", rich_help_panel=_DESIGN)
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="Layers.", rich_help_panel=_DESIGN)] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Of feed-forward networks.", rich_help_panel=_DESIGN)
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="32,000 by default.", rich_help_panel=_DESIGN)] = None,
    accuracy_critical: Annotated[
        bool, typer.Option("--accuracy-critical", help="No accuracy may be lost.", rich_help_panel=_GUIDE)
    ] = False,
    extreme_speed: Annotated[
        bool, typer.Option("--extreme-speed", help="Speed matters most.", rich_help_panel=_GUIDE)
    ] = False,
    memory_limited: Annotated[
        bool, typer.Option("--memory-limited", help="Memory is scarce.", rich_help_panel=_GUIDE)
    ] = False,
    ample_parameters: Annotated[
        bool, typer.Option("--ample-parameters", help="Parameters may be many.", rich_help_panel=_GUIDE)
    ] = False,
    application: Annotated[
        str | None,
        typer.Option(help="research, serving, mobile, documents or very-long-documents.", rich_help_panel=_GUIDE),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            help="Where a word of the guide begins, such as long=4096; may be repeated.", rich_help_panel=_GUIDE
        ),
    ] = None,
    html: Html = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Recommend a mechanism, a size and bits for a model's cache, or say that nothing should be changed."""
    sizes = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_layers": num_layers,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    words: dict[str, Any] = {
        "accuracy_critical": accuracy_critical,
        "extreme_speed": extreme_speed,
        "memory_limited": memory_limited,
        "ample_parameters": ample_parameters,
        "application": application,
    }
    if by_guide:
        others = {name: None if value == 1 else value for name, value in {"batch": batch, "ranks": ranks}.items()}
        cost: dict[str, object] = {"hardware": hardware, "measured": measured, "calibrate": calibrate, **others}
        _refuse(cost | {"max_quality_loss": max_quality_loss}, "goes without --guide")
        files = {"html": html and str(html), "plot": plot and str(plot)}
        _refuse(sizes | files | {"engine": engine}, "goes without --guide")
        words |= {"context": context, "goal": goal or "balanced", "thresholds": _thresholds(threshold or ())}
        _follow_guide(source, heads, parameters, words, as_json=as_json)
        return
    from headwise.costs.prediction import MOST, Pass, counted_in, device, devices
    from headwise.decide.advice import USUAL_LOSS, Question, advise_on

    unasked: dict[str, object] = {name: value or None for name, value in words.items()}
    _refuse(unasked | {"heads": heads, "threshold": threshold}, "goes with --guide")
    if source is None:
        _refuse({"calibrate": calibrate}, "goes with SOURCE, a model to run")
    name, model = _model(source, sizes | {"parameters": parameters})
    model, dtype, notes = counted_in(model, dtype)
    if hardware is None:
        raise ArgumentError("hardware", None, "is required, or --guide; headwise predict --list names devices")
    if not 1 <= context <= MOST:
        raise ArgumentError("context", context, f"must be from 1 to {MOST}")
    question = Question(
        hardware=device(hardware, hardware_file),
        step=Pass(batch=batch, total=context, dtype=dtype, ranks=ranks),
        goal=goal or "balanced",  # type: ignore[arg-type]  # Question checks it
        max_quality_loss=max_quality_loss,
        usable=usable,
        engine=engine,
    )
    if (measured or calibrate) and max_quality_loss is None:
        question = replace(question, max_quality_loss=USUAL_LOSS, is_usual=True)
    refuse_no_page(html)
    refuse_no_plot(plot)
    points, more = _known(name, model, question, measured or (), calibrate or ())
    result = advise_on(model, question, points, source=name)
    result = replace(result, notes=tuple(dict.fromkeys((*notes, *more, *result.notes))))
    if html is not None:
        page = model_page(name, model, question, measured=points, hardware=devices(hardware_file))
        write_page(html, page, is_silent=as_json)
    if plot is not None:
        write_plot(plot, partial(advice_figure, result), is_silent=as_json)
    emit(result.to_dict()) if as_json else _print_advice(result, is_design=source is None)


def _known(
    source: str, model: ModelSpec, question: Question, measured: Sequence[Path], texts: Sequence[str]
) -> tuple[dict[str, Measured], tuple[str, ...]]:
    """What was measured, and with texts what formats of which nothing is known are predicted to lose; and notes."""
    from headwise.decide.advice import advise_on, predictable, read_measured, read_points

    points = read_measured(measured, model)
    if not texts:
        return points, ()
    targets = predictable(model, points, question.engine, question.hardware)
    if not targets:
        rule = "predicts nothing: all that is tried is known already, or headwise does not round as its engine does"
        raise ArgumentError("calibrate", texts[0], rule)
    advise_on(model, question, points)  # refuses impossible questions before the work
    with progress_bar() as progress:
        from headwise.conversion.frontiers import quick_frontier

        result = quick_frontier(source, calibrate=texts, targets=targets, progress=progress)
    read = f"{result.tokens:,} tokens of {', '.join(result.calibrate)}"
    return points | read_points(result.to_dict(), model), (f"predicted from {read}", *result.notes)


def _model(source: str | None, sizes: Mapping[str, int | None]) -> tuple[str, ModelSpec]:
    """The name and the spec of a model that is named, or of one whose sizes are given."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if source is not None:
        from headwise.models.specs import read_spec

        _refuse(given, "goes without SOURCE, or with --guide")
        return source, read_spec(source)
    if not given:
        raise ArgumentError(
            "source", None, "is required, or --guide, or the sizes of a model that does not exist yet"
        )
    from headwise.costs.formulas.model import weights
    from headwise.decide.advice import design

    model = design(**given)
    return f"a design of {count_text(weights(model).total)} parameters, {model.num_layers} layers", model


def _follow_guide(
    source: str | None, heads: int | None, parameters: int | None, words: Mapping[str, Any], *, as_json: bool
) -> None:
    """Print what the guide says of needs in its words."""
    from headwise.study.guide import Needs, guide

    found, stored = _sizes(source, heads, parameters)
    guidance = guide(Needs(heads=found, parameters=stored, **words))
    emit(guidance.to_dict()) if as_json else _print_guidance(guidance)


def _refuse(options: Mapping[str, object], rule: str) -> None:
    """Refuse options of the other way to choose."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(name, value, rule)


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


def _print_advice(result: Advice, *, is_design: bool) -> None:
    from headwise.decide.advice import MOST_SEQUENCES

    question, step, best = result.question, result.question.step, result.best
    many = f"{step.ranks} × " if step.ranks > 1 else ""
    say(f"{result.source}: {_verdict(result, is_design=is_design)}", bold=len(result.source))
    limits = f"{step.batch:,} × {step.total:,} tokens, {bytes_text(question.memory_bytes)} of memory"
    loss, where = question.max_quality_loss, " where that is known" * question.is_usual
    most = "" if loss is None else f"; perplexity may rise by at most {100 * loss:.3g}%{where} (--max-quality-loss)"
    say(f"on {many}{question.hardware.label}, {limits}; goal: {question.goal}{most}")
    out.print()
    served = [] if question.engine else ["runs in"]
    table = numbers_table("", "KiB/token", "weights", "step ms", "fit", "tok/s", "perplexity", *served)
    for option in result.options:
        mark = "→ " if option is best else "  "
        name = option.words if question.engine and option.words else option.target
        name = f"{mark}{escape(name)}{' ~' if option.is_first_size else ''}"
        is_known = option.refused != "unknown"
        cells = [
            f"{option.cache_bytes_per_token / 1024:,.1f}",
            bytes_text(option.weight_bytes),
            f"{option.decode_seconds * 1e3:,.1f}",
            f"{option.largest_batch:,}" if is_known else "?",
            f"{option.tokens_per_second:,.0f}" if is_known else "?",
            _quality(option),
            *([] if question.engine else [escape(option.served_by)]),
        ]
        table.add_row(f"[dim]{name}[/dim]" if option.is_dominated else name, *cells)
    # Where a terminal is narrow names fold, so that numbers are whole.
    for column in (*table.columns[:1] * out.is_terminal, *table.columns[-1:] * bool(served)):
        column.no_wrap, column.overflow, column.justify = False, "fold", "left"
    out.print_table(table, LINE)
    say(f"step: a token of each sequence; fit: sequences that fit; tok/s: of those, at most {MOST_SEQUENCES:,}")
    out.print()
    for line in [*_to_do(result, is_design=is_design), *_notes(result)]:
        say(line)
    if not is_design:
        for line in _measuring(result):
            say(line)


def _verdict(result: Advice, *, is_design: bool) -> str:
    """The recommendation in a sentence."""
    from headwise.costs.prediction import SAFE_LOSS
    from headwise.decide.advice import AS_IT_IS, PREDICTED_ERROR

    best = result.best
    if best is None:
        counts = Counter(str(option.refused) for option in result.options)
        found = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
        return f"nothing can be recommended ({found})" + ("; measure first" if counts["not measured"] else "")
    build = f"build it as it is, {result.options[0].label}" if is_design else ""
    if best.target == AS_IT_IS:
        return build or "change nothing: as it is it fits"
    if best.loss is None:
        safe = f"other models lost at most {SAFE_LOSS:.0%} in 8 bits, and what this one loses is not measured"
        return f"{f'{build}, but' if build else 'it does not fit as it is:'} store the cache as {best.target}; {safe}"
    does = f"headwise convert {best.convert_to}" if best.convert_to else f"store the cache as {best.target}"
    if best.is_predicted:
        return f"{does}; predicted, not measured: perplexity rises by {100 * best.loss:.2g}%; {PREDICTED_ERROR}"
    return f"{does}; measured, perplexity {'rises' if best.loss >= 0 else 'falls'} by {abs(best.loss):.1%}"


def _quality(option: Option) -> str:
    """The loss, with a ~ where it is predicted, and why an option is not recommended."""
    if option.loss is None or (option.loss == 0 and option.refused is not None):
        return "not measured" if option.refused is None else option.refused
    found = f"×{1 + option.loss:.3f}" if math.isfinite(option.loss) else "diverged"
    words = {None: "", "loses too much": ", too much", "may lose too much": ", too much?"}
    return f"{'~' * option.is_predicted}{found}{words.get(option.refused, f', {option.refused}')}"


def _to_do(result: Advice, *, is_design: bool) -> list[str]:
    """The command lines of what is recommended; of caches that are as safe in several engines, those of each."""
    best = result.best
    if best is None or is_design:
        return []
    lines = _pasted("run it", best.commands)
    if best.loss is None and result.question.engine is None:
        safe = [option for option in result.options if option.refused is None and option.loss is None]
        lines = [line for option in safe for line in _pasted(f"in {option.served_by}", option.commands)]
    prepares = any(line.startswith("  headwise prepare") for line in lines)
    return lines + ["a model that is prepared already is served without headwise prepare"] * prepares


def _pasted(title: str, commands: Sequence[str]) -> list[str]:
    """Command lines below a title; nothing where there are none."""
    return [f"{title}:", *(f"  {command}" for command in commands)] if commands else []


def _measuring(result: Advice) -> list[str]:
    """What to measure next, and the command lines that do it."""
    from headwise.serving.programs import with_weights

    target, next_one = result.to_measure, result.measure_next
    if target is None:
        return []
    reason = "its loss is not known for this model"
    if next_one is not None and not next_one.between:
        reason = f"predicted to lose ×{1 + next_one.loss:.3f}"
    elif next_one is not None:
        read = f"about ×{1 + next_one.loss:.3f} from {' and '.join(next_one.between)}"
        reason = f"first if it loses what is expected, {read}"
    question, step, source = result.question, result.question.step, shlex.quote(result.source)
    weights = with_weights(result.source)
    asked = {"--hardware": question.hardware.name, "--context": step.total, "--batch": step.batch}
    others = {
        "--engine": (question.engine, None),
        "--goal": (question.goal, "balanced"),
        "--ranks": (step.ranks, 1),
        "--usable": (question.usable, 0.9),
    }
    asked |= {name: value for name, (value, usual) in others.items() if value != usual}
    words = " ".join(f"{name} {value}" for name, value in asked.items())
    lines = _pasted(
        f"measure next: {target}, {reason}",
        [
            f"headwise frontier {weights} --target {target} --calibrate TEXT --evaluate OTHER --output OUT",
            f"headwise advise {source} {words} --measured OUT",
        ],
    )
    (option,) = (option for option in result.options if option.target == target)
    if option.convert_to is None and not option.is_predicted:
        named = "" if weights == source else f", and MODEL in place of {result.source}"
        lines.append(f"or have it predicted, with all formats of the cache, in minutes: --calibrate TEXT{named}")
    return lines


def _notes(result: Advice) -> list[str]:
    from headwise.costs.prediction import Efficiency

    lines = beyond(result.trained_context, result.question.step.total)
    if result.weights != result.question.step.dtype:
        lines.append(f"weights as stored: {result.weights}")
    lines += [f"note: {note}" for note in result.notes]
    if result.best is not None and result.binding != "nothing":
        lines.append(f"{result.binding} decides: without that limit another way would come first")
    same = "with a quarter or four times the tokens or the sequences: the same"
    lines += [f"with {change}" for change in result.changes] or [same]
    if result.absorbed_tokens is not None:
        lines.append(
            f"MLA: up to {result.absorbed_tokens:,} new tokens of a text are fastest absorbed, more expanded"
        )
    if any(option.is_first_size for option in result.options):
        lines.append(
            "~: its sizes are found on a text, and these are those that the search begins with; ?, unknown: these do "
            "not fit, and what is found may"
        )
    shares, hardware = Efficiency(), result.question.hardware
    if result.question.step.dtype.removeprefix("torch.") in hardware.curves:
        lines.append(f"times: {hardware.source}, interpolated")
    else:
        shown = f"{shares.compute:.0%} of the peak and {shares.memory:.0%} of the bandwidth"
        lines.append(f"times are predicted: {shown}, assumed")
    return lines


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
