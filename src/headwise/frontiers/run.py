"""`frontier`: many conversions of one model, each measured on the same texts: quality against bytes of cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.arguments import typed
from headwise.checkpoints import Checkpoint, dtype_name, open_checkpoint, run_identity, versions
from headwise.checkpoints.disk import clearly, lock_folder, refuse_file, remove_locked, unlock, write_whole
from headwise.conversion.convert import convert
from headwise.conversion.planning.plan import POOLINGS
from headwise.conversion.proof import Exam, choose_exam, overlap_notes, refuse_unexamined
from headwise.errors import ArgumentError, CheckpointError
from headwise.evaluation import Pair, evaluate_windows, open_pair, score_window
from headwise.frontiers.ladder import Rung, plan_rungs
from headwise.frontiers.page import markdown, page, refuse_no_plotly
from headwise.frontiers.points import Frontier, collect
from headwise.hf import as_dtype
from headwise.progress import Progress, silent
from headwise.texts import read_source
from headwise.texts.calibration import NO_TEXTS, CalibrationTexts, check_texts, open_windows

_RESULTS, _MODELS, _WORK = "results", "models", ".headwise-work"


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What all rungs have in common."""

    checkpoint: Checkpoint
    source: str
    output: Path
    models: Path
    calibrate: CalibrationTexts
    exam: Exam
    dtype: torch.dtype | None
    keep: bool
    progress: Progress


@typed
def frontier(
    source: str | Path,
    output: str | Path,
    *,
    calibrate: str | Path | Sequence[str | Path],
    evaluate: str | Path | Sequence[str | Path] | None = None,
    targets: Sequence[str] = (),
    methods: bool = False,
    calibration_tokens: int | None = None,
    calibration_window: int | None = None,
    window: int | None = None,
    windows: int = 6,
    dtype: str | None = None,
    keep: bool = False,
    plot: bool = True,
    progress: Progress = silent,
) -> Frontier:
    """Convert a model to a ladder of targets, and measure each beside it on text that none was calibrated on.

    ``output`` gets ``frontier.json``, ``frontier.md`` and ``frontier.html`` (with ``methods``, ``methods.json`` and
    so on). A result is kept there as soon as there is one, under all that decides it: a run that ended early goes on,
    and one with other targets makes those alone that are new.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``; a decoder.
        output: a folder: new, empty, or an earlier frontier's.
        calibrate: a text, or several, to calibrate on; see `headwise.evaluation.read_source`.
        evaluate: a text, or several, to measure on; when None, what the calibration leaves of its own, or, where that
            is nothing, Python's language reference.
        targets: ``mla:F`` (a fraction of the source's cache), ``mla:R+P`` (latent and rotary key), ``gqa:K``, ``mqa``
            or ``mha``. When there are none: MLA at 0.75, 0.5, 0.33 and 0.25, GQA at each proper divisor of the
            key–value heads, and MQA.
        methods: at each target (MLA at 0.5 when there are none), headwise's conversion, the same without each stage
            of calibration that it has and without all, and the published methods.
        calibration_tokens: how many of their tokens; 16 384 when None.
        calibration_window: tokens in each window of them; 1024 when None, or as many as the model or a text has.
        window: tokens a window that is measured on; 2048, or all the model's positions if fewer, when None.
        windows: how many of each text.
        dtype: of the conversions, and to measure in; the source's when None.
        keep: leave the converted models in ``output/models``.
        plot: write the page, which needs plotly.
        progress: told of each conversion, layer and window.

    Raises:
        ArgumentError: an argument is outside its rule, or a text is too short.
        SpecError: the source's attention is of a kind that is not converted.
        CheckpointError: the source cannot be read, or the output cannot be written.
        MissingExtraError: a plot is asked for, and plotly is not installed.
    """
    if plot:
        refuse_no_plotly()
    if not calibrate and calibrate != "":
        raise ArgumentError("calibrate", None, "is required: what a conversion can do shows on a text")
    texts = check_texts(calibrate, calibration_tokens, calibration_window)
    folder = Path(output)
    _refuse_output(folder)
    named = [evaluate] if isinstance(evaluate, str | Path) else list(evaluate or ())
    for text in named:
        read_source(text, characters=1, name="evaluate")  # or refused, before any work
    out_dtype = None if dtype is None else as_dtype(dtype)
    checkpoint = open_checkpoint(source)
    refuse_unexamined(checkpoint.spec)
    rungs, notes = plan_rungs(checkpoint, targets, methods=methods, dtype=out_dtype)
    exam = choose_exam(checkpoint, named, calibrate=texts, window=window, windows=windows)
    notes += overlap_notes(checkpoint, exam, texts)

    with _own(folder) as work:
        common = _Common(
            checkpoint=checkpoint,
            source=str(source),
            output=folder,
            models=folder / _MODELS if keep else work,
            calibrate=texts,
            exam=exam,
            dtype=out_dtype,
            keep=keep,
            progress=progress,
        )
        results, failed = [], list[CheckpointError]()
        for step, rung in enumerate(rungs):
            progress("frontier", step, len(rungs))
            try:
                results.append((rung, _result(rung, common)))
            except CheckpointError as error:
                if _is_of_the_disk(error):  # which the others would need too
                    raise
                failed.append(CheckpointError(error.field, error.value, error.rule))  # its traceback holds models
                notes.append(f"not measured: {rung.target}, {rung.way} ({error.field} {error.rule})")
        progress("frontier", len(rungs), len(rungs))
        if not results:
            raise failed[0]
        found = collect(
            results,
            source=str(source),
            label=checkpoint.spec.layers[0].label,
            calibrate=tuple(map(str, texts.sources)),
            calibration_tokens=texts.tokens,
            methods=methods,
            versions=versions(),
            notes=notes,
        )
        name = folder / ("methods" if methods else "frontier")
        _write(name.with_suffix(".json"), json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
        _write(name.with_suffix(".md"), markdown(found))
        if plot:
            _write(name.with_suffix(".html"), page(found))
    return found


def _result(rung: Rung, common: _Common) -> dict[str, Any]:
    """A rung's conversion and evaluation, made now or by an earlier run.

    The model is removed once it has been measured, unless it is to be kept.
    """
    run = _identity(rung, common)
    kept = common.output / _RESULTS / f"{rung.slug}-{run[:12]}.json"
    model = common.models / rung.slug
    result = _read(kept)
    conversion = _converted(model, run)
    if conversion is None and (result is None or common.keep):
        conversion = _convert(rung, model, run, common)
    if result is None:
        pair = open_pair(model, against=common.source, dtype=_name(common.dtype), progress=common.progress)
        evaluation = evaluate_windows(pair, common.exam, progress=common.progress).to_dict()
        # Where the model lay is no finding.
        found: dict[str, Any] = {"conversion": conversion, "evaluation": {**evaluation, "model": rung.slug}}
        if rung.is_fold:
            found["held_out_loss"] = _held_out_loss(pair, common)
        _write(kept, json.dumps(found, indent=2))
        result = _read(kept)
        assert result is not None
    if not common.keep:
        shutil.rmtree(model, ignore_errors=True)
        _stamp(model).unlink(missing_ok=True)
    return result


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Whether a file could not be read or written, or there is no room for it."""
    while isinstance(error, CheckpointError) and error.field != "output":
        error = error.__context__
    return isinstance(error, CheckpointError | OSError)


def _held_out_loss(pair: Pair, common: _Common) -> float:
    """Nats a token on the windows that calibration holds out: what is chosen between conversions by is no exam."""
    windows, held = open_windows(common.checkpoint, common.calibrate)
    losses = [score_window({"model": pair.models["model"]}, ids)["nll"] for ids in windows[-held:]]
    return float(torch.cat(losses).mean())


def _convert(rung: Rung, model: Path, run: str, common: _Common) -> dict[str, Any]:
    """Convert, and note beside the model which run it is of: without that a kill leaves it nobody's."""
    _stamp(model).unlink(missing_ok=True)
    texts = _studied(rung, common)
    done = convert(
        common.source,
        model,
        calibrate=texts.sources,
        calibration_tokens=texts.tokens if texts else None,
        calibration_window=texts.window,
        dtype=_name(common.dtype),
        evaluate=False,  # what is measured here is the same for all
        overwrite=model.is_dir(),
        progress=common.progress,
        **rung.options(),
    )
    conversion = {**done.to_dict(), "output": rung.slug}
    del conversion["evaluation"]  # there is none
    _write(_stamp(model), json.dumps({"run": run, "conversion": conversion}))
    return conversion


def _converted(model: Path, run: str) -> dict[str, Any] | None:
    """What is known of a model that this very run, or one like it, has converted."""
    known = _read(_stamp(model))
    if known is None or known.get("run") != run or not (model / "config.json").is_file():
        return None
    conversion: dict[str, Any] = known["conversion"]
    return conversion


def _identity(rung: Rung, common: _Common) -> str:
    """What tells a result from every other."""
    texts = [[name, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), *ids.shape] for name, ids in common.exam]
    return run_identity(
        common.checkpoint,
        rung=[rung.target, rung.method, sorted(rung.without), *(["held out"] if rung.is_fold else [])],
        dtype=_name(common.dtype),
        calibrate=_studied(rung, common).identity(),
        texts=texts,
    )


