"""The source model on windows of a text, one layer at a time: its sensitivities and the statistics of its layers.

Sensitivities are the cost of an error of each layer's attention output, in nats. Let g be the derivative of the loss
by a layer's attention output at one token. An error δ of that output costs about ``½ E[(gᵀ δ)²] = ½ δᵀ G δ`` nats a
token. ``G = E[g gᵀ]`` is the Fisher information, because the labels are drawn from the model itself. One backward
pass through the whole model measures it; no weight is updated.

This is the metric that values are approximated in, and in which the solutions of a layer are compared.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.base.disk import storage_errors
from headwise.base.processes import all_sum, barrier, my_windows, process_index
from headwise.base.progress import Progress, silent
from headwise.base.threads import map_in_threads
from headwise.conversion.calibration.windows import CalibrationWindows
from headwise.conversion.solvers.device import CPU, quick_products, to_device
from headwise.conversion.solvers.layer import Layer, seen_by_mla
from headwise.conversion.solvers.statistics import Statistics, statistics_of
from headwise.conversion.storage import LOST, Activations, LayerFiles, Spill
from headwise.errors import CheckpointError
from headwise.models.specs import ModelSpec
from headwise.runtime.hf import AttentionCall, LayerwiseModel

MEASURING = "measuring sensitivities"
"""The name of the stage, for progress."""

PIECE = 256
"""The number of positions whose logits are in memory at a time."""

_TEMPORARY = "sensitivities-"
"""The prefix of temporary folders' names."""


def output_sensitivities(
    model: LayerwiseModel, windows: CalibrationWindows, results: LayerFiles, *, progress: Progress = silent
) -> None:
    """Measure G of every layer and save it, ``sensitivity`` ``[E, E]`` float32, unless an earlier run has.

    Layers run one at a time, forward and then backward; in between, their inputs are in files beside the results.

    Args:
        model: the source model.
        windows: the windows of text to measure on.
        results: the files that sensitivities are saved to.
        progress: the callback that is told of each layer, forward and backward.
    """
    if process_index() == 0:
        for leftover in results.folder.parent.glob(f"{_TEMPORARY}*"):  # from a killed run
            shutil.rmtree(leftover, ignore_errors=True)
    barrier()
    layers = model.num_layers
    if all(results.load(index) for index in range(layers)):
        return
    with ExitStack() as stack:
        with storage_errors("activations", results.folder.parent):
            # What cannot be removed is left to the next run; the error that is underway must not be replaced.
            made = TemporaryDirectory(prefix=_TEMPORARY, dir=results.folder.parent, ignore_cleanup_errors=True)
            folder = stack.enter_context(made)
        _measure(model, windows, results, Path(folder), progress)
    barrier()


def _measure(
    model: LayerwiseModel, windows: CalibrationWindows, results: LayerFiles, folder: Path, progress: Progress
) -> None:
    count, layers = len(windows), model.num_layers
    mine = my_windows(count)
    with torch.no_grad(), quick_products():
        hidden = model.begin(windows.ids[mine.start : mine.stop]) if len(mine) else model.begin(windows.ids[:1])[:0]
        placed = [windows.placed(model, number) for number in mine]
        shape = len(hidden), windows.width, hidden.shape[-1]
        spills = [Spill(folder / f"{index}.activations", shape) for index in range(layers)]
        for index in range(layers):
            progress(MEASURING, index, 2 * layers)
            refuse_no_numbers(hidden, index)
            for window, states in enumerate(hidden):
                spills[index].write(window, states)
            module = model.module(index)
            outputs = map_in_threads(partial(_passed, index, module), zip(placed, hidden, strict=True))
            hidden = torch.cat([hidden[:0], *outputs])
    refuse_no_numbers(hidden, layers)
    gradient = _loss_gradient(model, hidden, mine.start)
    for index in reversed(range(layers)):
        progress(MEASURING, 2 * layers - index - 1, 2 * layers)
        module = model.module(index)
        inputs = map(spills[index].read, range(len(mine)))
        gram = torch.zeros(shape[-1], shape[-1], dtype=torch.float64)
        backward = map_in_threads(partial(_passed_back, index, module), zip(placed, inputs, gradient, strict=True))
        for window, (input_gradient, attention_gradient) in enumerate(backward):
            gradient[window] = input_gradient
            wide = attention_gradient.double()  # [W, E]
            gram.addmm_(wide.mT, wide)
        spills[index].path.unlink(missing_ok=True)  # a process may have no windows
        total = all_sum(gram) / windows.tokens
        if process_index() == 0:
            results.save(index, {"sensitivity": total.float()}, {})
    progress(MEASURING, 2 * layers, 2 * layers)


