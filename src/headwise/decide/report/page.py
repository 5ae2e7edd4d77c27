"""A report as one web page: what to do with a model's cache, with controls that choose among answers, and results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any

from headwise.base.documents import as_document
from headwise.base.pages import Draw, Part, Picture, Text, as_svg, refuse_no_matplotlib, web_page
from headwise.base.tables import bytes_text, count_text, seconds_text
from headwise.costs.formulas.layer import DTYPE_BYTES
from headwise.costs.formulas.model import weights
from headwise.costs.prediction import SAFE_LOSS, Device, Efficiency, Pass, devices, operators, peak_memory, seconds
from headwise.costs.prediction.memory import CHUNK
from headwise.costs.prediction.predict import check_context, counted_weights, prefill
from headwise.decide.advice import (
    AS_IT_IS,
    PREDICTED_ERROR,
    Alternative,
    Measured,
    Option,
    Question,
    candidates,
    ranked,
)
from headwise.decide.advice.candidates import engine_notes, predicted_note, weight_notes
from headwise.decide.report.grid import REASONS, answers, axes_of
from headwise.decide.report.plots import Point, latency_figure, memory_figure, quality_figure, roofline_figure
from headwise.decide.report.sections import Section
from headwise.errors import ArgumentError
from headwise.models.specs import ModelSpec
from headwise.serving.programs import commands

DEFAULT_HARDWARE = "h100"
"""The device that a page begins with where a command names none; the reader may choose another."""

_MOST_LINES = 7
"""Options whose latency is drawn."""


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The part of a page that is about a model, as of ``page_data(read_spec("llama-3-8b"), question, {}).asked``.

    Attributes:
        document: what its controls choose from, as JSON-able values.
        asked: the question that it begins with, in words.
        plots: names, captions and functions that draw them, of that question.
        quality_note: a text in the place of the plot of quality where too little is known; None where there is the
            plot.
    """

    document: dict[str, Any]
    asked: str
    plots: tuple[tuple[str, str, Draw], ...]
    quality_note: str | None


def page_data(
    model: ModelSpec,
    question: Question,
    measured: Mapping[str, Measured],
    *,
    source: str = "model",
    hardware: Mapping[str, Device] | None = None,
    steps: Sequence[Mapping[str, Any]] = (),
    converted: str = "",
) -> ModelPart:
    """Everything that the page of a model shows of it.

    For example ``page_data(read_spec("llama-3-8b"), question, {}).document["options"][0]["target"]``, which is
    "as it is".

    Args:
        model: the model's spec, with its body.
        question: the question that the page begins with.
        measured: quality, measured or predicted, by target.
        source: the name of the model.
        hardware: devices that a reader may choose, besides the question's; the catalog's when None.
        steps: decode steps that were timed; see `measured_steps`.
        converted: what the conversion that made the model measured of it, in a sentence.

    Raises:
        HeadwiseError: a number is impossible, or the heads cannot be shared out.
    """
    step, chosen = question.step, question.hardware
    timed_notes: tuple[str, ...] = ()
    if steps and model.stored is not None:
        model = replace(model, stored=None)
        timed_notes = ("weights are in the dtype, as headwise timed steps with them",)
    positions = check_context(model, step.total)
    found = {chosen.name: chosen, **(devices() if hardware is None else hardware)} | {chosen.name: chosen}
    joined = {name: each for name, each in found.items() if each is chosen or _serves(each, step)}
    every = candidates(model, measured, question.engine)
    # Without the options whose heads cannot be shared out among the devices, which `ranked` leaves out.
    by_target = {option.target: option for option in ranked(every, question, measured)}
    tried = [each for each in every if each.target in by_target]
    options = [by_target[each.target] for each in tried]
    is_known = any(option.loss is not None for option in options[1:])
    axes = axes_of(question, joined, positions, is_known=is_known)
    notes = (
        *timed_notes,
        *weight_notes(model, every),
        *engine_notes(model, question.engine, measured),
        *predicted_note(option.is_predicted for option in options),
    )
    document = {
        "source": source,
        "label": model.label,
        "ranks": step.ranks,
        "dtype": step.dtype.removeprefix("torch."),
        "usable": question.usable,
        "axes": {**as_document(axes), "hardware": list(joined)},
        "start": {
            "hardware": list(joined).index(chosen.name),
            "context": axes.context.index(step.total),
            "batch": axes.batch.index(step.batch),
            "loss": 0,
            "goal": axes.goal.index(question.goal),
        },
        "devices": [
            {"label": each.label, "usable": int(each.memory_bytes * question.usable)} for each in joined.values()
        ],
        "trained_context": model.max_position_embeddings,
        "stored": None if model.stored is None else counted_weights(model, "in the dtype"),
        "notes": notes,
        "reasons": REASONS,
        "options": [
            _option(each, option, commands(each.target, each.convert_to, model, source, question.engine), step)
            for each, option in zip(tried, options, strict=True)
        ],
        "operators": [_operators(each, question) for each in tried],
        "answers": answers(tried, options, question, axes, partial(verdict, converted=converted)),
    }
    quality_note = None
    if sum(option.loss is not None and math.isfinite(option.loss) for option in options) < 2:
        quality_note = "Nothing of this model is measured here: headwise frontier measures it."
        quality_note = f"{converted}. What more is done to it is not." if converted else quality_note
    return ModelPart(
        document=document,
        asked=_asked(question),
        plots=tuple(_plots(tried, ranked(tried, question, measured), question, steps)),
        quality_note=quality_note,
    )


