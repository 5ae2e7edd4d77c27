"""What ``headwise advise`` and ``headwise design`` share: the options of a question, and the printed advice."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.base.tables import Table, bytes_text
from headwise.cli.app import LINE, beyond, emit, out, say
from headwise.cli.pages import advice_figure, model_page, write_page, write_plot
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.decide.advice import Advice, Measured, Option, Question
    from headwise.models.specs import ModelSpec

Hardware = Annotated[str | None, typer.Option(help="A device; headwise predict --list names them.")]
Goal = Annotated[str, typer.Option(help="latency, throughput, memory or balanced.")]
Engine = Annotated[
    str | None,
    typer.Option(
        help="What is to run it: llama.cpp, vllm, sglang, mlx, transformers or tensorrt-llm.", show_default="any"
    ),
]


def asked(
    model: ModelSpec,
    *,
    hardware: str | None,
    hardware_file: Path | None,
    context: int,
    batch: int,
    dtype: str | None,
    ranks: int,
    usable: float,
    goal: str,
    engine: str | None,
    max_quality_loss: float | None,
) -> tuple[ModelSpec, Question, tuple[str, ...]]:
    """The model as its weights are counted, the question that the options ask of it, and notes."""
    from headwise.costs.prediction import MOST, Pass, counted_in, device
    from headwise.decide.advice import Question

    model, dtype, notes = counted_in(model, dtype)
    if hardware is None:
        raise ArgumentError("hardware", None, "is required; headwise predict --list names devices")
    if not 1 <= context <= MOST:
        raise ArgumentError("context", context, f"must be from 1 to {MOST}")
    question = Question(
        hardware=device(hardware, hardware_file),
        step=Pass(batch=batch, total=context, dtype=dtype, ranks=ranks),
        goal=goal,  # type: ignore[arg-type]  # Question checks it
        max_quality_loss=max_quality_loss,
        usable=usable,
        engine=engine,
    )
    return model, question, notes


def answer(
    source: str,
    model: ModelSpec,
    question: Question,
    points: Mapping[str, Measured],
    notes: Sequence[str],
    *,
    hardware_file: Path | None,
    html: Path | None,
    plot: Path | None,
    as_json: bool,
    is_design: bool = False,
) -> None:
    """Advise, write the page and the picture that are asked for, and print.

    Args:
        source: the model, as the advice names it.
        model: the model.
        question: what is asked of it.
        points: what is known of options.
        notes: what is printed before the notes of the advice.
        hardware_file: devices for the page, besides those of the catalog.
        html: the page to write.
        plot: the picture to write.
        as_json: whether to print JSON.
        is_design: whether the model does not exist yet, so that nothing can be run or measured.
    """
    from headwise.costs.prediction import devices
    from headwise.decide.advice import advise_on

    result = advise_on(model, question, points, source=source)
    result = replace(result, notes=tuple(dict.fromkeys((*notes, *result.notes))))
    if html is not None:
        page = model_page(source, model, question, measured=points, hardware=devices(hardware_file))
        write_page(html, page, is_silent=as_json)
    if plot is not None:
        write_plot(plot, partial(advice_figure, result), is_silent=as_json)
    emit(result.to_dict()) if as_json else _print_advice(result, is_design=is_design)


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
    table = Table(["", "KiB/token", "weights", "step ms", "fit", "tok/s", "perplexity", *served])
    for option in result.options:
        mark = "→ " if option is best else "  "
        name = option.words if question.engine and option.words else option.target
        name = f"{mark}{name}{' ~' if option.is_first_size else ''}"
        is_known = option.refused != "unknown"
        cells = [
            f"{option.cache_bytes_per_token / 1024:,.1f}",
            bytes_text(option.weight_bytes),
            f"{option.decode_seconds * 1e3:,.1f}",
            f"{option.largest_batch:,}" if is_known else "?",
            f"{option.tokens_per_second:,.0f}" if is_known else "?",
            _quality(option),
            *([] if question.engine else [option.served_by]),
        ]
        table.add(name, *cells, mark="faint" if option.is_dominated else "")
    # Where a terminal is narrow names fold, so that numbers are whole.
    table.folded = [*[0] * out.is_terminal, *[7] * len(served)]
    table.words = [0, *[7] * len(served)]
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
