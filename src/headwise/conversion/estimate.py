"""How long a conversion would take: one layer of it is really run, on two windows or three, and scaled."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from headwise.conversion.budget.spread import TOKENS
from headwise.conversion.calibration.base import NOTHING_KNOWN, Calibrator
from headwise.conversion.calibration.saved import SavedCalibrator
from headwise.conversion.calibration.sensitivity import PIECE
from headwise.conversion.calibration.source import sensitivity_windows
from headwise.conversion.calibration.text import TextCalibrator, descent_steps
from headwise.conversion.loop import convert_layer
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.output.store import LayerStore
from headwise.conversion.planning.plan import ConversionPlan, Place
from headwise.hf import LayerwiseModel
from headwise.processes import process_count, temporary_folder
from headwise.progress import Progress, silent
from headwise.texts import NO_TEXTS, CalibrationTexts, open_windows

_FEW, _MORE = 1, 7
"""Steps of the local descent that are timed."""

_TRIALS = 9
"""Solutions of a layer that take as long as a spread's trials of it: seven are solved, and others cut from them."""

_PARTS = 5


def estimate_seconds(
    plan: ConversionPlan,
    texts: CalibrationTexts = NO_TEXTS,
    statistics: SavedCalibrator | None = None,
    *,
    shares_channels: bool = False,
    progress: Progress = silent,
) -> float:
    """Seconds that a conversion would take here and now, without its evaluation; nothing is written that stays.

    Args:
        plan: the conversion.
        texts: that it is calibrated on.
        statistics: in the place of a text.
        shares_channels: whether all layers get the same channels, which are chosen first and compared with each
            layer's own.
        progress: told of each part.

    Raises:
        ArgumentError: a text cannot be read or is too short.
    """
    progress("estimating", 0, _PARTS)
    _solving(plan, NOTHING_KNOWN)  # the first solution also starts the libraries up
    progress("estimating", 1, _PARTS)
    if texts and not plan.is_exact:
        seconds = _on_text(plan, texts, shares_channels=shares_channels, progress=progress)
    else:
        calibrator = NOTHING_KNOWN if statistics is None or plan.is_exact else statistics
        seconds = _solving(plan, calibrator) * plan.before.num_layers
    progress("estimating", _PARTS, _PARTS)
    return seconds + _copying(plan)


def _solving(plan: ConversionPlan, calibrator: Calibrator) -> float:
    """Seconds for one layer, by itself: most of what a spread does is this."""
    start = time.perf_counter()
    convert_layer(OutputLayout(plan), calibrator, LayerStore(None), Place(0))
    return time.perf_counter() - start


def _copying(plan: ConversionPlan) -> float:
    """Seconds to read and check each byte, and to write it again at about the rate it is read."""
    tensors = plan.checkpoint.tensors
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    start = time.perf_counter()
    plan.checkpoint.read(name).to(plan.dtype)
    per_byte = (time.perf_counter() - start) / tensors[name].nbytes
    return 2 * per_byte * sum(info.nbytes for info in tensors.values())


def _on_text(plan: ConversionPlan, texts: CalibrationTexts, *, shares_channels: bool, progress: Progress) -> float:
    """Seconds for all layers: each costs something by itself, by the window and by the step of its descent.

    Several processes share the windows: as many more of them are timed.
    """
    windows, held = open_windows(plan.checkpoint, texts)
    model = LayerwiseModel(plan.checkpoint, torch.float32)
    measured = sensitivity_windows(plan.before, windows, len(windows) - held)
    backward = _sensitivity(model, windows[:1]) if "sensitivity" in plan.stages else 0.0
    processes = process_count()
    layout = OutputLayout(plan)
    # Sensitivities are measured for all layers at once, and timed apart.
    stages = [stage for stage in plan.stages if stage != "sensitivity"]
    with temporary_folder() as folder:

        def layer(part: int, count: int, steps: int) -> float:
            progress("estimating", part, _PARTS)
            some = windows[torch.arange(count * processes) % len(windows)]
            place = folder / str(part)
            calibrator = TextCalibrator(model, some, held=1, folder=place, stages=stages, steps=steps)
            calibrator.prepare()
            start = time.perf_counter()
            convert_layer(layout, calibrator, LayerStore(place / "layers"), Place(0))
            return time.perf_counter() - start

        more_windows, more_steps, least = layer(2, 3, _FEW), layer(3, 2, _MORE), layer(4, 2, _FEW)
    by_window = max(more_windows - least, 0.0) / processes
    by_step = max(more_steps - least, 0.0) / (_MORE - _FEW)
    alone = max(least - 2 * processes * by_window - _FEW * by_step, 0.0)
    one = alone + by_window * len(windows) + by_step * descent_steps(windows[: len(windows) - held])
    if shares_channels:
        one += alone + by_window * measured
    if "spread" in plan.stages:  # half of all layers follow the one that is tried; a window is two streams
        followed = model.num_layers / 4 * min(TOKENS / windows.shape[1], 1.0)
        one += _TRIALS * _solving(plan, NOTHING_KNOWN) + by_window * (measured + followed)
    return one * plan.before.num_layers + backward * measured / processes


def _sensitivity(model: LayerwiseModel, window: Tensor) -> float:
    """Seconds for one window's sensitivities: forward and backward through a layer, and through the head, scaled."""
    with torch.no_grad():
        hidden = model.begin(window)
    module = model.module(0)
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
