"""Estimate the seconds of a conversion: convert one layer on a few windows, and scale the time of each part.

The conversion's own code does that work, so that an estimate changes as the solver does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.base.processes import process_count, temporary_folder
from headwise.conversion.budget.spread import CHOOSING, TRIAL_TOKENS
from headwise.conversion.budget.trials import SPREADING
from headwise.conversion.calibration.candidates import NOTHING_KNOWN, Calibrator, descent_steps
from headwise.conversion.calibration.source import MEASURING, PIECE, sensitivity_windows
from headwise.conversion.calibration.text import TextCalibrator, open_calibration
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.plan import ConversionPlan, Place
from headwise.conversion.report import COMPARING
from headwise.conversion.solvers.device import clock
from headwise.conversion.storage import LayerStore
from headwise.conversion.write_folder import CONVERTING, ConversionInputs, convert_layer
from headwise.measure.evaluation.beside_source import EVALUATING, EvaluationSet
from headwise.runtime.hf import LayerwiseModel
from headwise.runtime.kernels import attend

_WINDOWS, _STEPS = 4, 6
"""The numbers of windows and of descent steps that are timed."""

_TOKENS = 64
"""The number of tokens of the attention that is run to initialise the kernels."""

_TRIALS = 9
"""The number of solutions of a layer that take as long as the trials of its size: seven solutions, and the others cut
from them."""

_PARTS = 4
"""The number of parts of an estimate that progress is told of."""


def estimate_stages(
    plan: ConversionPlan, inputs: ConversionInputs, *, shares_channels: bool = False
) -> dict[str, float]:
    """Estimate the seconds of each stage of a conversion on this machine; no file stays.

    Args:
        plan: the plan of the conversion.
        inputs: the inputs of the conversion; without windows to evaluate on, there is no evaluation that ends it.
        shares_channels: whether all layers get one list of rotary channels, which is chosen first and compared with
            the channels that each layer would choose.

    Returns:
        The seconds by the names of the stages that `convert` reports to its ``progress``, in their order.

    Raises:
        ArgumentError: a text cannot be read or is too short.
    """
    progress, statistics = inputs.progress, inputs.statistics
    progress("estimating", 0, _PARTS)
    if inputs.texts and not plan.is_exact:
        stages = _time_on_text(plan, inputs, shares_channels=shares_channels)
    else:
        if not plan.bias_free:  # which takes statistics
            _time_layer(plan, NOTHING_KNOWN)  # the first solution also initialises the libraries
        progress("estimating", 1, _PARTS)
        calibrator = NOTHING_KNOWN if statistics is None or plan.is_exact else statistics
        stages = {CONVERTING: _time_layer(plan, calibrator) * plan.before.num_layers}
        stages |= _time_evaluation(plan, inputs.evaluation_set)
    progress("estimating", _PARTS, _PARTS)
    stages[CONVERTING] += _time_copy(plan)
    return stages


def _time_layer(plan: ConversionPlan, calibrator: Calibrator) -> float:
    """The seconds to convert one layer without codes."""
    plan = replace(plan, token_bytes=None, bits=None)  # codes are designed on a text
    return _seconds_of(lambda: convert_layer(OutputLayout(plan), calibrator, LayerStore(None), Place(0)))


def _time_copy(plan: ConversionPlan) -> float:
    """The seconds to read all weights, and to write as many at about the same rate."""
    tensors = plan.checkpoint.tensors
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    per_byte = _seconds_of(lambda: plan.checkpoint.read(name).to(plan.dtype)) / tensors[name].nbytes
    return 2 * per_byte * sum(info.nbytes for info in tensors.values())


def _time_on_text(plan: ConversionPlan, inputs: ConversionInputs, *, shares_channels: bool) -> dict[str, float]:
    """The seconds of each stage: a layer takes a fixed time, and more for each window and each step of its descent.

    Several processes share the windows, so that as many more windows are timed.
    """
    progress, windows = inputs.progress, open_calibration(plan, inputs.texts)
    progress("estimating", 1, _PARTS)
    nothing = torch.zeros(1, 1, _TOKENS, 8)
    attend(nothing, nothing, nothing, is_causal=True)  # the first call compiles kernels, or loads them
    model = LayerwiseModel(plan.checkpoint, torch.float32, device=plan.device)
    sensitivity_count = len(sensitivity_windows(plan.before, windows))
    backward = _time_sensitivity(model, windows.ids[:1]) if "sensitivity" in plan.stages else 0.0
    processes = process_count()
    evaluating = _time_evaluation(plan, inputs.evaluation_set, model)
    progress("estimating", 2, _PARTS)
    with temporary_folder() as folder:
        sample = windows[torch.arange(_WINDOWS * processes) % len(windows)]
        sample = replace(sample, held=2, first_tokens=windows.first_tokens)
        # Sensitivities are measured for all layers at once, and timed by themselves.
        stages = [stage for stage in plan.stages if stage != "sensitivity"]
        for_mla = plan.after.mechanism == "mla"
        calibrator = TextCalibrator(model, sample, folder=folder, stages=stages, steps=_STEPS, for_mla=for_mla)
        progress("estimating", 3, _PARTS)
        store = LayerStore(folder / "layers")
        seconds = _seconds_of(lambda: convert_layer(OutputLayout(plan), calibrator, store, Place(0)))
    timed = calibrator.seconds
    by_window, coding = timed["windows"] / sample.rows, timed["code"]
    by_step = timed["descent"] / _STEPS
    solving = max(seconds - sum(timed.values()), 0.0)
    layers = plan.before.num_layers
    by_stage: dict[str, float] = {}
    if "sensitivity" in plan.stages:
        by_stage[MEASURING] = backward * sensitivity_count / processes
    if "spread" in plan.stages:
        # On average half of all layers run behind a layer that is tried; a timed window is two streams.
        streams = 2 if plan.spends_bytes else 1
        later_windows = streams * layers / 4 * min(TRIAL_TOKENS / windows.width, 1.0)
        by_layer = _TRIALS * solving + by_window * (sensitivity_count + later_windows)
        if plan.spends_bytes:
            by_layer += coding  # codes of a few numbers of bits on a little text take about as long
        by_stage[SPREADING] = by_layer * layers
    if shares_channels:
        by_stage[CHOOSING] = (solving + by_window * sensitivity_count) * layers
    by_layer = solving + coding + by_window * windows.rows + by_step * descent_steps(windows)
    by_stage[CONVERTING] = by_layer * layers
    return by_stage | evaluating


def _time_sensitivity(model: LayerwiseModel, window: Tensor) -> float:
    """The seconds to measure sensitivities on one window, scaled from one layer and a part of the head."""
    with torch.no_grad():
        hidden = model.begin(window)
    module = model.module(0)
    inputs = hidden.requires_grad_()

    def layer() -> None:
        with torch.no_grad():
            model.run(0, module, inputs)
        call, output = model.trace(0, module, inputs)
        torch.autograd.grad(output.sum(), (inputs, call.output))

    def head(piece: Tensor) -> None:
        piece = piece.detach().requires_grad_()
        torch.autograd.grad(model.finish(piece).float().logsumexp(-1).sum(), piece)

    return _time_whole(model, hidden, layer, head)


@torch.no_grad()
def _time_evaluation(
    plan: ConversionPlan, evaluation_set: EvaluationSet, model: LayerwiseModel | None = None
) -> dict[str, float]:
    """The seconds of the evaluations that end a conversion, of it and of two formats; each runs two models."""
    if not evaluation_set:
        return {}
    model = model or LayerwiseModel(plan.checkpoint, torch.float32, device=plan.device)
    window = evaluation_set[0][1][:1]
    hidden = model.begin(window)
    module = model.module(0)
    model.run(0, module, hidden)  # libraries are initialised
    whole = _time_whole(model, hidden, lambda: model.run(0, module, hidden), model.finish)
    windows = sum(ids.numel() for _, ids in evaluation_set) / window.numel()
    seconds = 2 * windows * whole
    return {EVALUATING: seconds, COMPARING: 2 * seconds}


def _time_whole(
    model: LayerwiseModel, hidden: Tensor, layer: Callable[[], object], head: Callable[[Tensor], object]
) -> float:
    """The seconds of a model on hidden states ``[1, W, E]``, scaled from a layer and the head on a part of them."""
    layer_seconds = _seconds_of(layer)
    piece = hidden[:, :PIECE]
    head_seconds = _seconds_of(lambda: head(piece)) * hidden.shape[1] / piece.shape[1]
    model.release()
    return layer_seconds * model.num_layers + head_seconds


def _seconds_of(work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start
