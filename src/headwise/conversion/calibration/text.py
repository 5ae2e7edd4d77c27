"""Calibrate on a text: each layer is solved for the inputs that the converted layers before it produce.

Two streams of hidden states go through the model side by side, the source's and the converted model's. A layer is
solved from the statistics of the converted stream, and refined by a descent and a refit so that its output also
corrects the difference between the streams. A `Candidate` is a layer that is run on the windows of the text, to
measure its error or to refit it.

Shapes: N windows, W tokens in each, S sampled tokens, H·V inputs of the output projection, E hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.base.processes import all_sum, barrier, my_windows, process_index
from headwise.base.progress import Progress, silent
from headwise.base.threads import map_in_threads
from headwise.conversion.calibration.base import Calibrator, Refined
from headwise.conversion.calibration.sensitivity import kept_sensitivity, output_sensitivities
from headwise.conversion.calibration.source_stream import (
    SourceStream,
    begin_streams,
    measured,
    sensitivity_windows,
    traced,
)
from headwise.conversion.calibration.windows import (
    DRAWN,
    EVERY,
    SHARE,
    CalibrationWindows,
    Starts,
    plain_windows,
    recall_windows,
    start_ids,
)
from headwise.conversion.codes import design
from headwise.conversion.methods import STAGES, Evidence
from headwise.conversion.plan import ConversionPlan, Place, read_layer
from headwise.conversion.solvers.device import CPU, clock, computing_on, quick_products, to_device
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import RIDGES, Cost, OutputRefit, WeighedTokens, refine
from headwise.conversion.solvers.statistics import Statistics, root
from headwise.conversion.storage import LOST, Activations, LayerFiles, Spill
from headwise.errors import ArgumentError, CheckpointError
from headwise.measure.texts import CalibrationTexts, open_windows
from headwise.models.specs import GroupedSpec
from headwise.runtime.hf import AttentionCall, LayerwiseModel
from headwise.runtime.kernels.native import built
from headwise.runtime.quantization import SINKS

QUERIES = 256
"""The number of queries of a window that each step of the descent draws at random."""


@dataclass(frozen=True)
class Candidate:
    """A layer that is run at most once on each window.

    Attributes:
        layer: the layer.
        run: computes the inputs of its output projection on a window, ``[W, H·V]``, by the window's number.
        spill: the file that holds those inputs.
        spilled_windows: the windows whose inputs are in the file.
    """

    layer: Layer
    run: Callable[[int], Tensor]
    spill: Spill
    spilled_windows: set[int] = field(default_factory=set)

    def mixed(self, window: int) -> Tensor:
        """The inputs of the output projection on a window, ``[W, H·V]``."""
        if window in self.spilled_windows:
            return self.spill.read(window)
        mixed = self.run(window)
        self.spill.write(window, mixed)
        self.spilled_windows.add(window)
        return mixed

    def output(self, window: int) -> Tensor:
        """The layer's output on a window, ``[W, E]``."""
        return self.layer.projected(self.mixed(window))


@dataclass(frozen=True)
class TrainingWindows:
    """The inputs of a layer's attention on the training windows, and the outputs that it should have.

    Attributes:
        inputs: the inputs on every window.
        wanted: the outputs that the attention should have on every window.
        count: the number of training windows, which are the first ones.
        tokens: tokens in each window.
        rotation: the rotary tables of a window, by its number.
        cost: the cost of an error of the output.
        starts: the first tokens that are trained on too, or None.
    """

    inputs: Spill
    wanted: Spill
    count: int
    tokens: int
    rotation: Callable[[int], Rotation | None]
    cost: Cost
    starts: Starts | None = None


@dataclass(frozen=True)
class Sample:
    """The sample of one step of the descent: a window, and some of its tokens.

    Attributes:
        inputs: ``[T, E]``, the attention's inputs.
        wanted: ``[S, E]``, the output that it should have at ``rows``.
        rows: ``[S]``, their places in the window.
        rotation: the rotary tables of the window.
        starts: some first tokens, or None.
    """

    inputs: Tensor
    wanted: Tensor
    rows: Tensor
    rotation: Rotation | None
    starts: Starts | None


