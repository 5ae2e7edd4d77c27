"""A report as one web page that needs no other file, with the numbers that its controls compute with.

The page carries every option's operators, the devices and the question as JSON: the sums of
`headwise.costs.prediction.work`. Its ``arithmetic.js`` repeats `operators`, `memory` and `advise`, because a page
runs no Python; tests in a browser hold both to be equal, to the order of the options. Whoever changes one side
changes the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from headwise.base.documents import as_document, refuse_no_plotly, web_page
from headwise.costs.formulas.layer import DTYPE_BYTES
from headwise.costs.formulas.model import weights
from headwise.costs.prediction import (
    SAFE_LOSS,
    Device,
    Efficiency,
    LayerWork,
    ModelWork,
    Pass,
    devices,
    model_work,
    to_table,
)
from headwise.costs.prediction.hardware import DTYPE_NAMES
from headwise.costs.prediction.memory import CHUNK, held_weights
from headwise.costs.prediction.predict import MOST_PARTS, check_context, counted_weights
from headwise.costs.prediction.work import known_body
from headwise.decide.advice import MOST_SEQUENCES, PREDICTED_ERROR, Candidate, Measured, Question, candidates
from headwise.decide.advice.advise import engine_notes, known_loss, predicted_note, weight_notes
from headwise.decide.report.sections import Section, html
from headwise.errors import ArgumentError
from headwise.models.specs import ModelSpec
from headwise.serving.programs import commands

_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")
"""What a reader may choose: every device computes them, or something wider."""

_CHOSEN = ("expanded", "absorbed", "direct", "projections")
"""The implementations that are ever chosen."""


def page_data(
    model: ModelSpec,
    question: Question,
    measured: Mapping[str, Measured],
    *,
    source: str = "model",
    hardware: Mapping[str, Device] | None = None,
    steps: Sequence[Mapping[str, Any]] = (),
    converted: str = "",
) -> dict[str, Any]:
    """Everything that the page of a model needs, as JSON-able values.

    For example ``page_data(read_spec("llama-3-8b"), question, {})["options"][0]["target"]``, which is "as it is".

    Args:
        model: with its body.
        question: that the page begins with.
        measured: quality, measured or predicted, by target.
        source: the name of the model.
        hardware: devices that a reader may choose, besides the question's; the catalog's when None.
        steps: decode steps that were timed; see `measured_steps`.
        converted: what the conversion that made the model measured of it, in a sentence.

    Raises:
        HeadwiseError: a number is impossible, or the heads cannot be shared out.
    """
    step = question.step
    timed_notes: tuple[str, ...] = ()
    if steps and model.stored is not None:
        model = replace(model, stored=None)
        timed_notes = ("weights are in the dtype, as headwise timed steps with them",)
    positions = check_context(model, step.total)
    chosen = question.hardware
    found = {chosen.name: chosen, **(devices() if hardware is None else hardware)} | {chosen.name: chosen}
    joined = {name: each for name, each in found.items() if step.ranks == 1 or each.link_bytes_per_second}
    options, tried = [], candidates(model, measured, question.engine)
    for index, candidate in enumerate(tried):
        try:
            option = _option(candidate, measured.get(candidate.target), step)
            typed = commands(candidate.target, candidate.convert_to, model, source, question.engine)
            runs_on = [name for name, each in joined.items() if candidate.runs_on(each)]
            options.append(option | {"commands": typed, "devices": runs_on})
        except ArgumentError:  # its heads cannot be shared out among the devices
            if index == 0:  # the model itself
                raise
    return {
        "source": source,
        "label": model.label,
        "question": {
            "hardware": chosen.name,
            "context": step.total,
            "batch": step.batch,
            "dtype": step.dtype.removeprefix("torch."),
            "bits": step.cache_bits,
            "goal": question.goal,
            "max_quality_loss": question.max_quality_loss,
            "is_usual": question.is_usual,
            "usable": question.usable,
        },
        "ranks": step.ranks,
        "most_context": positions or None,
        "trained_context": model.max_position_embeddings,
        "stored": None if model.stored is None else counted_weights(model, "in the dtype"),
        "notes": (
            *timed_notes,
            *weight_notes(model, tried),
            *engine_notes(model, question.engine, measured),
            *predicted_note(option["is_predicted"] for option in options),
        ),
        "choices": list(dict.fromkeys((step.dtype.removeprefix("torch."), *_DTYPES))),
        "dtypes": {**DTYPE_BYTES, "float8": 1},
        "peak_names": DTYPE_NAMES,
        "devices": {name: _device(each) for name, each in joined.items()},
        "efficiency": as_document(Efficiency()),
        "chunk": CHUNK,
        "most_parts": MOST_PARTS,
        "most_sequences": MOST_SEQUENCES,
        "safe_loss": SAFE_LOSS,
        "predicted_error": PREDICTED_ERROR,
        "converted": converted,
        "options": options,
        "steps": [dict(step) for step in steps],
    }


def _device(device: Device) -> dict[str, Any]:
    names = ("label", "memory_bytes", "bytes_per_second", "link_bytes_per_second", "source")
    curves = {dtype: to_table(found) for dtype, found in device.curves.items()}
    return {"peaks": dict(device.peaks), "curves": curves, **{name: getattr(device, name) for name in names}}


def _option(candidate: Candidate, measured: Measured | None, step: Pass) -> dict[str, Any]:
    model = candidate.model
    held = held_weights(model, step.ranks)
    loss, at_most = known_loss(candidate, measured)
    diverged = loss is not None and math.isinf(loss)
    return {
        "target": candidate.target,
        "label": model.label,
        "convert_to": candidate.convert_to,
        "is_first_size": candidate.is_first_size,
        "is_safe": candidate.is_safe,
        "served_by": candidate.served_by,
        "words": candidate.words,
        "cache_bits": candidate.cache_bits,
        "parameters": weights(model).total,
        "weights": {
            "wide": held.unquantised,
            "packed": held.packed,
            "is_bound": model.stored is not None and model.stored.is_bound,
        },
        "loss": None if diverged else loss,
        "loss_at_most": None if diverged else at_most,
        "diverged": diverged,
        "is_predicted": measured is not None and measured.is_predicted,
        "kl": None if measured is None else measured.kl,
        "work": {
            "hidden_size": model.hidden_size,
            "streams": known_body(model).streams,
            **_model(model_work(model, step.ranks)),
        },
    }


def _model(work: ModelWork) -> dict[str, Any]:
    return {"layers": [_layer(kind) for kind in work.layers], "body": [as_document(each) for each in work.body]}


def _layer(kind: LayerWork) -> dict[str, Any]:
    # What is chosen among implementations of as many FLOPs is what a pass of one token chooses.
    first = kind.impl("auto", 1, 1)
    names = sorted((name for name in kind.step if name in _CHOSEN), key=lambda name: name != first)
    return {
        "times": kind.times,
        "reach": as_document(kind.reach),
        "step": {name: [as_document(each) for each in kind.step[name]] for name in names},
        "prompt": {name: [as_document(each) for each in kind.prompt[name]] for name in names},
        "network": [as_document(each) for each in kind.network],
        "values": kind.values,
        "state": kind.state,
    }


DEFAULT_HARDWARE = "h100"
"""The device that a page begins with where a command names none; the reader may choose another."""


def page(
    data: Mapping[str, Any] | None,
    results: Sequence[Section] = (),
    *,
    title: str = "",
    notes: Sequence[str] = (),
    version: str = "",
) -> str:
    """The page of a model, of results, or of both.

    For example ``page(page_data(read_spec("llama-3-8b"), question, {}))``.

    Args:
        data: of `page_data`; None for results alone.
        results: sections below the model.
        title: of the page; the model's name when empty.
        notes: above all else.
        version: of headwise.

    Raises:
        MissingExtraError: plotly, whose script the page carries, is not installed.
    """
    refuse_no_plotly("html", True)
    from plotly.offline import get_plotlyjs

    model, parts = "", [get_plotlyjs()]
    carried: dict[str, Any] = {"figures": [section.figure for section in results]}
    if data is not None:
        shares = data["efficiency"]
        model = _part("model.html").format(
            compute=shares["compute"],
            memory=shares["memory"],
            microseconds=1e6 * shares["seconds"],
        )
        parts += [_part("arithmetic.js")]
        carried |= data
    figures = (
        f'<div class="plot" id="figure-{index}"></div>' if each.figure else "" for index, each in enumerate(results)
    )
    body = "".join(
        [
            *(f"<p>{escape(note)}</p>\n" for note in notes),
            model,
            *(f"{html(section)}\n{figure}\n" for section, figure in zip(results, figures, strict=True)),
            f'<p class="small">headwise {escape(version)}</p>\n' if version else "",
            f'<script type="application/json" id="data">{_embedded(carried)}</script>\n',
            *(
                f"<script>{text}</script>\n"
                for text in [*parts, _part("plots.js"), *([_part("page.js")] if data else [])]
            ),
        ]
    )
    name = title or f"{PurePath(carried.get('source', '')).name}: what to do with its cache"
    return web_page(name, body, _part("page.css"))


def _part(name: str) -> str:
    return (files("headwise.decide.report") / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element that it stands in, nor begin a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
