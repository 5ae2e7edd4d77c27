"""Estimate the seconds of a conversion: convert one layer on two or three windows, and scale the time."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from headwise.conversion.budget.spread import TOKENS
from headwise.conversion.calibration.base import NOTHING_KNOWN, Calibrator
from headwise.conversion.calibration.saved import SavedCalibrator
from headwise.conversion.calibration.sensitivity import PIECE
from headwise.conversion.calibration.source_stream import sensitivity_windows
from headwise.conversion.calibration.text import TextCalibrator, descent_steps, open_calibration
from headwise.conversion.layer_loop import convert_layer
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.planning.plan import ConversionPlan, Place
from headwise.conversion.storage.store import LayerStore
from headwise.hf import LayerwiseModel
from headwise.processes import process_count, temporary_folder
from headwise.progress import Progress, silent
from headwise.texts import NO_TEXTS, CalibrationTexts

_FEW, _MORE = 1, 7
"""The numbers of descent steps that are timed."""

_TRIALS = 9
"""The number of solutions of a layer that take as long as the trials of its size: seven solutions, and the others cut
from them."""

_PARTS = 6
"""The number of parts of an estimate that progress is told of."""


def estimate_seconds(
    plan: ConversionPlan,
    texts: CalibrationTexts = NO_TEXTS,
    statistics: SavedCalibrator | None = None,
    *,
    shares_channels: bool = False,
    progress: Progress = silent,
) -> float:
    """Estimate the seconds of a conversion on this machine, without its evaluation; no file stays.

    Args:
        plan: the conversion.
        texts: the calibration texts.
        statistics: the statistics to use in place of a text.
        shares_channels: whether all layers get one list of rotary channels, which is chosen first and compared with
            each layer's own.
        progress: told of each part.

    Raises:
        ArgumentError: a text cannot be read or is too short.
    """
    progress("estimating", 0, _PARTS)
    _time_layer(plan, NOTHING_KNOWN)  # the first solution also initialises the libraries
    progress("estimating", 1, _PARTS)
    if texts and not plan.is_exact:
        seconds = _time_on_text(plan, texts, shares_channels=shares_channels, progress=progress)
    else:
        calibrator = NOTHING_KNOWN if statistics is None or plan.is_exact else statistics
        seconds = _time_layer(plan, calibrator) * plan.before.num_layers
    progress("estimating", _PARTS, _PARTS)
    return seconds + _time_copy(plan)


def _time_layer(plan: ConversionPlan, calibrator: Calibrator) -> float:
    """Seconds to convert one layer without codes: most of the time of a search for an allocation, too."""
    start = time.perf_counter()
    convert_layer(OutputLayout(_without_codes(plan)), calibrator, LayerStore(None), Place(0))
    return time.perf_counter() - start


def _without_codes(plan: ConversionPlan) -> ConversionPlan:
    """The plan without codes, which are designed on a text."""
    return replace(plan, token_bytes=None, bits=None)


def _time_copy(plan: ConversionPlan) -> float:
    """Seconds to read all weights, and to write as many at about the same rate."""
    tensors = plan.checkpoint.tensors
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    start = time.perf_counter()
    plan.checkpoint.read(name).to(plan.dtype)
    per_byte = (time.perf_counter() - start) / tensors[name].nbytes
    return 2 * per_byte * sum(info.nbytes for info in tensors.values())


def _time_on_text(
    plan: ConversionPlan, texts: CalibrationTexts, *, shares_channels: bool, progress: Progress
) -> float:
    """Seconds to convert all layers: each takes a fixed time, and more for each window and each step of its descent.

    Several processes share the windows, so that as many more windows are timed.
    """
    windows = open_calibration(plan, texts)
    model = LayerwiseModel(plan.checkpoint, torch.float32)
    sensitivity_count = len(sensitivity_windows(plan.before, windows))
    backward = _time_sensitivity(model, windows.ids[:1]) if "sensitivity" in plan.stages else 0.0
    processes = process_count()
    layout = OutputLayout(plan)
    # Sensitivities are measured for all layers at once, and timed by themselves.
    stages = [stage for stage in plan.stages if stage != "sensitivity"]
    with temporary_folder() as folder:

        def time_layer(part: int, count: int, steps: int, layout: OutputLayout = layout) -> float:
            progress("estimating", part, _PARTS)
            sample = replace(windows[torch.arange(count * processes) % len(windows)], held=1)
            part_folder = folder / str(part)
            calibrator = TextCalibrator(model, sample, folder=part_folder, stages=stages, steps=steps)
            calibrator.prepare()
            start = time.perf_counter()
            convert_layer(layout, calibrator, LayerStore(part_folder / "layers"), Place(0))
            return time.perf_counter() - start

        more_windows, more_steps, base = time_layer(2, 3, _FEW), time_layer(3, 2, _MORE), time_layer(4, 2, _FEW)
        coding = 0.0
        if plan.token_bytes is not None:
            coding = max(base - time_layer(5, 2, _FEW, OutputLayout(_without_codes(plan))), 0.0)
    by_window = max(more_windows - base, 0.0) / processes
    by_step = max(more_steps - base, 0.0) / (_MORE - _FEW)
    fixed = max(base - 2 * processes * by_window - _FEW * by_step, 0.0)
    by_layer = fixed + by_window * len(windows) + by_step * descent_steps(windows)
    if shares_channels:
        by_layer += fixed + by_window * sensitivity_count
    if "spread" in plan.stages:
        # On average half of all layers run behind a layer that is tried; a timed window is two streams.
        later_windows = model.num_layers / 4 * min(TOKENS / windows.width, 1.0)
        by_layer += _TRIALS * _time_layer(plan, NOTHING_KNOWN) + by_window * (sensitivity_count + later_windows)
        if plan.spends_bytes:
            by_layer += coding  # codes of a few numbers of bits on a little text take about as long
    return by_layer * plan.before.num_layers + backward * sensitivity_count / processes


def _time_sensitivity(model: LayerwiseModel, window: Tensor) -> float:
    """Seconds to measure sensitivities on one window, scaled from one layer and a part of the head."""
    with torch.no_grad():
        hidden = model.begin(window)
    module = model.module(0)
    inputs = hidden.requires_grad_()
    start = time.perf_counter()
    with torch.no_grad():
        model.run(0, module, inputs)
    call, output = model.trace(0, module, inputs)
    torch.autograd.grad(output.sum(), (inputs, call.output))
    layer_seconds = time.perf_counter() - start
    piece = hidden[:, :PIECE].detach().requires_grad_()
    start = time.perf_counter()
    torch.autograd.grad(model.finish(piece).float().logsumexp(-1).sum(), piece)
    head_seconds = (time.perf_counter() - start) * hidden.shape[1] / piece.shape[1]
    model.release()
    return layer_seconds * model.num_layers + head_seconds
