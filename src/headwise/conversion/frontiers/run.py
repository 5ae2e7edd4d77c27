"""`frontier`: try many ways to make one model's cache smaller on the same texts, and keep each result.

A candidate's result is made and evaluated now, or was saved by an earlier run. Its file is named after a digest of
everything that decides it, so that a run goes on, or grows by a target, without an index.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwise.base.disk import refuse_file, refuse_no_folder
from headwise.base.documents import FRONTIER, PREDICTED, read_document
from headwise.base.jobs import ANY_RUN, Job, remembered, write_file
from headwise.base.options import FrontierOptions, takes_options
from headwise.base.pages import refuse_no_matplotlib
from headwise.base.processes import entered_first, on_main_process, process_count
from headwise.base.progress import Progress, silent, untimed
from headwise.base.type_checks import checked_types
from headwise.conversion import convert
from headwise.conversion.frontiers.candidate import Candidate, list_candidates
from headwise.conversion.frontiers.page import markdown, page
from headwise.conversion.frontiers.points import Frontier, collect
from headwise.conversion.plan import CONVERSION
from headwise.errors import ArgumentError, HeadwiseError, StorageError
from headwise.measure.evaluation import Pair, cut_prompts, evaluate_windows, open_pair, score_window
from headwise.measure.evaluation.beside_source import (
    EvaluationSet,
    bfloat16_bytes,
    choose_evaluation_set,
    overlap_notes,
    refuse_no_evaluation_set,
    served_bytes,
    window_notes,
)
from headwise.measure.texts import (
    NO_TEXTS,
    CalibrationTexts,
    check_texts,
    named_texts,
    open_windows,
    read_source,
    refuse_inputs_within,
)
from headwise.measure.texts.circumstances import circumstances
from headwise.models.checkpoints import Checkpoint, dtype_name, open_checkpoint, run_identity, versions
from headwise.models.checkpoints.writer import MODEL
from headwise.runtime.hf import as_device, as_dtype

RESULTS = "results"
"""The name of the folder of results within a frontier's output."""

WORK = ".headwise-work"
"""The name of the folder there that a run works in."""


@dataclass(frozen=True)
class Setting:
    """The settings that all candidates share.

    Attributes:
        checkpoint: the source.
        source: the source, as the user named it.
        output: the frontier's output folder.
        options: the user's options.
        models: the folder of converted models.
        calibrate: the calibration texts.
        evaluation_set: the windows to evaluate on.
        dtype: the dtype of the conversions; the source's when None.
        progress: the callback that is told of layers and windows.
    """

    checkpoint: Checkpoint
    source: str
    output: Path
    options: FrontierOptions
    models: Path
    calibrate: CalibrationTexts
    evaluation_set: EvaluationSet
    dtype: torch.dtype | None
    progress: Progress


def result_of(candidate: Candidate, setting: Setting) -> dict[str, Any]:
    """A candidate's conversion, if it is one, and its evaluation, from this run or an earlier one.

    The model is removed once it has been evaluated, unless ``setting.options.keep``.

    Returns:
        ``conversion``, the report of `headwise.convert`, None for a format of the source's cache; ``evaluation``;
        ``cache``, bytes a token of the candidate's cache and of the source's, where numbers that are not in codes are
        bfloat16; ``held_out_loss`` for variants of a method.
    """
    run = _identity(candidate, setting)
    file = setting.output / RESULTS / f"{candidate.slug}-{run[:12]}.json"
    keys = ("conversion", "evaluation", "cache", *(["held_out_loss"] if candidate.is_variant else []))
    if candidate.cache is not None:
        return remembered(
            file, keys, lambda: _document(candidate, setting.source, None, setting), listed_in=setting.output
        )
    model = setting.models / candidate.slug
    kept_in = setting.output if setting.options.keep else None
    conversion = partial(kept_model, model, run, lambda: _convert(candidate, model, setting), listed_in=kept_in)
    result = remembered(
        file, keys, lambda: _document(candidate, model, conversion(), setting), listed_in=setting.output
    )
    if setting.options.keep:
        conversion()  # a run that measured it need not have kept it
    else:
        on_main_process(partial(remove_model, model))
    return result


def _document(
    candidate: Candidate, model: str | Path, conversion: dict[str, Any] | None, setting: Setting
) -> dict[str, Any]:
    """Evaluate a candidate beside the source; see `result_of`."""
    progress, device, dtype = setting.progress, setting.options.device, _name(setting.dtype)
    pair = open_pair(model, against=setting.source, dtype=dtype, device=device, progress=progress)
    asked: dict[str, Any] = {"cache": candidate.cache, "continuations": setting.options.continuations}
    scored = evaluate_windows(pair, setting.evaluation_set, **asked, progress=progress, shared=True)
    document: dict[str, Any] = {
        "conversion": conversion,
        # The path of a model that is removed is no part of the result.
        "evaluation": {**scored.to_dict(), "model": candidate.slug},
        "cache": {
            "bytes_per_token": served_bytes(pair.checkpoints["model"], scored),
            "source_bytes_per_token": bfloat16_bytes(setting.checkpoint, scored.window),
        },
    }
    if candidate.is_variant:
        document["held_out_loss"] = _held_out_loss(pair, setting)
    setting.checkpoint.refuse_changed()  # it would be kept as a result of what the source was
    return document


