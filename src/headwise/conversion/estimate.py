"""How long a conversion would take: one layer of it is really run, on two windows or three, and scaled."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
from torch import Tensor

from headwise.conversion.budget.spread import TOKENS
from headwise.conversion.calibration.saved import SavedStatistics
from headwise.conversion.calibration.sensitivity import PIECE
from headwise.conversion.calibration.streams import STAGES, Sequential, descent_steps, weighed_windows
from headwise.conversion.loop import convert_layer
from headwise.conversion.planning.plan import Job
from headwise.conversion.storage.layers import LayerResults
from headwise.hf import LayerwiseModel
from headwise.processes import temporary_folder, world_size
from headwise.progress import Progress, silent
from headwise.texts.calibration import CalibrationTexts, open_windows

_FEW, _MORE = 1, 7
"""Steps of the local descent that are timed."""

_TRIALS = 9
"""How many solutions of a layer a spread takes as long as: seven are made, and others cut from them."""

_PARTS = 5


def estimate_seconds(
    job: Job,
    study: CalibrationTexts | SavedStatistics,
    *,
    stages: Collection[str] = STAGES,
    shared_plan: bool = False,
    progress: Progress = silent,
) -> float:
    """Seconds that a conversion would take here and now, without its evaluation; nothing is written that stays.

    Args:
        job: the conversion.
        study: what it is calibrated on, which may be nothing, or what is known of the source in its place.
        stages: those of calibration that are done.
        shared_plan: all layers get one plan, which is found first and set beside each layer's own.
        progress: told of each part.

    Raises:
        ArgumentError: a text cannot be read or is too short.
    """
    progress("estimating", 0, _PARTS)
    convert_layer(job, 0)  # the first solution also starts the libraries up
    progress("estimating", 1, _PARTS)
    saved = study if isinstance(study, SavedStatistics) and not job.is_lossless else None
    if study and not isinstance(study, SavedStatistics) and not job.is_lossless:
        seconds = _on_text(job, study, stages, shared_plan=shared_plan, progress=progress)
    else:
        seconds = _solving(job, saved) * job.before.num_layers
    progress("estimating", _PARTS, _PARTS)
    return seconds + _copying(job)


def _solving(job: Job, saved: SavedStatistics | None = None) -> float:
    """A layer, from what is known of it or its weights alone: all that is done to most of what a spread tries."""
    start = time.perf_counter()
    convert_layer(job, 0, saved)
    return time.perf_counter() - start


def _copying(job: Job) -> float:
    """Each byte is read, checked, and written again at about the rate it is read."""
    tensors = job.checkpoint.tensors
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    start = time.perf_counter()
    job.checkpoint.read(name).to(job.dtype)
    per_byte = (time.perf_counter() - start) / tensors[name].nbytes
    return 2 * per_byte * sum(info.nbytes for info in tensors.values())


def _on_text(
    job: Job,
    texts: CalibrationTexts,
    stages: Collection[str],
    *,
    shared_plan: bool,
    progress: Progress,
) -> float:
    """A layer costs something by itself, by the window and by the step of its descent.

    Several processes share the windows: as many more of them are timed.
    """
    windows, held = open_windows(job.checkpoint, texts)
    model = LayerwiseModel(job.checkpoint, torch.float32)
    weighed = weighed_windows(job.before, windows, len(windows) - held)
    weighing = _weighing(model, windows[:1]) if "sensitivity" in stages else 0.0
    processes = world_size()
    with temporary_folder() as folder:

        def layer(part: int, count: int, steps: int) -> float:
            progress("estimating", part, _PARTS)
            some = windows[torch.arange(count * processes) % len(windows)]
            own = [stage for stage in stages if stage != "sensitivity"]  # which is about all layers
            place = folder / str(part)
            sequence = Sequential(model, some, held=1, folder=place, stages=own, steps=steps)
            start = time.perf_counter()
            convert_layer(job, 0, sequence, LayerResults(place / "layers"))
            return time.perf_counter() - start

        more_windows, more_steps, least = layer(2, 3, _FEW), layer(3, 2, _MORE), layer(4, 2, _FEW)
    by_window = max(more_windows - least, 0.0) / processes
    by_step = max(more_steps - least, 0.0) / (_MORE - _FEW)
    alone = max(least - 2 * processes * by_window - _FEW * by_step, 0.0)
    one = alone + by_window * len(windows) + by_step * descent_steps(windows[: len(windows) - held])
    if shared_plan:
        one += alone + by_window * weighed
    if "spread" in stages:  # half of all layers follow the one that is tried; a window is two streams
        followed = model.num_layers / 4 * min(TOKENS / windows.shape[1], 1.0)
        one += _TRIALS * _solving(job) + by_window * (weighed + followed)
    return one * job.before.num_layers + weighing * weighed / processes


def _weighing(model: LayerwiseModel, window: Tensor) -> float:
    """Of one window's sensitivities: forward and back again through a layer, and through the head, scaled."""
    with torch.no_grad():
        hidden = model.begin(window)
    module = model.layer(0)
    one = hidden.requires_grad_()
    start = time.perf_counter()
    with torch.no_grad():
        model.run(0, module, one)
    call, output = model.trace(0, module, one)
    torch.autograd.grad(output.sum(), (one, call.output))
    through_layer = time.perf_counter() - start
    piece = hidden[:, :PIECE].detach().requires_grad_()
    start = time.perf_counter()
    torch.autograd.grad(model.finish(piece).float().logsumexp(-1).sum(), piece)
    through_head = (time.perf_counter() - start) * hidden.shape[1] / piece.shape[1]
    model.release()
    return through_layer * model.num_layers + through_head