def _passed(index: int, module: nn.Module, item: tuple[LayerwiseModel, Tensor]) -> Tensor:
    """A layer's output ``[1, W, E]`` for a window of its inputs ``[W, E]``."""
    model, window = item
    return model.run(index, module, window[None]).to(window.dtype)


def _passed_back(index: int, module: nn.Module, item: tuple[LayerwiseModel, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of a layer's inputs and of its attention's output, ``[W, E]`` each.

    Args:
        index: the layer's number.
        module: the layer's module.
        item: the model for the positions of a window, the window's inputs of the layer, and the gradient of the
            layer's output, both ``[W, E]``.
    """
    model, window, gradient = item
    inputs = window[None].requires_grad_()  # [1, W, E]
    with torch.enable_grad(), quick_products():
        call, output = model.trace(index, module, inputs)
    gradients = torch.autograd.grad(output, (inputs, call.output), gradient[None].to(output.dtype))
    return gradients[0][0], gradients[1][0]


def kept_sensitivity(results: LayerFiles, index: int) -> Tensor:
    """A layer's sensitivity ``[E, E]``, float32, that `output_sensitivities` saved.

    Raises:
        CheckpointError: the file cannot be read.
    """
    result = results.load(index)
    if result is None:
        raise CheckpointError("layer", index, LOST)
    return to_device(result[0]["sensitivity"])


def refuse_no_numbers(states: Tensor, index: int) -> None:
    """Refuse hidden states of a text that are not finite.

    Args:
        states: the hidden states before a layer, ``[N, W, E]``.
        index: the layer's number, for the message.

    Raises:
        CheckpointError: a state is NaN or infinite.
    """
    if not bool(torch.isfinite(states).all()):
        rule = f"make the model compute NaN or infinite values before layer {index}"
        raise CheckpointError("calibrate", f"{states.shape[0] * states.shape[1]} tokens", rule)


def _loss_gradient(model: LayerwiseModel, hidden: Tensor, first: int) -> Tensor:
    """The derivative of every token's own loss by the last layer's output, ``[N, W, E]``.

    For a language model the loss is the negative log-likelihood of a label drawn from the model; for an encoder it is
    half the squared distance of its states, whose Fisher information one random direction for each token gives on
    average. Draws depend on the window's number, ``first`` for the first, not on the process.
    """
    gradient = torch.empty_like(hidden)
    generator = torch.Generator()
    for index, window in enumerate(hidden):
        generator.manual_seed(first + index)
        for start in range(0, len(window), PIECE):
            piece = window[None, start : start + PIECE].detach().requires_grad_()
            with torch.enable_grad(), quick_products():
                outputs = model.finish(piece)[0].float()  # [PIECE, vocabulary], or an encoder's [PIECE, E]
                refuse_no_numbers(outputs.detach()[None], model.num_layers)
                if model.has_logits:
                    labels = drawn_labels(outputs.detach().softmax(-1), generator)
                    loss = F.cross_entropy(outputs, labels, reduction="sum")
                else:
                    direction = to_device(torch.randn(outputs.shape, generator=generator, device=CPU))
                    loss = (outputs * direction).sum()
            gradient[index, start : start + PIECE] = torch.autograd.grad(loss, piece)[0][0]
    return gradient


def drawn_labels(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a label from each row of ``[S, vocabulary]``: ``[S]``. `torch.multinomial` takes ten times as long."""
    sums = probabilities.cumsum(-1)
    drawn = to_device(torch.rand(len(sums), 1, generator=generator, device=CPU)) * sums[:, -1:]
    return torch.searchsorted(sums, drawn, right=True)[:, 0].clamp_max(sums.shape[-1] - 1)


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
        """The inputs ``[W, E]`` of the attention that the windows passed last, by window."""
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
        self.skip(index, module)
        return measured(source, sensitivity, self.inputs.items(), self.windows, for_mla=self._for_mla)

    def skip(self, index: int, module: nn.Module) -> None:
        """Move the windows past the next layer."""
        states = ((window, self._hidden[window]) for window in list(self._hidden))
        for window, _, call, output in traced(self._model, self.windows, index, module, states):
            self._hidden[window], self.inputs[window] = output, call.inputs[0]


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