def _held_out_loss(pair: Pair, setting: Setting) -> float:
    """Nats a token on calibration's held-out windows: the best variant must not be chosen on the evaluation text."""
    windows, held_out, _ = open_windows(setting.checkpoint, setting.calibrate)
    losses = [score_window({"model": pair.models["model"]}, ids)["nll"] for ids in windows[-held_out:]]
    return float(torch.cat(losses).mean())


def _convert(candidate: Candidate, model: Path, setting: Setting) -> dict[str, Any]:
    """Convert; the report without what is no part of the result."""
    texts = _texts(candidate, setting)
    report = convert(
        setting.source,
        model,
        calibrate=texts.sources,
        calibration_tokens=texts.tokens if texts else None,
        calibration_window=texts.window,
        dtype=_name(setting.dtype),
        device=setting.options.device,
        evaluate=False,  # all candidates are evaluated alike, on the frontier's windows
        overwrite=model.is_dir(),
        progress=untimed(setting.progress),  # the time left would be that of this candidate alone
        **candidate.options(),
    )
    setting.checkpoint.refuse_changed()
    conversion = {**report.to_dict(), "output": candidate.slug}
    del conversion["evaluation"]  # there is none
    return conversion


def kept_model(
    model: Path, run: str, make: Callable[[], dict[str, Any]], *, listed_in: Path | None = None
) -> dict[str, Any]:
    """The facts about a model folder, which is made where it is missing or of another run.

    The run is saved beside the folder once it is made, so that a later run can tell whose model it is.

    Args:
        model: the path of the folder.
        run: the identity of the run that makes the folder.
        make: the function that makes the folder, and returns the facts to keep as JSON-able values.
        listed_in: the folder, above the model, whose list of checksums these facts are on; None for a model that does
            not stay.
    """
    stamp = read_document(_stamp(model))
    if stamp is not None and stamp.get("run") == run and (model / MODEL).is_file():
        known: dict[str, Any] = stamp["conversion"]
        return known
    on_main_process(partial(_stamp(model).unlink, missing_ok=True))  # it is of the folder that is replaced now
    known = make()
    write_file(_stamp(model), json.dumps({"run": run, "conversion": known}), listed_in=listed_in)
    return known


def remove_model(model: Path) -> None:
    """Remove what `kept_model` keeps."""
    shutil.rmtree(model, ignore_errors=True)
    _stamp(model).unlink(missing_ok=True)


def _identity(candidate: Candidate, setting: Setting) -> str:
    """A digest of everything that decides a result."""
    # The windows to evaluate on, in place of the texts, the width and the number that they come from.
    evaluation_set = [
        [name, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), *ids.shape] for name, ids in setting.evaluation_set
    ]
    held_out = ["held out"] if candidate.is_variant else []
    decides = setting.options.identity() | {
        "evaluate": evaluation_set,
        "window": None,
        "windows": None,
        "dtype": _name(setting.dtype),
        "cache_bytes": "bfloat16",  # results of other units are measured again
        "conversion": CONVERSION,
        "candidate": [candidate.target, candidate.method, sorted(candidate.without), *held_out],
    }
    if not setting.options.continuations:
        del decides["continuations"]  # results that were kept before there were any are of this kind
    return run_identity(setting.checkpoint, **decides | _texts(candidate, setting).identity())


def _texts(candidate: Candidate, setting: Setting) -> CalibrationTexts:
    """The calibration texts of a candidate; none for a format of the cache, or for a method that uses none."""
    method = candidate.parsed_method
    is_without = candidate.cache is not None or (method is not None and not method.uses_text)
    return NO_TEXTS if is_without else setting.calibrate


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def _stamp(model: Path) -> Path:
    return model.with_name(f"{model.name}.json")


def refuse_output(folder: Path) -> None:
    """Refuse an output that is no folder, cannot be made, or holds anything but a frontier, measured or predicted.

    Raises:
        ArgumentError: the output is one of those.
    """
    refuse_file(folder)
    try:
        is_ours = any((folder / name).is_dir() for name in (RESULTS, WORK)) or (folder / PREDICTED).is_file()
        if folder.is_dir() and not is_ours and any(folder.iterdir()):
            raise ArgumentError("output", str(folder), "holds something else; give a new folder, or a frontier's own")
    except OSError as error:
        raise ArgumentError("output", str(folder), f"cannot be used: {error.strerror}") from None
    refuse_no_folder("output", folder / RESULTS)


