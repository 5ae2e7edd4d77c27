"""The source model run on windows of a text, one layer at a time.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import Tensor, nn

from headwise.conversion.calibration.sensitivity import refuse_no_numbers
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.statistics import Statistics, statistics_of
from headwise.conversion.storage.activations import Activations
from headwise.hf import AttentionCall, LayerwiseModel
from headwise.processes import my_windows
from headwise.specs import ModelSpec

SENSITIVITY_TOKENS = 2048
"""How many tokens sensitivities are measured on, in whole windows; at least as many as a layer has inputs."""


class SourceStream:
    """Windows that go through the source once, layer by layer, in memory.

    Args:
        model: the source.
        windows: ``[N, W]`` token ids; each process takes a share of them.
    """

    def __init__(self, model: LayerwiseModel, windows: Tensor) -> None:
        self._model, self._window = model, windows.shape[1]
        self._hidden = {at: model.begin(windows[at : at + 1]) for at in my_windows(len(windows))}
        model.release()

    def statistics(self, index: int, module: nn.Module, source: Layer, sensitivity: Tensor | None) -> Statistics:
        """The statistics of the next layer, which the windows are moved past.

        Args:
            index: the layer's number.
            module: the layer.
            source: its attention, float32.
            sensitivity: see `headwise.conversion.methods.Evidence`.
        """
        inputs = ((at, call.inputs[0]) for at, _, call in self._through(index, module))
        return statistics_of(source, sensitivity, inputs, self._window)

    def skip(self, index: int, module: nn.Module) -> None:
        """Move the windows past a layer whose statistics are known."""
        for _ in self._through(index, module):
            pass

    def _through(self, index: int, module: nn.Module) -> Iterator[tuple[int, Tensor, AttentionCall]]:
        return traced(self._model, index, module, self._hidden.items(), self._hidden.__setitem__)


def sensitivity_windows(spec: ModelSpec, windows: Tensor, train: int) -> int:
    """How many of the first ``train`` windows ``[N, W]`` sensitivities are measured on."""
    return min(-(-max(SENSITIVITY_TOKENS, spec.hidden_size) // windows.shape[1]), train)


def begin_streams(
    model: LayerwiseModel, windows: Tensor, folder: Path, streams: tuple[str, ...], run: str
) -> Activations:
    """Streams before layer 0, or where an earlier run in the same folder has brought them.

    Args:
        model: the source; the weights that its embeddings take are released.
        windows: ``[N, W]`` token ids.
        folder: for activations.
        streams: their names.
        run: tells this run from another.
    """
    shape = (*windows.shape, model.begin(windows[:1]).shape[-1])
    activations = Activations(folder, streams=streams, shape=shape, run=run)
    if activations.layer is None:
        for at in my_windows(len(windows)):
            hidden = model.begin(windows[at : at + 1])
            for stream in streams:
                activations.write(stream, at, hidden)
        activations.commit()
    model.release()
    return activations


def traced(
    model: LayerwiseModel,
    index: int,
    module: nn.Module,
    windows: Iterable[tuple[int, Tensor]],
    hand_on: Callable[[int, Tensor], object],
) -> Iterator[tuple[int, Tensor, AttentionCall]]:
    """Move windows past a layer of the source; each one's number and input, and how its attention was called.

    Args:
        model: the source.
        index: the layer's number.
        module: the layer.
        windows: each one's number, and what goes into the layer, ``[1, W, E]``.
        hand_on: told of each window's number and the layer's output.

    Raises:
        CheckpointError: the text makes the model compute no numbers.
    """
    for at, hidden in windows:
        refuse_no_numbers(hidden, index)
        call, output = model.trace(index, module, hidden)
        hand_on(at, output)
        yield at, hidden, call
