"""Tables of a report's page, and the folder of a model or a frontier that they are read from.

Sections stand below the model: tables and plots of results, from the JSON that headwise's commands print and that was
saved in a folder. Decode steps that evaluations timed stand beside predicted ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeGuard

from headwise.base.documents import FRONTIER, MEASURED, PREDICTED, load_json
from headwise.base.pages import Draw
from headwise.base.tables import Table
from headwise.decide.advice import AS_IT_IS, Measured, by_target, read_points
from headwise.decide.report.plots import Line, measured_roofline, positions_figure
from headwise.errors import ArgumentError, CheckpointError, HeadwiseError, StorageError, naming
from headwise.models.specs import ModelSpec, read_spec


def measured_steps(documents: Iterable[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """The timed decode steps of a model in evaluations' JSON, as JSON-able values.

    For example ``measured_steps([headwise.evaluate("./mla", text="text.txt").to_dict()], "./mla")[0]["seconds"]``.

    Args:
        documents: what ``headwise evaluate --json`` printed, among other results.
        source: the model, evaluated by itself or as the reference of another; its path may have changed.
    """
    found = []
    for document in documents:
        if not {"texts", "decode_ms", "context", "dtype", "threads", "device"} <= set(document):
            continue
        if document.get("engine") is not None:  # predictions are of transformers
            continue
        timed = (
            (document.get("cache") or AS_IT_IS, document.get("model"), document["decode_ms"]),
            (AS_IT_IS, document.get("against"), document.get("reference_decode_ms")),
        )
        for target, name, milliseconds in timed:
            if _is_same(name, source) and _is_positive(milliseconds) and _is_positive(document["context"]):
                found.append(
                    {
                        "target": target,
                        "context": int(document["context"]),
                        "seconds": milliseconds / 1e3,
                        "dtype": document["dtype"],
                        "where": f"{document['device']}, {document['threads']} threads, {document['dtype']}",
                    }
                )
    return found


def _is_same(name: object, source: str) -> bool:
    """Whether two names are of one model: one folder, or where one of them is gone, folders of one name."""
    if not isinstance(name, str):
        return False
    one, other = Path(name), Path(source)
    if one.exists() and other.exists():
        return one.resolve() == other.resolve()
    return one.resolve().name == other.resolve().name


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


class Section(NamedTuple):
    """One result, for example ``sections(headwise.compare("llama-3-8b").to_dict())[0].table.title``.

    Attributes:
        table: the result as a table with its title and notes.
        draw: a plot of it; None where there is none.
    """

    table: Table
    draw: Draw | None = None


def sections(document: Mapping[str, Any], *, name: str = "result") -> list[Section]:
    """The sections of one document that a command of headwise printed with ``--json``, or that a frontier kept.

    For example ``sections(headwise.compare("llama-3-8b").to_dict())[0].table.title``.

    Args:
        document: the JSON of ``compare``, ``evaluate``, ``bench``, ``convert`` or ``frontier``, with or without
            ``--quick``.
        name: the file that it was read from.

    Returns:
        None, where it is none of these.

    Raises:
        CheckpointError: the document seems to be one of these, and lacks something.
    """
    try:
        return [section for is_one, made in _KINDS if is_one(document) for section in made(document)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        rule = f"must be a document that headwise printed with --json: {type(error).__name__} {error}"
        raise CheckpointError("report", name, rule) from None


def _number(value: Any, style: str = ",.3f") -> str:
    """A number that was measured; a dash where none was."""
    if value is None:
        return "–"
    number = float(value)
    return format(number, style) if math.isfinite(number) else "diverged"


def _comparison(document: Mapping[str, Any]) -> Iterable[Section]:
    rows = document["rows"]
    is_timed = any(row.get("decode_ms") is not None for row in rows)
    timed = ("decode ms", "prefill ms") if is_timed else ()
    counted = {"kv_bytes_per_token": ",.0f", "attention_parameters_per_layer": ",.0f"}
    counted |= {"prefill_flops": ".3g", "decode_flops": ".3g", "decode_intensity": ",.1f"}
    table = Table(
        ("", "cache B/token", "params a layer", "prefill FLOPs", "decode FLOPs", "FLOPs/B", *timed),
        title="Mechanisms side by side",
        rows=[
            (
                f"{row['label']}{' (the model)' if row['is_source'] else ''}",
                *(_number(row[name], style) for name, style in counted.items()),
                *((_number(row.get("decode_ms")), _number(row.get("prefill_ms"))) if is_timed else ()),
            )
            for row in rows
        ],
        notes=[
            f"Exact counts of attention alone, at {document['context']:,} tokens × {document['batch']:,}, in a "
            f"{document['dtype']} cache.{' Times are measured on one layer.' if is_timed else ''}"
        ],
    )
    yield Section(table)


def _evaluation(document: Mapping[str, Any]) -> Iterable[Section]:
    rows = [
        (
            PurePath(text["text"]).name,
            _number(text["perplexity"]),
            _number(text.get("reference_perplexity")),
            _number(text.get("perplexity_ratio"), ".4f"),
            _number(text.get("kl"), ".4f"),
            _number(text.get("kl_999"), ".4f"),
            _number(text.get("top1_agreement"), ".1%"),
            _number(text.get("top1_changed"), ",.0f"),
        )
        for text in document["texts"]
    ]
    begin = " that begin with " + " ".join(document["begin"]) if document.get("begin") else ""
    notes = [
        f"{document['tokens']:,} tokens in windows of {document['window']:,}{begin}, {document['dtype']};"
        " KL in nats.",
        f"Cache: {_number(document['cache_bytes_per_token'], ',.0f')} bytes a token"
        f" (the reference's {_number(document.get('reference_cache_bytes_per_token'), ',.0f')}); decoding at"
        f" {document['context']:,} tokens: {_number(document['decode_ms'], ',.1f')} ms a token"
        f" (the reference's {_number(document.get('reference_decode_ms'), ',.1f')}).",
    ]
    notes += _continued(document)
    table = Table(
        ("", "perplexity", "reference's", "ratio", "KL", "99.9%", "top-1", "changed"),
        rows,
        title=f"Quality of {PurePath(document['model']).name} on text",
        notes=notes,
    )
    lines = [pair for text in document["texts"] if (pair := _by_position(text)) is not None]
    yield Section(table, partial(positions_figure, lines) if lines else None)


def _continued(evaluation: Mapping[str, Any] | None) -> list[str]:
    """What an evaluation says of greedy continuations, if anything."""
    found = (evaluation or {}).get("continuations")
    return [] if found is None else [found["line"]]


def _by_position(text: Mapping[str, Any]) -> tuple[Line, Line | None] | None:
    """The cost of a token by its position, of a model and its reference; None where it was not kept."""
    buckets, name = text.get("by_position") or (), PurePath(text["text"]).name
    if len(buckets) < 2:
        return None
    ends = [bucket["stop"] - 1 for bucket in buckets]
    own, theirs = ([bucket.get(key) for bucket in buckets] for key in ("nll", "reference_nll"))
    if None in own:
        return None
    return (name, ends, own), None if None in theirs else (f"{name}, reference", ends, theirs)


def _tasks(document: Mapping[str, Any]) -> Iterable[Section]:
    """Tasks that are evaluated beside texts, or alone."""
    found = {
        name: document[name] for name in ("choices", "planted", "retrieval") if isinstance(document.get(name), dict)
    }
    names = {
        "accuracy": "multiple choice, accuracy",
        "accuracy_norm": "multiple choice, accuracy by length",
        "found": "planted facts, repeated",
        "first": "planted facts, likeliest of the codes",
        "recall_at_1": "retrieval, R@1",
        "recall_at_10": "retrieval, R@10",
    }
    if isinstance(ruler := document.get("ruler"), dict):
        for task in ruler["tasks"]:
            name = f"RULER's {task['task']}, all answers"
            names[name], found[name] = name, {name: task["complete"]}
    rows = [
        (
            label,
            f"{rate['items']:,}",
            _number(rate["rate"], ".1%"),
            f"{rate['low']:.1%} to {rate['high']:.1%}",
            _number(rate.get("reference_rate"), ".1%"),
        )
        for task in found.values()
        for key, label in names.items()
        if (rate := task.get(key)) is not None
    ]
    heading = ("", "items", "model", "95 % interval", "reference")
    if rows:
        yield Section(Table(heading, rows, title="Tasks"))


def _bench(document: Mapping[str, Any]) -> Iterable[Section]:
    cases = document["cases"]
    ways = list(dict.fromkeys(way for case in cases for way in case["ways"]))
    rows = [
        (
            case["name"],
            _number(case["limit_ms"], ".3g"),
            *(_number(case["ways"].get(way, {}).get("ms"), ".3g") for way in ways),
        )
        for case in cases
    ]
    limit = "Medians of interleaved runs. The limit: bytes over the read bandwidth, or FLOPs over 0.7 of the peak."
    table = Table(("ms", "limit", *ways), rows, title=f"Measured: {document['kind']}", notes=[limit])
    counted = [case for case in cases if case["flops"] and case["nbytes"]]
    if not counted:
        yield Section(table)
        return
    points = {
        way: [
            (case["flops"] / case["nbytes"], case["flops"] / case["ways"][way]["ms"] * 1e3)
            for case in counted
            if case["ways"].get(way, {}).get("ms")
        ]
        for way in ways
    }
    peak, bandwidth = (max(case[f"{name}_per_second"] for case in counted) for name in ("matmul_flops", "read_bytes"))
    yield Section(table, partial(measured_roofline, points, peak, bandwidth))


def _conversion(document: Mapping[str, Any]) -> Iterable[Section]:
    pairs = (
        ("cache bytes a token", "kv_bytes_per_token_before", "kv_bytes_per_token_after"),
        ("parameters", "parameters_before", "parameters_after"),
    )
    how = f"Method {document['method']}, {document['calibration_tokens']:,} tokens of calibration, "
    table = Table(
        ("", "before", "after"),
        [(name, f"{document[before]:,}", f"{document[after]:,}") for name, before, after in pairs],
        title=f"Conversion to {document['label']}",
        notes=[f"{how}{document['seconds']:,.0f} s.", *(document.get("notes") or ())],
    )
    yield Section(table)
    if document.get("evaluation"):
        yield from _evaluation(document["evaluation"])


def _frontier(document: Mapping[str, Any]) -> Iterable[Section]:
    rows = [
        (
            point["target"],
            point["label"],
            _number(point["cache_bytes_per_token"], ",.0f"),
            _number(point["cache_fraction"], ".1%"),
            _number(math.inf if point["perplexity_ratio"] is None else point["perplexity_ratio"], ".4f"),
            _number(point.get("kl"), ".4f"),
            _number(point.get("kl_999"), ".4f"),
            _number(point.get("top1_agreement"), ".1%"),
            _number(point.get("top1_changed"), ",.0f"),
        )
        for point in document["points"]
    ]
    table = Table(
        ("", "attention", "cache B/token", "share", "perplexity ratio", "KL", "99.9%", "top-1", "changed"),
        rows,
        title="What was measured",
        notes=[
            f"On {document['tokens']:,} tokens; KL in nats a token.",
            *(f"{one['target']}: {line}" for one in document["points"] for line in _continued(one.get("evaluation"))),
        ],
        words=(0, 1),
    )
    yield Section(table)


def _prediction(document: Mapping[str, Any]) -> Iterable[Section]:
    rows = [
        (
            point["target"],
            point["runs_in"],
            _number(point["cache_bytes_per_token"], ",.0f"),
            _number(point["cache_fraction"], ".1%"),
            _number(math.inf if point["kl"] is None else point["kl"], ".2g"),
        )
        for point in document["points"]
    ]
    table = Table(
        ("", "runs in", "cache B/token", "share", "KL"),
        rows,
        title="What is predicted, and not measured",
        notes=[f"From {document['tokens']:,} tokens; KL in nats a token; {document['error']}."],
        words=(0, 1),
    )
    yield Section(table)


_Made = Callable[[Mapping[str, Any]], Iterable[Section]]

_KINDS: tuple[tuple[Callable[[Mapping[str, Any]], bool], _Made], ...] = (
    (lambda document: "points" in document and "cache_bytes_per_token" in document, _frontier),
    (lambda document: document.get("is_predicted") is True and "points" in document, _prediction),
    (lambda document: "kv_bytes_per_token_after" in document, _conversion),
    (lambda document: "texts" in document and "perplexity" in document and "points" not in document, _evaluation),
    (lambda document: any(name in document for name in ("choices", "planted", "ruler", "retrieval")), _tasks),
    (lambda document: "kind" in document and "cases" in document, _bench),
    (lambda document: "rows" in document and "match" in document, _comparison),
)


_LARGEST = 64 * 2**20
"""The largest file that is read, in bytes."""


@dataclass(frozen=True, kw_only=True)
class FolderResults:
    """What a folder holds.

    Attributes:
        source: the model's name.
        model: the model's spec; None where it cannot be read.
        measured: quality, measured or predicted, by target.
        sections: the sections of every result.
        notes: what was left out, and why.
        steps: decode steps of the model that were timed.
        converted: what the conversion that made the model measured of it, in a sentence; empty where none did.
    """

    source: str
    model: ModelSpec | None
    measured: Mapping[str, Measured]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    converted: str = ""


def read_folder(folder: str | Path, *, source: str | None = None) -> FolderResults:
    """Read a model's folder or a frontier's, and every result in it that a command printed with ``--json``.

    For example ``read_folder("./out").measured["mla:0.5"].loss``.

    Args:
        folder: a folder with ``config.json``, ``frontier.json``, or files of results; or the config of a model alone:
            a ``.gguf``, a ``config.json``, a catalog name or ``hf://owner/name``.
        source: the model that the results are of; the folder's or its frontier's own when None.

    Raises:
        ArgumentError: the path is no folder and no model, or the folder has no results.
        HeadwiseError: a file cannot be read, or ``source`` cannot be opened.
    """
    place = Path(folder)
    if not place.is_dir():
        return _of_config(str(folder), source)
    documents = {file.name: _document(file) for file in sorted(place.glob("*.json"))}
    found = {name: sections(document, name=str(place / name)) for name, document in documents.items()}
    has_model = (place / "config.json").is_file()
    if not has_model and not any(found.values()) and source is None:
        raise ArgumentError("folder", str(folder), "must have a config.json, a frontier.json or results of --json")
    frontiers = {name: documents[name] for name in (FRONTIER, PREDICTED) if name in documents}
    named = next((document.get("source") for document in frontiers.values()), None)
    name = source or (str(folder) if has_model else named if isinstance(named, str) else "")
    model, notes = None, []
    try:
        model = read_spec(name) if name else None
    except HeadwiseError as error:
        if source is not None:
            raise
        notes.append(f"the model is not shown: {error}")
    if model is not None and model.body is None:
        model, notes = None, [*notes, "the model is not shown: its body is not understood"]
    known = (read_points(document, model, name=str(place / name)) for name, document in frontiers.items())
    return FolderResults(
        source=name or str(folder),
        model=model,
        measured=by_target(point for points in known for point in points.values()),
        sections=tuple(section for made in found.values() for section in made),
        notes=tuple(notes),
        steps=tuple(measured_steps(documents.values(), name)),
        converted="" if FRONTIER in documents else _converted(documents.get(MEASURED, {})),
    )


def _of_config(name: str, source: str | None) -> FolderResults:
    """The model that a name or a file stands for, of which nothing is measured."""
    if source is not None:
        raise ArgumentError("source", source, f"goes with a folder of results, and {name} is none")
    with naming(source="folder"):
        model = read_spec(name)
    if model.body is None:
        raise ArgumentError("folder", name, "is a model whose body is not understood, so that nothing is predicted")
    return FolderResults(source=name, model=model, measured={}, sections=())


def _converted(document: Mapping[str, Any]) -> str:
    """What a conversion measured of itself, in a sentence; empty where there is no such file, or it says nothing."""
    points = document.get("points")
    if not isinstance(points, list) or len(points) != 1:
        return ""
    with suppress(HeadwiseError):
        (point,) = read_points({"points": [{**points[0], "way": "headwise"}]}).values()
        loss = f"×{1 + point.loss:.3f}" if math.isfinite(point.loss) else "infinitely many times"
        return (
            f"This model is a conversion, {point.target} ({point.label}): perplexity is {loss} its original's, at "
            f"{point.cache_fraction:.1%} of the cache, measured"
        )
    return ""


def _document(file: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where it is none, as a tokenizer's files may be."""
    try:
        if file.stat().st_size > _LARGEST:
            return {}
        document = load_json(file, _LARGEST)
    except (OSError, ValueError) as error:
        raise StorageError("report", str(file), f"cannot be read: {error}") from None
    return document if isinstance(document, dict) else {}