def _serves(device: Device, step: Pass) -> bool:
    """Whether a device computes a step's dtype, and several of it are joined where the step asks for several."""
    with suppress(ArgumentError):
        return device.peak(step.dtype) > 0 and (step.ranks == 1 or device.link_bytes_per_second is not None)
    return False


def _asked(question: Question) -> str:
    step = question.step
    many = f"{step.ranks} × " if step.ranks > 1 else ""
    return f"{step.batch:,} × {step.total:,} tokens on {many}{question.hardware.label}, in {step.dtype}"


def verdict(options: Sequence[Option], ranks: Sequence[Option], *, converted: str = "") -> str:
    """What is to be done, in a sentence.

    For example ``verdict(options, options)`` is ``"Change nothing: as it is it fits."`` of a model that fits.

    Args:
        options: the model as it is first.
        ranks: the same in the order of the goal, what is refused last.
        converted: what the conversion that made the model measured of it, in a sentence.
    """
    original, best = options[0], ranks[0]
    if best.refused is not None:
        counts = Counter(str(option.refused) for option in ranks)
        found = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
        return f"Nothing can be recommended ({found}){'; measure first' if counts['not measured'] else ''}."
    if best.target == AS_IT_IS:
        return f"Change nothing more: it fits. {converted}." if converted else "Change nothing: as it is it fits."
    share = f"{best.cache_bytes_per_token / original.cache_bytes_per_token:.0%}".replace("%", " %")
    size = f"The cache takes {share} of the original's bytes"
    if best.loss is None:
        return (
            f"It does not fit as it is: store the cache as {best.target}. {size}; other models lost at most "
            f"{100 * SAFE_LOSS:.0f} % in 8 bits, and what this one loses is not measured."
        )
    keep = f"keep the model, and store its cache as {best.target}"
    how = keep if best.convert_to is None else f"headwise convert {best.convert_to}"
    known = f"predicted, not measured: {PREDICTED_ERROR}" if best.is_predicted else "measured"
    return f"Do this: {how}. {size}; perplexity {_loss(best)}, {known}."


def _loss(option: Option) -> str:
    """The loss of an option, with a ~ where it is predicted."""
    if option.loss is None:
        return "not measured"
    found = f"×{1 + option.loss:.3f}" if math.isfinite(option.loss) else "diverged"
    return f"{'~' * option.is_predicted}{found}"


def _option(candidate: Alternative, option: Option, typed: Sequence[str], step: Pass) -> dict[str, Any]:
    """What does not depend on the device, the context and the batch."""
    return {
        "target": option.target,
        "label": option.label,
        "convert_to": option.convert_to,
        "served_by": option.served_by,
        "commands": list(typed),
        "parameters": weights(candidate.model).total,
        "weight_bytes": peak_memory(candidate.model, step).weights,
        "loss": option.loss if option.loss is not None and math.isfinite(option.loss) else None,
        "is_known": option.loss is not None,
        "quality": _loss(option),
        "is_predicted": option.is_predicted,
        "is_first_size": option.is_first_size,
    }


def _operators(candidate: Alternative, question: Question) -> dict[str, Any]:
    """The operators of a candidate in a decode step and in the last part of a prompt, as rows of texts."""
    step, model, device = _of(candidate, question.step), candidate.model, question.hardware
    read = sum(each.seconds for each in prefill(model, step, device))
    taken = sum(each.seconds for each in seconds(operators(model, step), device, step))
    said = f"{candidate.target} ({model.label}): a step {seconds_text(taken)}"
    return {
        "decode": _rows(model, step, device),
        "prompt": _rows(model, replace(step, batch=1, new=min(CHUNK, step.total)), device),
        "sums": f"{said}, a prompt of {step.total:,} tokens {seconds_text(read)}.",
    }


def _rows(model: ModelSpec, forward: Pass, device: Device) -> list[tuple[str, ...]]:
    """The operators of a pass, the longest first."""
    work = operators(model, forward)
    formulas = {each.name: each.formula for each in work}
    timed = sorted(seconds(work, device, forward), key=lambda each: -each.seconds)
    whole = sum(each.seconds for each in timed)
    return [
        (
            each.name,
            f"{each.times:,}",
            seconds_text(each.seconds),
            f"{100 * each.seconds / whole:.0f} %",
            each.bound,
            count_text(each.flops),
            bytes_text(each.memory_bytes + each.link_bytes),
            formulas[each.name],
        )
        for each in timed
    ]


