"""Run the source model on windows of a text, one layer at a time.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from headwise.base.processes import my_windows
from headwise.base.threads import map_in_threads
from headwise.conversion.calibration.sensitivity import refuse_no_numbers
from headwise.conversion.calibration.windows import CalibrationWindows
from headwise.conversion.solvers.device import quick_products
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.normed import seen_by_mla
from headwise.conversion.solvers.statistics import Statistics, statistics_of
from headwise.conversion.storage import Activations
from headwise.models.specs import ModelSpec
from headwise.runtime.hf import AttentionCall, LayerwiseModel

SENSITIVITY_TOKENS = 2048
"""The number of tokens that sensitivities are measured on, rounded up to windows; at least as many as a layer has
inputs."""


class SourceStream:
    """The hidden states of windows, in memory, which are moved through the source layer by layer.

    Args:
        model: the source model.
        windows: the windows of the text, of which each process takes a share.
        for_mla: whether the statistics are those that MLA is solved from; see `seen_by_mla`.
    """

    def __init__(self, model: LayerwiseModel, windows: CalibrationWindows, *, for_mla: bool) -> None:
        self._model, self.windows, self._for_mla = model, windows, for_mla
        self._hidden = {index: model.begin(windows.ids[index : index + 1]) for index in my_windows(len(windows))}
        self.inputs: dict[int, Tensor] = {}
        """The inputs ``[W, E]`` of the attention whose statistics were taken last, by window."""
        model.release()

    def statistics(self, index: int, module: nn.Module, source: Layer, sensitivity: Tensor | None) -> Statistics:
        """Move the windows past the next layer, and return the statistics of that layer.

        Args:
            index: the layer's number.
            module: the layer's module.
            source: the layer's attention, float32.
            sensitivity: the cost of an error of the layer's output, ``[E, E]``; see
                `headwise.conversion.methods.Evidence`.
        """
        for window, call in self._pass(index, module):
            self.inputs[window] = call.inputs[0]
        return measured(source, sensitivity, self.inputs.items(), self.windows, for_mla=self._for_mla)

    def skip(self, index: int, module: nn.Module) -> None:
        """Move the windows past a layer whose statistics are known."""
        for _ in self._pass(index, module):
            pass

    def _pass(self, index: int, module: nn.Module) -> Iterator[tuple[int, AttentionCall]]:
        """Move the windows past a layer, and yield each one's number and its attention's call."""
        states = ((window, self._hidden[window]) for window in list(self._hidden))
        for window, _, call, output in traced(self._model, self.windows, index, module, states):
            self._hidden[window] = output
            yield window, call


def measured(
    source: Layer,
    sensitivity: Tensor | None,
    inputs: Iterable[tuple[int, Tensor]],
    windows: CalibrationWindows,
    *,
    for_mla: bool,
) -> Statistics:
    """The statistics that a layer is solved from.

    Args:
        source: the layer's attention, float32.
        sensitivity: the cost of an error of the layer's output, ``[E, E]``; see
            `headwise.conversion.methods.Evidence`.
        inputs: the windows of this process: the number of each, and the attention's inputs ``[W, E]``.
        windows: the windows of all processes.
        for_mla: whether the statistics are those that MLA is solved from; see `seen_by_mla`.
    """
    seen, see = seen_by_mla(source) if for_mla else (source, lambda states: states)
    pairs = ((window, see(states)) for window, states in inputs)
    return statistics_of(seen, sensitivity, pairs, windows.seen_by(source.spec))


def sensitivity_windows(spec: ModelSpec, windows: CalibrationWindows) -> CalibrationWindows:
    """The windows that sensitivities are measured on: the first ones to train on that are plain text."""
    return windows.trained.text[: -(-max(SENSITIVITY_TOKENS, spec.hidden_size) // windows.width)]


def begin_streams(
    model: LayerwiseModel, windows: CalibrationWindows, folder: Path, streams: tuple[str, ...], run: str
) -> Activations:
    """Open streams of hidden states, before layer 0 or where an earlier run in the same folder stopped.

    Args:
        model: the source model; the weights of its embeddings are released.
        windows: the windows of the text.
        folder: the folder of activations.
        streams: the streams' names.
        run: the identity of the run; activations of another run are discarded.
    """
    first = windows.first_tokens
    begun = None if first is None else model.begin(first[:, None]).reshape(1, windows.width, -1)
    shape = (windows.rows, windows.width, model.begin(windows.ids[:1]).shape[-1])
    activations = Activations(folder, streams=streams, shape=shape, run=run)
    if activations.layer is None:
        for window in my_windows(windows.rows):
            hidden = begun if windows.are_first_tokens(window) else model.begin(windows.ids[window : window + 1])
            assert hidden is not None
            for stream in streams:
                activations.write(stream, window, hidden)
        activations.commit()
    model.release()
    return activations


def traced(
    model: LayerwiseModel,
    windows: CalibrationWindows,
    index: int,
    module: nn.Module,
    states: Iterable[tuple[int, Tensor]],
) -> Iterator[tuple[int, Tensor, AttentionCall, Tensor]]:
    """Move windows past a layer of the source, in their order; the next ones are computed meanwhile.

    Args:
        model: the source model.
        windows: the windows of the text, all of them.
        index: the layer's number.
        module: the layer's module.
        states: the numbers of some windows, and their inputs of the layer, ``[1, W, E]``; for first tokens ``[W, 1,
            E]``.

    Returns:
        Each window's number, its inputs, its attention's call and the layer's output of the same shape, float32.

    Raises:
        CheckpointError: an input is NaN or infinite.
    """

    def trace(item: tuple[int, Tensor, LayerwiseModel]) -> tuple[int, Tensor, AttentionCall, Tensor]:
        window, hidden, placed = item
        refuse_no_numbers(hidden, index)
        with quick_products():
            call, output = placed.trace(index, module, hidden)
        call = replace(call, inputs=call.inputs.float(), output=call.output.float())
        return window, hidden, call, output.float()

    return map_in_threads(trace, ((window, hidden, windows.placed(model, window)) for window, hidden in states))
