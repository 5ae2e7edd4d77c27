"""`frontier`: try many ways to make one model's cache smaller, each on the same texts: quality against cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from headwise.base.disk import working_folder
from headwise.base.documents import FRONTIER, refuse_no_plotly
from headwise.base.options import FrontierOptions, takes_options
from headwise.base.processes import barrier, process_count, process_index
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import typed
from headwise.conversion.closing_evaluation import choose_exam, overlap_notes, refuse_unexamined, window_notes
from headwise.conversion.frontiers.candidate import Candidate
from headwise.conversion.frontiers.ladder import list_candidates
from headwise.conversion.frontiers.page import markdown, page
from headwise.conversion.frontiers.points import Frontier, collect
from headwise.conversion.frontiers.results import WORK, Setting, refuse_output, result_of, write_file
from headwise.errors import HeadwiseError, StorageError
from headwise.measure.texts import check_texts, named_texts, read_source, refuse_texts_within
from headwise.models.checkpoints import open_checkpoint, versions
from headwise.runtime.hf import as_device, as_dtype

_MODELS = "models"


@takes_options(FrontierOptions)
@typed
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
        progress: told of each conversion, layer and window.

    Raises:
        ArgumentError: an argument is outside its rule, or a text is too short.
        SpecError: the source's attention is of a kind that is not converted.
        CheckpointError: the source cannot be read, or the output cannot be written.
        MissingExtraError: ``plot`` is set, and plotly is not installed.
    """
    if options.plot:
        refuse_no_plotly("plot", True)
    texts = check_texts(options.calibrate, options.calibration_tokens, options.calibration_window)
    folder = Path(output)
    refuse_output(folder)
    named = named_texts(options.evaluate)
    refuse_texts_within(folder, texts.sources, name="calibrate")
    refuse_texts_within(folder, named, name="evaluate")
    for text in named:
        read_source(text, characters=1, name="evaluate")  # refuses a missing text before any work
    dtype = None if options.dtype is None else as_dtype(options.dtype)
    as_device(options.device)  # refused before any work
    checkpoint = open_checkpoint(source)
    refuse_unexamined(checkpoint.spec)
    candidates, notes = list_candidates(checkpoint, options.targets, methods=options.methods, dtype=dtype)
    exam = choose_exam(checkpoint, named, calibrate=texts, window=options.window, windows=options.windows)
    notes += [*checkpoint.notes, *overlap_notes(checkpoint, exam, texts), *window_notes(checkpoint, exam)]
    with _shared_work_folder(folder) as work:
        setting = Setting(
            checkpoint=checkpoint,
            source=str(source),
            output=folder,
            options=options,
            models=folder / _MODELS if options.keep else work,
            calibrate=texts,
            exam=exam,
            dtype=dtype,
            progress=progress,
        )
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
        name = folder / ("methods.json" if options.methods else FRONTIER)
        write_file(name, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
        write_file(name.with_suffix(".md"), markdown(result))
        if options.plot:
            write_file(name.with_suffix(".html"), page(result))
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
            if process_count() > 1:  # the others may be waiting for this one, within the candidate
                raise
            # A new error, because the traceback of the caught one holds models in memory.
            failures.append(type(error)(error.field, error.value, error.rule))
            notes.append(f"not measured: {candidate.target}, {candidate.way} ({error.field} {error.rule})")
    setting.progress("frontier", len(candidates), len(candidates))
    if not results:
        raise failures[0]
    return results


@contextmanager
def _shared_work_folder(folder: Path) -> Iterator[Path]:
    """The working folder, which the first of several processes locks, and all use."""
    work = folder / WORK
    with working_folder(work, folder) if process_index() == 0 else nullcontext(work):
        barrier()
        yield work
        barrier()  # others may still use its files