def _plots(
    tried: Sequence[Alternative], options: Sequence[Option], question: Question, steps: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, Draw]]:
    """The plots of a question, by name and caption."""
    step, device, usable = question.step, question.hardware, question.memory_bytes
    running = {each.target: each for each in tried if each.runs_on(device)}
    shown = [option for option in options if option.target in running]
    memories = [peak_memory(running[option.target].model, _of(running[option.target], step)) for option in shown]
    by_context, by_intensity = measured_points(tried, steps if step.ranks == 1 else ())
    best = running[shown[0].target]
    work = seconds(operators(best.model, _of(best, step)), device, _of(best, step))
    said = f"{bytes_text(device.memory_bytes)} ({bytes_text(usable)} may be used)"
    found: list[tuple[str, str, Draw]] = [
        (
            "memory",
            f"Memory, of {said}",
            partial(memory_figure, [option.target for option in shown], memories, device, usable),
        ),
        ("latency", "Latency against context", _latency(running, shown, question, by_context)),
        (
            "roofline",
            f"Roofline of a decode step: {best.target}",
            partial(roofline_figure, work, device, step.dtype, Efficiency(), by_intensity),
        ),
    ]
    if sum(option.loss is not None and math.isfinite(option.loss) for option in shown) > 1:
        draw = partial(quality_figure, shown, question.max_quality_loss)
        predicted = "; hollow: predicted" * any(option.is_predicted for option in shown)
        found.insert(1, ("quality", f"Quality against cache{predicted}", draw))
    return found


def _of(candidate: Alternative, step: Pass) -> Pass:
    return replace(step, cache_bits=candidate.cache_bits)


def _latency(
    running: Mapping[str, Alternative], shown: Sequence[Option], question: Question, timed: Sequence[Point]
) -> Draw:
    """Draws decode steps of the best option, the model as it is and others that nothing dominates."""
    step, most = question.step, max(2**17, 2 * question.step.total)
    positions = check_context(running[AS_IT_IS].model, step.total)
    most = min(most, positions or most)
    contexts = [*(2**power for power in range(7, most.bit_length()) if 2**power < most), most]
    others = [option.target for option in shown if not option.is_dominated]
    names = list(dict.fromkeys((shown[0].target, AS_IT_IS, *others)))[:_MOST_LINES]
    lines = {}
    for name in names:
        model = running[name].model
        passes = [replace(_of(running[name], step), total=tokens) for tokens in contexts]
        lines[name] = [
            1e3 * sum(each.seconds for each in seconds(operators(model, one), question.hardware, one))
            for one in passes
        ]
    return partial(latency_figure, lines, contexts, step.total, timed)


def measured_points(
    tried: Sequence[Alternative], steps: Sequence[Mapping[str, Any]]
) -> tuple[list[Point], list[Point]]:
    """Timed steps as points: their context and milliseconds, and their FLOPs a byte and FLOP/s.

    For example ``measured_points(candidates(model), measured_steps(documents, "./mla"))[0]``.

    Args:
        tried: the candidates; steps of others are left out.
        steps: the measured decode steps, as `measured_steps` takes them.
    """
    by_target = {each.target: each for each in tried}
    by_context, by_intensity = [], []
    for timed in steps:
        candidate = by_target.get(timed["target"])
        if candidate is None or timed["dtype"] not in DTYPE_BYTES:
            continue
        step = Pass(total=timed["context"], dtype=timed["dtype"], cache_bits=candidate.cache_bits)
        work = operators(candidate.model, step)
        flops, moved = (sum(each.times * getattr(each, name) for each in work) for name in ("flops", "memory_bytes"))
        by_context.append((timed["target"], timed["context"], 1e3 * timed["seconds"]))
        by_intensity.append((timed["target"], flops / moved, flops / timed["seconds"]))
    return by_context, by_intensity


def page(
    model: ModelPart | None,
    results: Sequence[Section] = (),
    *,
    title: str = "",
    notes: Sequence[str] = (),
    version: str = "",
) -> str:
    """The page of a model, of results, or of both.

    For example ``page(page_data(read_spec("llama-3-8b"), question, {}))``.

    Args:
        model: the part that `page_data` made; None for results alone.
        results: below the model.
        title: the title of the page; the model's name when empty.
        notes: above all else.
        version: the version of headwise.

    Raises:
        MissingExtraError: matplotlib, which draws the plots, is not installed.
    """
    refuse_no_matplotlib("html", True)
    parts: list[Part] = []
    for index, section in enumerate(results):
        parts.append(section.table)
        if section.draw is not None:
            parts.append(Picture(as_svg(section.draw), section.table.title, name=f"figure-{index}"))
    if version:
        parts.append(Text(f"headwise {version}", "small"))
    above = [Text(note) for note in notes]
    if model is None:
        return web_page(title, [*above, *parts])
    return web_page(
        title or f"{PurePath(model.document['source']).name}: what to do with its cache",
        parts,
        "decide/report/report.html",
        above=above,
        model=model,
        pictures=[Picture(as_svg(draw), caption, name=name) for name, caption, draw in model.plots],
        efficiency=Efficiency(),
    )