def descend(layer: Layer, windows: TrainingWindows, *, steps: int) -> Layer:
    """Lower a layer's own error by gradient descent on all its matrices; see `refine`.

    A step draws its queries from one half of a window; those of the first half attend to nothing behind it, and cost
    half as much.

    Args:
        layer: the layer, float32.
        windows: the training windows.
        steps: the number of steps.
    """
    generator = torch.Generator().manual_seed(0)
    parts = 2 if layer.spec.is_causal and windows.tokens >= 2 * QUERIES else 1
    bounds = [windows.tokens * part // parts for part in range(parts + 1)]
    order: list[int] = []

    def sample() -> Sample:
        if not order:
            order.extend(torch.randperm(windows.count * parts, generator=generator, device=CPU).tolist())
        window, part = divmod(order.pop(), parts)
        start, end = bounds[part], bounds[part + 1]
        drawn = torch.randperm(end - start, generator=generator, device=CPU)[:QUERIES]
        rows = to_device(start + drawn.sort()[0])
        inputs, wanted = windows.inputs.read(window)[:end], windows.wanted.read(window)
        starts = None if windows.starts is None else windows.starts.drawn(DRAWN, generator)
        return Sample(inputs, wanted[rows], rows, windows.rotation(window), starts)

    def cost(state: Mapping[str, Tensor], batch: Sample) -> Tensor:
        changed = replace(layer, state=state)
        with quick_products():
            output = changed.output(batch.inputs, batch.rotation, batch.rows).float()
            nats = windows.cost(output - batch.wanted).mean()
            if batch.starts is not None:
                nats = nats + SHARE * batch.starts.cost(batch.starts.error(changed)).mean()
        return nats

    return replace(layer, state=refine(layer.state, cost, sample, steps=steps))


STEPS = 5
"""The number of steps that a layer's descent takes on every `STRETCH` tokens of the training windows."""

SHORT_STEPS = 7
"""The number of steps on every window that is shorter."""

CODE_WINDOWS = 32
"""The most windows that the code of a layer's cache is designed on."""

STRETCH = 512
"""The number of tokens from which a window counts by its tokens."""


@dataclass(frozen=True)
class _CurrentLayer:
    """The layer that is being converted.

    Attributes:
        index: the layer's number.
        module: the source's layer with its weights.
        rotation: the rotary tables of a window, by its number.
        cost: the cost of an error of its output, without a limit.
    """

    index: int
    module: nn.Module
    rotation: Callable[[int], Rotation | None]
    cost: Cost


class TextCalibrator(Calibrator):
    """Calibration on the windows of a text, which go through the model with the conversion.

    Args:
        model: the source.
        windows: the windows of the text.
        folder: the folder of activations, from which a killed run continues.
        stages: those of `STAGES` that are carried out.
        steps: the number of steps of each layer's descent; `descent_steps` when None.
        for_mla: whether layers are converted to MLA; see `SourceStream`.
        run: the identity of the run; activations of another run are discarded.

    Attributes:
        seconds: the time that windows, the descent and codes have taken, by ``windows``, ``descent`` and ``code``.
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
    ) -> None:
        self.for_mla = for_mla
        self.model, self.windows, self.stages = model, windows, frozenset(stages)
        self.tokens, self.window, self.train = windows.tokens, windows.width, windows.train
        self.steps = descent_steps(windows) if steps is None else steps
        self.sensitivities = LayerFiles(folder / "sensitivities")
        self.seconds = defaultdict[str, float](float)
        self._folder, self._run = folder, run
        self._streams: Activations | None = None
        self._current: _CurrentLayer | None = None
        self._best: Candidate | None = None

    def prepare(self, progress: Progress = silent) -> None:
        """Measure sensitivities, and open both streams before layer 0 or where an earlier run stopped.

        Raises:
            CheckpointError: the text makes the model compute NaN or infinite values.
            StorageError: the disk is full.
        """
        if "sensitivity" in self.stages:
            output_sensitivities(self.model, self.sample, self.sensitivities, progress=progress)
        self._streams = begin_streams(self.model, self.windows, self._folder, ("source", "converted"), self._run)
        self._inputs = Spill(self._folder / "inputs.spill", self._streams.shape)
        self._wanted = Spill(self._folder / "wanted.spill", self._streams.shape)

    @property
    def streams(self) -> Activations:
        """The hidden states of both streams, once `prepare` has opened them."""
        assert self._streams is not None
        return self._streams

    @property
    def position(self) -> int:
        """The number of layers that the streams have passed."""
        assert self.streams.layer is not None
        return self.streams.layer

    def may_be_saved(self, place: Place) -> bool:
        """Whether the streams have passed a layer, whose result is then on disk."""
        return self.position > place.index

    def sensitivity(self, index: int) -> Tensor | None:
        """A layer's sensitivity ``[E, E]``, float64; None where that stage is left out."""
        if "sensitivity" not in self.stages:
            return None
        return kept_sensitivity(self.sensitivities, index).double()

    @torch.no_grad()
    def evidence(self, place: Place, source: Layer) -> Evidence:
        """Move the source's stream past the next layer; its statistics and sensitivity.

        Raises:
            CheckpointError: an earlier run converted the layer, and its result is lost.
        """
        if self.may_be_saved(place):
            raise CheckpointError("layer", place.index, LOST)
        assert place.index == self.position
        source = source.float()
        assert isinstance(source.spec, GroupedSpec)
        module = self.model.module(place.index)
        sensitivity = self.sensitivity(place.index)
        with self._timed("windows"):
            statistics = self._statistics(place.index, module, source, sensitivity)
        rotation = partial(self.windows.rotation, source.spec)
        cost = output_cost(sensitivity, source.spec.hidden_size)
        self._current = _CurrentLayer(place.index, module, rotation, cost)
        starts = None if self.windows.starts is None else self._inputs.read(len(self.windows))
        return Evidence(statistics, sensitivity, starts)

    @torch.no_grad()
    def refine(
        self,
        place: Place,
        layer: Layer,
        token_bytes: int | None = None,
        last_step: Callable[[Layer], Layer] | None = None,
    ) -> Refined:
        """The solution or its descent, by their errors on held-out windows; then coded; then refitted or not.

        The code comes after the descent. Its basis has channels of very different sizes, which one learning rate for
        a tensor does not suit; and a descent hardly lowers what rounding loses.
        """
        with self._timed("windows"):
            current = self._current_layer(place)
            best = self._candidate(layer.float(), "solved")
            cost = current.cost.limited(self._held_costs(best.output, current.cost))
            errors = {"solved": self._held_error(best, cost)}
            starts = self._starts(best.layer)
            chosen = "solved"
            if "refine" in self.stages:
                candidate = self._descended(best, cost, starts)
                errors["refine"] = self._held_error(candidate, cost)
                if errors["refine"] < errors["solved"]:
                    chosen, best = "refine", candidate
            if token_bytes is not None:
                chosen, best = "code", self._coded(best.layer, token_bytes)
                errors["code"] = self._held_error(best, cost)
            if last_step is not None:
                chosen, best = "norm", self._candidate(last_step(best.layer).float(), "norm")
                errors["norm"] = self._held_error(best, cost)
            if "refit" in self.stages:
                for candidate in self._refitted(best, cost, starts):
                    error = self._held_error(candidate, cost)
                    errors["refit"] = min(error, errors.get("refit", error))
                    if error < errors[chosen]:
                        chosen, best = "refit", candidate
            self._best = best
            return Refined(best.layer, errors, chosen)

    @torch.no_grad()
    def advance(self, place: Place, refined: Refined) -> None:
        """Move the converted stream past the layer, and commit both streams for the next layer."""
        current, best = self._current_layer(place), self._best
        assert best is not None
        assert best.layer is refined.layer

        def move(window: int) -> None:
            hidden = self._read(self._solved_stream, window)
            if self.windows.are_starts(window):
                output = best.layer.own_output(self._inputs.read(window), current.rotation(0))
            else:
                output = best.output(window)
            placed = self.windows.placed(self.model, window)
            with quick_products():
                hidden = placed.run(current.index, current.module, hidden, attention_output=output.view(hidden.shape))
            self._write("converted", window, hidden.float())

        with self._timed("windows"):
            for _ in map_in_threads(move, my_windows(self.windows.rows)):
                pass
        self._current = self._best = None
        self.streams.commit()

    @torch.no_grad()
    def losses(self, *layers: Layer) -> list[float] | None:
        """The mean cost of each solution of the current layer on held-out windows, in nats a token."""
        current = self._current
        assert current is not None

        def output(layer: Layer, window: int) -> Tensor:
            return layer.output(self._inputs.read(window), current.rotation(window))

        return [float(self._held_costs(partial(output, layer.float()), current.cost).mean()) for layer in layers]

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
    def _solved_stream(self) -> str:
        """The name of the stream that layers are solved for: the source's without the stage ``sequence``."""
        return "converted" if "sequence" in self.stages else "source"

    @property
    def sample(self) -> CalibrationWindows:
        """The windows that sensitivities are measured on."""
        return sensitivity_windows(self.model.checkpoint.spec, self.windows)

    def _current_layer(self, place: Place) -> _CurrentLayer:
        assert self._current is not None
        assert self._current.index == place.index
        return self._current

    def _statistics(self, index: int, module: nn.Module, source: Layer, sensitivity: Tensor | None) -> Statistics:
        """Move the source's stream past a layer, and save the layer's inputs and the outputs it should have."""
        placed = partial(self.windows.placed, self.model)
        states = ((window, self._read("source", window)) for window in my_windows(self.windows.rows))

        def finish(window: int, hidden: Tensor, call: AttentionCall, output: Tensor) -> tuple[int, Tensor]:
            self._write("source", window, output)
            solved_hidden = self._read(self._solved_stream, window)
            attention_inputs = placed(window).attention_inputs(index, module, solved_hidden).flatten(0, 1)  # [W, E]
            drift = hidden - solved_hidden if self.model.adds else torch.zeros_like(hidden)
            self._inputs.write(window, attention_inputs)
            self._wanted.write(window, (call.output + drift).flatten(0, 1))
            return window, attention_inputs

        windows = traced(placed, index, module, states, finish)
        trained = ((window, inputs) for window, inputs in windows if window < self.train)
        statistics = measured(source, sensitivity, trained, self.windows, for_mla=self.for_mla)
        barrier()  # all processes read the held-out windows
        return statistics

    def _read(self, stream: str, window: int) -> Tensor:
        """A window of a stream, ``[1, W, E]``; of first tokens ``[W, 1, E]``."""
        states = self.streams.read(stream, window, window + 1)
        # Not transposed: that leaves strides with which torch multiplies each token by a copy of the matrix.
        return states.view(states.shape[1], 1, -1) if self.windows.are_starts(window) else states

    def _write(self, stream: str, window: int, states: Tensor) -> None:
        """Write a window of a stream, in the shape of `_read`."""
        self.streams.write(stream, window, states.reshape(1, self.window, -1))

    def _starts(self, layer: Layer) -> Starts | None:
        """The first tokens in the current layer, whose cost has a limit by the errors of a solution."""
        current = self._current
        assert current is not None
        if self.windows.starts is None:
            return None
        inputs, wanted = (spill.read(len(self.windows)) for spill in (self._inputs, self._wanted))
        return Starts(inputs, wanted, current.rotation(0), current.cost).limited(layer)

    def _candidate(self, layer: Layer, name: str) -> Candidate:
        """A candidate for the current layer, whose values are spilled to a file of its own name."""
        current = self._current
        assert current is not None
        shape = (*self.windows.ids.shape, layer.state["o_proj.weight"].shape[1])  # [N, W, H·V]
        spill = Spill(self._inputs.path.with_name(f"mixed-{name}.spill"), shape)
        return Candidate(
            layer, lambda window: layer.mixed(self._inputs.read(window), current.rotation(window)), spill
        )

    def _held_costs(self, output: Callable[[int], Tensor], cost: Cost) -> Tensor:
        """The cost of an output, without a limit, at every token of the held-out windows: ``[held · W]``."""

        def costs(window: int) -> Tensor:
            return cost.plain(output(window) - self._wanted.read(window))

        return torch.cat([*map_in_threads(costs, range(self.train, len(self.windows)))])

    def _held_error(self, candidate: Candidate, cost: Cost) -> float:
        """The mean levelled cost of a candidate on the held-out windows."""
        return float(cost.levelled(self._held_costs(candidate.output, cost)).mean())

    def _refitted(self, candidate: Candidate, cost: Cost, starts: Starts | None) -> Iterator[Candidate]:
        """The candidate with its output projection refitted on the training windows, with each of `RIDGES`."""
        state = candidate.layer.state
        refit = OutputRefit(state["o_proj.weight"], state.get("o_proj.bias"))

        def weighed(window: int) -> WeighedTokens:
            return refit.weighed(candidate.mixed(window), self._wanted.read(window), cost)

        for tokens in map_in_threads(weighed, my_windows(self.train)):
            refit.add(tokens)
        if starts is not None and process_index() == 0:
            refit.add(starts.weighed(refit, candidate.layer, self.train * self.window))
        all_sum(refit.moments)
        all_sum(refit.error)
        for ridge in RIDGES:
            refitted = {name: tensor.float() for name, tensor in refit.solve(ridge).items()}
            yield replace(candidate, layer=replace(candidate.layer, state={**state, **refitted}))

    def _coded(self, layer: Layer, token_bytes: int) -> Candidate:
        """The layer with a code of its cache, in that code's basis; see `codes.design`."""
        assert self._current is not None
        rotation = self._current.rotation
        windows = ((self._inputs.read(window), rotation(window)) for window in range(min(self.train, CODE_WINDOWS)))
        with self._timed("code"):
            coded = design(layer, windows, self._current.cost.metric).coded(token_bytes)
        return self._candidate(coded, "code")

    def _descended(self, candidate: Candidate, cost: Cost, starts: Starts | None) -> Candidate:
        """The candidate after its descent on the training windows."""
        assert self._current is not None
        rotation = self._current.rotation
        windows = TrainingWindows(self._inputs, self._wanted, self.train, self.window, rotation, cost, starts)
        with self._timed("descent"):
            layer = descend(candidate.layer, windows, steps=self.steps)
        return self._candidate(layer, "refine")

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Add the time of a block to ``seconds``, without that of timed blocks within it."""
        start, within = clock(), sum(self.seconds.values())
        yield
        self.seconds[part] += clock() - start - (sum(self.seconds.values()) - within)


def start_on_text(
    plan: ConversionPlan, texts: CalibrationTexts, folder: Path, *, run: str = "", progress: Progress = silent
) -> TextCalibrator:
    """Prepare calibration on a text, before layer 0 or where an earlier run in the same folder stopped.

    Args:
        plan: the conversion.
        texts: the calibration texts.
        folder: the folder of activations.
        run: the conversion's identity; activations of another one are discarded.
        progress: told of layers.

    Raises:
        ArgumentError: see `open_calibration`.
    """
    windows = open_calibration(plan, texts)
    built()  # here, where Ctrl-C ends a compiler; windows are worked on in other threads
    # Float32 whatever dtype the weights are stored in: weights and solutions are not rounded further.
    model = LayerwiseModel(plan.checkpoint, torch.float32, device=plan.device)
    for_mla = plan.after.mechanism == "mla"
    calibrator = TextCalibrator(model, windows, folder=folder, stages=plan.stages, for_mla=for_mla, run=run)
    calibrator.prepare(progress)
    return calibrator


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
            windows = replace(windows, starts=start_ids(windows))
    if plan.token_bytes is not None and windows.width <= SINKS:
        rule = f"are too few to design a code on, which needs two windows of more than {SINKS} tokens"
        raise ArgumentError("calibrate", f"{windows.tokens} tokens", rule)
    return windows.to(plan.device)


def descent_steps(windows: CalibrationWindows) -> int:
    """The number of steps of each layer's descent on the windows that are trained on."""
    if windows.width < STRETCH:
        return SHORT_STEPS * windows.train
    return round(STEPS * windows.train * windows.width / STRETCH)


def output_cost(sensitivity: Tensor | None, hidden_size: int) -> Cost:
    """The cost of an error of a layer's output; every direction costs the same without sensitivities."""
    return Cost(torch.eye(hidden_size) if sensitivity is None else root(sensitivity).float())
