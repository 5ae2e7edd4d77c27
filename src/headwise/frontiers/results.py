"""The result of one candidate: converted and measured now, or kept by an earlier run of the same frontier."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.checkpoints import Checkpoint, dtype_name, run_identity
from headwise.checkpoints.disk import clearly, write_whole
from headwise.conversion import convert
from headwise.conversion.proof import Exam
from headwise.evaluation import Pair, evaluate_windows, open_pair, score_window
from headwise.frontiers.ladder import Candidate
from headwise.progress import Progress
from headwise.texts import NO_TEXTS, CalibrationTexts, open_windows

RESULTS = "results"
"""The folder of results within a frontier's."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all candidates have in common.

    Attributes:
        checkpoint: the source.
        source: as the user named it.
        output: the frontier's folder.
        models: where converted models are put.
        calibrate: the texts to calibrate on.
        exam: windows to measure on.
        dtype: of the conversions; the source's when None.
        keep: whether converted models stay.
        progress: told of layers and windows.
    """

    checkpoint: Checkpoint
    source: str
    output: Path
    models: Path
    calibrate: CalibrationTexts
    exam: Exam
    dtype: torch.dtype | None
    keep: bool
    progress: Progress


def result_of(candidate: Candidate, setting: Setting) -> dict[str, Any]:
    """A candidate's conversion and evaluation, made now or by an earlier run.

    The model is removed once it has been measured, unless it is to be kept.
    """
    run = _identity(candidate, setting)
    kept = setting.output / RESULTS / f"{candidate.slug}-{run[:12]}.json"
    model = setting.models / candidate.slug
    result = _read(kept)
    conversion = _converted(model, run)
    if conversion is None and (result is None or setting.keep):
        conversion = _convert(candidate, model, run, setting)
    if result is None:
        pair = open_pair(model, against=setting.source, dtype=_name(setting.dtype), progress=setting.progress)
        evaluation = evaluate_windows(pair, setting.exam, progress=setting.progress).to_dict()
        # Where the model lay is no finding.
        found: dict[str, Any] = {"conversion": conversion, "evaluation": {**evaluation, "model": candidate.slug}}
        if candidate.is_variant:
            found["held_out_loss"] = _held_out_loss(pair, setting)
        write_file(kept, json.dumps(found, indent=2))
        result = _read(kept)
        assert result is not None
    if not setting.keep:
        shutil.rmtree(model, ignore_errors=True)
        _stamp(model).unlink(missing_ok=True)
    return result


def _held_out_loss(pair: Pair, setting: Setting) -> float:
    """Nats a token on the windows that calibration holds out: what is chosen between conversions by is no exam."""
    windows, held = open_windows(setting.checkpoint, setting.calibrate)
    losses = [score_window({"model": pair.models["model"]}, ids)["nll"] for ids in windows[-held:]]
    return float(torch.cat(losses).mean())


def _convert(candidate: Candidate, model: Path, run: str, setting: Setting) -> dict[str, Any]:
    """Convert, and note beside the model which run it is of: without that a kill leaves it nobody's."""
    _stamp(model).unlink(missing_ok=True)
    texts = _texts(candidate, setting)
    done = convert(
        setting.source,
        model,
        calibrate=texts.sources,
        calibration_tokens=texts.tokens if texts else None,
        calibration_window=texts.window,
        dtype=_name(setting.dtype),
        evaluate=False,  # what is measured here is the same for all
        overwrite=model.is_dir(),
        progress=setting.progress,
        **candidate.options(),
    )
    conversion = {**done.to_dict(), "output": candidate.slug}
    del conversion["evaluation"]  # there is none
    write_file(_stamp(model), json.dumps({"run": run, "conversion": conversion}))
    return conversion


def _converted(model: Path, run: str) -> dict[str, Any] | None:
    """What is known of a model that this very run, or one like it, has converted."""
    known = _read(_stamp(model))
    if known is None or known.get("run") != run or not (model / "config.json").is_file():
        return None
    conversion: dict[str, Any] = known["conversion"]
    return conversion


def _identity(candidate: Candidate, setting: Setting) -> str:
    """What tells a result from every other."""
    texts = [[name, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), *ids.shape] for name, ids in setting.exam]
    return run_identity(
        setting.checkpoint,
        candidate=[
            candidate.target,
            candidate.method,
            sorted(candidate.without),
            *(["held out"] if candidate.is_variant else []),
        ],
        dtype=_name(setting.dtype),
        calibrate=_texts(candidate, setting).identity(),
        texts=texts,
    )


def _texts(candidate: Candidate, setting: Setting) -> CalibrationTexts:
    """The texts that a conversion is calibrated on; none where its method uses none."""
    method = candidate.parsed_method
    return NO_TEXTS if method is not None and not method.uses_text else setting.calibrate


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


def write_file(file: Path, content: str) -> None:
    """Write a file of the frontier's folder, whole or not at all."""
    with clearly("output", file):
        file.parent.mkdir(exist_ok=True)
        write_whole(file, content.encode(errors="backslashreplace"))
