"""Calibrate on a text: each layer is solved for the inputs that the converted layers before it produce.

Two streams of hidden states go through the model side by side, the source's and the converted model's. A layer is
solved from the statistics of the converted stream, and the output that is wanted of it also corrects the difference
between the streams.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.base.processes import barrier, my_windows
from headwise.base.progress import Progress, silent
from headwise.base.threads import map_in_threads
from headwise.conversion.calibration.candidates import Calibrator, Candidate, LayerData, descent_steps
from headwise.conversion.calibration.source import (
    SourceStream,
    begin_streams,
    kept_sensitivity,
    measured,
    output_sensitivities,
    sensitivity_windows,
    traced,
)
from headwise.conversion.calibration.windows import (
    EVERY,
    CalibrationWindows,
    FirstTokens,
    first_token_ids,
    plain_windows,
    recall_windows,
)
from headwise.conversion.methods import STAGES, Evidence
from headwise.conversion.plan import ConversionPlan, Place, read_layer
from headwise.conversion.solvers.device import CPU, Stopwatch, computing_on, quick_products
from headwise.conversion.solvers.layer import Layer, grouped_spec
from headwise.conversion.solvers.refit import Cost
from headwise.conversion.solvers.statistics import factor
from headwise.conversion.storage import LOST, LayerFiles, Spill
from headwise.errors import ArgumentError, CheckpointError
from headwise.measure.texts import CalibrationTexts, open_windows
from headwise.runtime.hf import LayerwiseModel
from headwise.runtime.kernels.native import built

_LEAST_WIDTH = 5
"""The fewest tokens of a window that a code is designed on."""


class TextCalibrator(Calibrator):
    """Calibration on the windows of a text, which go through the model with the conversion.

    Sensitivities are measured, and both streams opened, before layer 0 or where an earlier run in the same folder
    stopped.

    Args:
        model: the source model.
        windows: the windows of the text.
        folder: the folder of activations, from which a killed run continues.
        stages: the stages of `STAGES` that are carried out.
        steps: the number of steps of each layer's descent; `descent_steps` when None.
        for_mla: whether layers are converted to MLA; see `SourceStream`.
        run: the identity of the run; activations of another run are discarded.
        progress: the callback that is told of the layers whose sensitivities are measured.

    Attributes:
        streams: the hidden states of both streams.
        seconds: the seconds that the windows, the descent and the codes have taken, by ``windows``, ``descent`` and
            ``code``.

    Raises:
        CheckpointError: the text makes the model compute NaN or infinite values.
        StorageError: the disk is full.
    """

    is_sequential = has_evidence = True

    def __init__(
        self,
        model: LayerwiseModel,
        windows: CalibrationWindows,
        *,
        folder: Path,
        stages: Collection[str] = STAGES,
        steps: int | None = None,
        for_mla: bool = True,
        run: str = "",
        progress: Progress = silent,
    ) -> None:
        self.model, self.windows, self.stages, self.for_mla = model, windows, frozenset(stages), for_mla
        self.tokens, self.window = windows.tokens, windows.width
        # Layers are solved for the source's stream without the stage ``sequence``.
        self._solved_stream = "converted" if "sequence" in self.stages else "source"
        self.steps = descent_steps(windows) if steps is None else steps
        self.sensitivities = LayerFiles(folder / "sensitivities")
        self.seconds = Stopwatch()
        if "sensitivity" in self.stages:
            output_sensitivities(model, self.sample, self.sensitivities, progress=progress)
        self.streams = begin_streams(model, windows, folder, ("source", "converted"), run)
        self._inputs = Spill(folder / "inputs.spill", self.streams.shape)
        self._wanted = Spill(folder / "wanted.spill", self.streams.shape)

    def may_be_saved(self, place: Place) -> bool:
        """Whether the streams have passed a layer, whose result is then on disk."""
        return self.position > place.index

    @property
    def position(self) -> int:
        """The number of layers that the streams have passed."""
        assert self.streams.layer is not None
        return self.streams.layer

    def sensitivity(self, index: int) -> Tensor | None:
        """A layer's sensitivity ``[E, E]``, float64; None where that stage is left out."""
        if "sensitivity" not in self.stages:
            return None
        return kept_sensitivity(self.sensitivities, index).double()

    @torch.no_grad()
    def collect(self, place: Place, source: Layer) -> tuple[Evidence, LayerData]:
        """Move the source's stream past the next layer; return its evidence, and the layer on the windows.

        Raises:
            CheckpointError: an earlier run converted the layer, and its result is lost.
        """
        if self.may_be_saved(place):
            raise CheckpointError("layer", place.index, LOST)
        assert place.index == self.position  # a stream passes layers in their order
        source, spec = source.float(), grouped_spec(source.spec)
        module, sensitivity = self.model.module(place.index), self.sensitivity(place.index)
        mine = my_windows(self.windows.rows)
        with self.seconds.timed("windows"):
            self._collect_windows(place.index, module, mine)
            barrier()  # all processes read the held-out windows
            inputs = ((window, self._inputs.read(window)) for window in mine if window < self.windows.train)
            statistics = measured(source, sensitivity, inputs, self.windows, for_mla=self.for_mla)
        # Every direction costs the same without sensitivities.
        cost = Cost(torch.eye(spec.hidden_size) if sensitivity is None else factor(sensitivity).float())
        first_tokens = None
        if self.windows.first_tokens is not None:
            last, rotation = len(self.windows), self.windows.rotation(spec, 0)
            first_tokens = FirstTokens(self._inputs.read(last), self._wanted.read(last), rotation, cost)
        tensors = self.windows, self._inputs, self._wanted
        data = LayerData(place.index, module, spec, *tensors, cost, first_tokens, self.steps, self.seconds)
        return Evidence(statistics, sensitivity), data

    @torch.no_grad()
    def advance(self, data: LayerData | None, best: Candidate) -> None:
        """Move the converted stream past the layer, and commit both streams for the next layer."""
        assert data is not None
        mine = my_windows(self.windows.rows)

        def moved(window: int) -> Tensor:
            hidden = self._read(self._solved_stream, window)
            if self.windows.are_first_tokens(window):
                assert data.first_tokens is not None
                output = data.first_tokens.output(best.layer)
            else:
                output = best.output(window)
            placed = self.windows.placed(self.model, window)
            with quick_products():
                hidden = placed.run(data.index, data.module, hidden, attention_output=output.view(hidden.shape))
            return hidden.float()

        with self.seconds.timed("windows"):
            for window, hidden in zip(mine, map_in_threads(moved, mine), strict=True):
                self._write("converted", window, hidden)
        self.streams.commit()

    def source_stream(self) -> SourceStream:
        """The windows that sensitivities are measured on, as a stream before layer 0 of the source."""
        return SourceStream(self.model, self.sample, for_mla=self.for_mla)

    @torch.no_grad()
    def source_evidence(self, plan: ConversionPlan) -> Iterator[tuple[Layer, Evidence]]:
        """Each layer of the source in turn, with its evidence: statistics of the inputs that the source gives it.

        They are of the first windows, among which as many repeat far passages as among all.
        """
        count = -(-len(self.sample) // EVERY) * EVERY
        stream = SourceStream(self.model, self.windows.trained[:count], for_mla=self.for_mla)
        for place in plan.places:
            source = read_layer(plan.checkpoint, place)
            module, sensitivity = self.model.module(place.index), self.sensitivity(place.index)
            yield source, Evidence(stream.statistics(place.index, module, source.float(), sensitivity), sensitivity)

    @property
    def sample(self) -> CalibrationWindows:
        """The windows that sensitivities are measured on."""
        return sensitivity_windows(self.model.checkpoint.spec, self.windows)

    def _collect_windows(self, index: int, module: nn.Module, mine: range) -> None:
        """Move the source's stream past a layer, and write the layer's inputs and the outputs that it should have.

        The inputs are of the stream that layers are solved for. Where that is the converted one, the wanted output
        also makes up for the difference between the streams before the layer.
        """
        states = ((window, self._read("source", window)) for window in mine)
        for window, hidden, call, output in traced(self.model, self.windows, index, module, states):
            self._write("source", window, output)
            solved = self._read(self._solved_stream, window)
            inputs = self.windows.placed(self.model, window).attention_inputs(index, module, solved)
            drift = hidden - solved if self.model.adds else torch.zeros_like(hidden)
            self._inputs.write(window, inputs.flatten(0, 1))  # [W, E]
            self._wanted.write(window, (call.output + drift).flatten(0, 1))

    def _read(self, stream: str, window: int) -> Tensor:
        """A window of a stream, ``[1, W, E]``; of first tokens ``[W, 1, E]``."""
        states = self.streams.read(stream, window, window + 1)
        # Not transposed: that leaves strides with which torch multiplies each token by a copy of the matrix.
        return states.view(states.shape[1], 1, -1) if self.windows.are_first_tokens(window) else states

    def _write(self, stream: str, window: int, states: Tensor) -> None:
        """Write a window of a stream, in the shape of `_read`."""
        self.streams.write(stream, window, states.reshape(1, self.window, -1))


def start_on_text(
    plan: ConversionPlan, texts: CalibrationTexts, folder: Path, *, run: str = "", progress: Progress = silent
) -> TextCalibrator:
    """Prepare calibration on a text, before layer 0 or where an earlier run in the same folder stopped.

    Args:
        plan: the plan of the conversion.
        texts: the calibration texts.
        folder: the folder of activations.
        run: the conversion's identity; activations of another one are discarded.
        progress: the callback that is told of layers.

    Raises:
        ArgumentError: see `open_calibration`.
    """
    windows = open_calibration(plan, texts)
    built()  # here, where Ctrl-C ends a compiler; windows are worked on in other threads
    # Float32 whatever dtype the weights are stored in: weights and solutions are not rounded further.
    model = LayerwiseModel(plan.checkpoint, torch.float32, device=plan.device)
    for_mla = plan.after.mechanism == "mla"
    return TextCalibrator(
        model, windows, folder=folder, stages=plan.stages, for_mla=for_mla, run=run, progress=progress
    )


def open_calibration(plan: ConversionPlan, texts: CalibrationTexts) -> CalibrationWindows:
    """The windows of a conversion, cut from its texts; with the stage ``recall``, some repeat far passages.

    Raises:
        ArgumentError: see `open_windows`; or the texts are too short to design codes on.
    """
    with computing_on(CPU):  # where text is cut
        ids, held, begin = open_windows(plan.checkpoint, texts)
        windows = plain_windows(ids, held, begin)
        if "recall" in plan.stages:
            windows = recall_windows(ids, held, plan.before, begin=begin)
        if "starts" in plan.stages:
            windows = replace(windows, first_tokens=first_token_ids(windows))
    if plan.token_bytes is not None and windows.width < _LEAST_WIDTH:
        rule = f"are too few to design a code on, which needs two windows of at least {_LEAST_WIDTH} tokens"
        raise ArgumentError("calibrate", f"{windows.tokens} tokens", rule)
    return windows.to(plan.device)