_MODELS = "models"


@takes_options(FrontierOptions)
@checked_types
def frontier(
    source: str | Path, output: str | Path, options: FrontierOptions, *, progress: Progress = silent
) -> Frontier:
    """Quantise a model's cache, convert the model, or both, and evaluate each result beside the model.

    For example ``frontier("smollm2-135m", "./out", calibrate="text.txt", targets=["kivi4", "mla:0.5", "mla@0.25"])``.

    All are evaluated on the same text, which none is calibrated on, and compared by the bytes that their caches
    allocate, where numbers that are not in codes count as bfloat16.

    ``output`` gets ``frontier.json``, ``frontier.md`` and ``frontier.html`` (with ``methods``, ``methods.json`` and
    so on). Each result is saved there as soon as it is measured, under a digest of all that decides it: a run that
    was ended early continues, and a run with more targets converts only the new ones. Models are evaluated in the
    dtype that they are converted to.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``; a decoder.
        output: the folder to write: new, empty, or an earlier frontier's.
        options: the keywords below as one object, in place of them.
        progress: the callback that is told of each conversion, layer and window.

    Raises:
        ArgumentError: an argument is outside its rule, or a text is too short.
        SpecError: the source's attention is of a kind that is not converted.
        CheckpointError: the source cannot be read, or the output cannot be written.
        MissingExtraError: ``plot`` is set, and matplotlib is not installed.
    """
    if options.plot:
        refuse_no_matplotlib("plot", True)
    texts = check_texts(options.calibrate, options.calibration_tokens, options.calibration_window)
    folder = Path(output)
    refuse_output(folder)
    named = named_texts(options.evaluate)
    refuse_inputs_within(folder, {}, calibrate=texts.sources, evaluate=named)
    for text in named:
        read_source(text, characters=1, name="evaluate")  # refuses a missing text before any work
    dtype = None if options.dtype is None else as_dtype(options.dtype)
    as_device(options.device)  # refused before any work
    checkpoint = open_checkpoint(source)
    refuse_no_evaluation_set(checkpoint.spec)
    candidates, notes = list_candidates(checkpoint, options.targets, methods=options.methods, dtype=dtype)
    evaluation_set = choose_evaluation_set(
        checkpoint, named, calibrate=texts, window=options.window, windows=options.windows
    )
    # More prompts than a text has are refused before any work.
    cut_prompts(evaluation_set, options.continuations, positions=checkpoint.spec.max_position_embeddings)
    notes += [*checkpoint.notes, *overlap_notes(checkpoint, evaluation_set, texts)]
    notes += window_notes(checkpoint, evaluation_set)
    with entered_first(Job(folder, folder=folder / WORK, run=ANY_RUN)) as job:
        models = folder / _MODELS if options.keep else job.work
        setting = Setting(checkpoint, str(source), folder, options, models, texts, evaluation_set, dtype, progress)
        result = collect(
            _results(candidates, setting, notes),
            source=str(source),
            label=checkpoint.spec.layers[0].label,
            calibrate=tuple(map(str, texts.sources)),
            calibration_tokens=texts.tokens,
            methods=options.methods,
            versions=versions(),
            notes=notes,
        )
        read = [*texts.sources, *(name for name, _ in evaluation_set)]
        about = circumstances(checkpoint.path, dtype=result.dtype, texts=read, device=options.device)
        result = replace(result, made_with=about)
        name = folder / ("methods.json" if options.methods else FRONTIER)
        write_file(name, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n", listed_in=folder)
        write_file(name.with_suffix(".md"), markdown(result), listed_in=folder)
        if options.plot:
            write_file(name.with_suffix(".html"), page(result), listed_in=folder)
    return result


def _results(
    candidates: Sequence[Candidate], setting: Setting, notes: list[str]
) -> list[tuple[Candidate, dict[str, Any]]]:
    """Each candidate's result; ``notes`` gets the reason for each candidate that cannot be measured.

    Raises:
        HeadwiseError: no candidate can be measured; or the disk fails.
    """
    results, failures = [], list[HeadwiseError]()
    for step, candidate in enumerate(candidates):
        setting.progress("frontier", step, len(candidates))
        try:
            results.append((candidate, result_of(candidate, setting)))
        except StorageError:  # the other candidates need the disk too
            raise
        except HeadwiseError as error:
            setting.checkpoint.refuse_changed()
            if process_count() > 1:  # the others may be waiting for this one, within the candidate
                raise
            # A new error, because the traceback of the caught one holds models in memory.
            failures.append(type(error)(error.field, error.value, error.rule))
            notes.append(f"not measured: {candidate.target}, {candidate.way} ({error.field} {error.rule})")
    setting.progress("frontier", len(candidates), len(candidates))
    if not results:
        raise failures[0]
    return results
