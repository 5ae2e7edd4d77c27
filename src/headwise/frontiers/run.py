"""`frontier`: many conversions of one model, each measured on the same texts: quality against bytes of cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headwise.arguments import typed
from headwise.checkpoints import open_checkpoint, versions
from headwise.checkpoints.disk import lock_folder, refuse_file, remove_locked, unlock
from headwise.conversion.proof import choose_exam, overlap_notes, refuse_unexamined
from headwise.errors import ArgumentError, CheckpointError, StorageError
from headwise.frontiers.ladder import Candidate, list_candidates
from headwise.frontiers.page import markdown, page, refuse_no_plotly
from headwise.frontiers.points import Frontier, collect
from headwise.frontiers.results import RESULTS, Setting, result_of, write_file
from headwise.hf import as_dtype
from headwise.options import FrontierOptions, takes_options
from headwise.progress import Progress, silent
from headwise.texts import check_texts, read_source

_MODELS, _WORK = "models", ".headwise-work"


@takes_options(FrontierOptions)
@typed
def frontier(
    source: str | Path, output: str | Path, options: FrontierOptions, *, progress: Progress = silent
) -> Frontier:
    """Convert a model to a ladder of targets, and measure each beside it on text that none was calibrated on.

    ``output`` gets ``frontier.json``, ``frontier.md`` and ``frontier.html`` (with ``methods``, ``methods.json`` and
    so on). A result is kept there as soon as there is one, under all that decides it: a run that ended early goes on,
    and one with other targets makes those alone that are new. For example
    ``frontier("smollm2-135m", "./out", calibrate="text.txt", targets=["mla:0.5", "mqa"])``.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``; a decoder.
        output: a folder: new, empty, or an earlier frontier's.
        options: the keywords below as one object, in their place.
        progress: told of each conversion, layer and window.

    Raises:
        ArgumentError: an argument is outside its rule, or a text is too short.
        SpecError: the source's attention is of a kind that is not converted.
        CheckpointError: the source cannot be read, or the output cannot be written.
        MissingExtraError: a plot is asked for, and plotly is not installed.
    """
    if options.plot:
        refuse_no_plotly()
    texts = check_texts(options.calibrate, options.calibration_tokens, options.calibration_window)
    folder = Path(output)
    _refuse_output(folder)
    evaluate = options.evaluate
    named = [evaluate] if isinstance(evaluate, str | Path) else list(evaluate or ())
    for text in named:
        read_source(text, characters=1, name="evaluate")  # or refused, before any work
    dtype = None if options.dtype is None else as_dtype(options.dtype)
    checkpoint = open_checkpoint(source)
    refuse_unexamined(checkpoint.spec)
    candidates, notes = list_candidates(checkpoint, options.targets, methods=options.methods, dtype=dtype)
    exam = choose_exam(checkpoint, named, calibrate=texts, window=options.window, windows=options.windows)
    notes += overlap_notes(checkpoint, exam, texts)
    with _own(folder) as work:
        setting = Setting(
            checkpoint=checkpoint,
            source=str(source),
            output=folder,
            models=folder / _MODELS if options.keep else work,
            calibrate=texts,
            exam=exam,
            dtype=dtype,
            keep=options.keep,
            progress=progress,
        )
        found = collect(
            _results(candidates, setting, notes),
            source=str(source),
            label=checkpoint.spec.layers[0].label,
            calibrate=tuple(map(str, texts.sources)),
            calibration_tokens=texts.tokens,
            methods=options.methods,
            versions=versions(),
            notes=notes,
        )
        name = folder / ("methods" if options.methods else "frontier")
        write_file(name.with_suffix(".json"), json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
        write_file(name.with_suffix(".md"), markdown(found))
        if options.plot:
            write_file(name.with_suffix(".html"), page(found))
    return found


def _results(
    candidates: Sequence[Candidate], setting: Setting, notes: list[str]
) -> list[tuple[Candidate, dict[str, Any]]]:
    """Each candidate's result; of those that cannot be measured a note says why.

    Raises:
        CheckpointError: none can be measured, or the disk fails.
    """
    results, failed = [], list[CheckpointError]()
    for step, candidate in enumerate(candidates):
        setting.progress("frontier", step, len(candidates))
        try:
            results.append((candidate, result_of(candidate, setting)))
        except StorageError:  # the other targets need the disk too
            raise
        except CheckpointError as error:
            failed.append(CheckpointError(error.field, error.value, error.rule))  # its traceback holds models
            notes.append(f"not measured: {candidate.target}, {candidate.way} ({error.field} {error.rule})")
    setting.progress("frontier", len(candidates), len(candidates))
    if not results:
        raise failed[0]
    return results


def _refuse_output(folder: Path) -> None:
    """Refuse a destination that is no folder, or one that holds something else.

    Raises:
        ArgumentError: it is one of those.
    """
    refuse_file(folder)
    try:
        is_ours = any((folder / name).is_dir() for name in (RESULTS, _WORK))
        if folder.is_dir() and not is_ours and any(folder.iterdir()):
            raise ArgumentError("output", str(folder), "holds something else; give a new folder, or a frontier's own")
    except OSError as error:
        raise ArgumentError("output", str(folder), f"cannot be used: {error.strerror}") from None


@contextmanager
def _own(folder: Path) -> Iterator[Path]:
    """A folder within the output to work in, which is this process's alone; what a killed run left in it stays.

    Raises:
        ArgumentError: another process has it.
        StorageError: it cannot be made.
    """
    work = folder / _WORK
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(work)
    except BlockingIOError as error:
        raise ArgumentError("output", str(folder), str(error.strerror)) from None
    except OSError as error:
        raise StorageError("output", str(folder), f"cannot be written: {error.strerror}") from None
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