def _studied(rung: Rung, common: _Common) -> CalibrationTexts:
    return NO_TEXTS if rung.method in POOLINGS else common.calibrate


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def _stamp(model: Path) -> Path:
    return model.with_name(f"{model.name}.json")


def _read(file: Path) -> dict[str, Any] | None:
    """A JSON object that was written whole, if it is there."""
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return None


def _write(file: Path, content: str) -> None:
    with clearly("output", file):
        file.parent.mkdir(exist_ok=True)
        write_whole(file, content.encode(errors="backslashreplace"))


def _refuse_output(folder: Path) -> None:
    """Refuse a destination that is no folder, or one that holds something else.

    Raises:
        ArgumentError: it is one of those.
    """
    refuse_file(folder)
    try:
        is_ours = any((folder / name).is_dir() for name in (_RESULTS, _WORK))
        if folder.is_dir() and not is_ours and any(folder.iterdir()):
            raise ArgumentError("output", str(folder), "holds something else; give a new folder, or a frontier's own")
    except OSError as error:
        raise ArgumentError("output", str(folder), f"cannot be used: {error.strerror}") from None


@contextmanager
def _own(folder: Path) -> Iterator[Path]:
    """A folder within the output to work in, which is this process's alone; what a killed run left in it stays.

    Raises:
        ArgumentError: another process has it.
        CheckpointError: it cannot be made.
    """
    work = folder / _WORK
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(work)
    except BlockingIOError as error:
        raise ArgumentError("output", str(folder), str(error.strerror)) from None
    except OSError as error:
        raise CheckpointError("output", str(folder), f"cannot be written: {error.strerror}") from None
    try:
        yield work
    except BaseException:
        if any(path.name != "lock" for path in work.iterdir()):
            unlock(lock)  # it is gone on with
        else:
            remove_locked(work, lock)
        for path in missing:  # innermost first; one that holds something stays
            with suppress(OSError):
                path.rmdir()
        raise
    remove_locked(work, lock)
