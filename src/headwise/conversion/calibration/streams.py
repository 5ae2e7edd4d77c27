"""Convert layer after layer on a text: each one is solved for what the converted layers before it hand on.

Two streams go through the model side by side, the source's and the converted model's. A layer is solved from the
statistics of the converted stream, and refitted so that its output also makes up for what the streams differ by.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint
from headwise.conversion.calibration.sensitivity import kept_sensitivity, output_sensitivities, refuse_no_numbers
from headwise.conversion.solvers.heads import Layer, Rotation, rotation_tables
from headwise.conversion.solvers.refit import Cost, OutputRefit, Sample, refine
from headwise.conversion.solvers.statistics import Statistics, root, statistics_of
from headwise.conversion.storage.activations import Activations, Spill
from headwise.conversion.storage.layers import LayerResults
from headwise.errors import ArgumentError
from headwise.hf import AttentionCall, LayerwiseModel
from headwise.processes import all_sum, barrier, my_windows
from headwise.progress import Progress, silent
from headwise.specs import GroupedSpec, ModelSpec
from headwise.texts import CalibrationTexts, open_windows

STAGES = ("sensitivity", "spread", "channels", "sequence", "refine", "refit")
"""What is done for each layer beside finding its latent, or sharing its heads; every one can be left out by name."""

PASSES = 8
"""Of the local descent, for each layer: steps on every window, or on every `STRETCH` tokens of longer ones."""

STRETCH = 1024

QUERIES = 256
"""Of a window, drawn anew for each step of the descent."""

WEIGHED = 2048
"""Tokens the sensitivities are taken on, in whole windows; at least as many as a layer has inputs."""

Solver = Callable[[Statistics, Tensor | None], Layer]
"""A converted layer, from its statistics and what an error of its output costs."""


@dataclass(frozen=True)
class Step:
    """One layer's conversion.

    Attributes:
        layer: what it became.
        errors: what a token of the held-out windows costs, levelled (`Cost`), after each step that was tried:
            ``solved``, ``refine``, ``refit``. In nats, by estimate, where there are sensitivities.
        chosen: which of them it was.
    """

    layer: Layer
    errors: dict[str, float]
    chosen: str


@dataclass(frozen=True)
class Tried:
    """What a layer might become, run once over each window that is asked for.

    Attributes:
        layer: the same.
        run: what goes into its output projection, of a window's number: ``[W, H·V]``.
        spill: where that is kept.
        known: the windows whose is.
    """

    layer: Layer
    run: Callable[[int], Tensor]
    spill: Spill
    known: set[int] = field(default_factory=set)

    def mixed(self, window: int) -> Tensor:
        """What goes into its output projection, ``[W, H·V]``."""
        if window in self.known:
            return self.spill.read(window)
        made = self.run(window)
        self.spill.write(window, made)
        self.known.add(window)
        return made

    def output(self, window: int) -> Tensor:
        """The layer's, ``[W, E]``."""
        return self.layer.projected(self.mixed(window))


class Sequential:
    """A conversion on its way through the layers.

    Args:
        model: the source.
        windows: ``[N, W]`` token ids; the last ``held`` are not calibrated on, and decide between solutions.
        held: how many.
        folder: for activations, from which a run that was killed goes on.
        stages: of `STAGES`, those that are done.
        steps: of the local descent, for each layer; `descent_steps` when None.
        run: what tells this run from another.
        progress: told of each layer.
    """

    def __init__(
        self,
        model: LayerwiseModel,
        windows: Tensor,
        *,
        held: int,
        folder: Path,
        stages: Collection[str] = STAGES,
        steps: int | None = None,
        run: str = "",
        progress: Progress = silent,
    ) -> None:
        self.model, self.windows, self.stages = model, windows, frozenset(stages)
        self.train = len(windows) - held
        self.steps = descent_steps(windows[: self.train]) if steps is None else steps
        self.weighed = weighed_windows(model.checkpoint.spec, windows, self.train)
        self.sensitivities = LayerResults(folder / "sensitivities")
        if "sensitivity" in self.stages:
            output_sensitivities(model, windows[: self.weighed], self.sensitivities, progress=progress)
        self.streams = begin_streams(model, windows, folder, ("source", "converted"), run)
        self.inputs = Spill(folder / "inputs.spill", self.streams.shape)
        self.wanted = Spill(folder / "wanted.spill", self.streams.shape)

    @torch.no_grad()
    def layer(self, index: int, source: Layer, solve: Solver, keep: Callable[[Step], None]) -> Step:
        """Convert one layer, the next in order, and move both streams past it.

        Args:
            index: which.
            source: the layer as it is.
            solve: gives what it might become.
            keep: told of the result before the streams are past it, so that it can be found again.
        """
        assert isinstance(source.spec, GroupedSpec)
        assert index == self.position
        module = self.model.layer(index)
        rotation = rotation_tables(source.spec, self.windows.shape[1])
        sensitivity = self.sensitivity(index)
        statistics = self._study(index, module, source, sensitivity)
        cost = output_cost(sensitivity, source.spec.hidden_size)
        best = self._tried(solve(statistics, sensitivity).float(), rotation, "solved")
        cost = cost.limited(self._held_nats(best.output, cost))
        errors: dict[str, float] = {}
        self._is_better(best, "solved", errors, cost)
        chosen = "solved"
        for stage in ("refine", "refit"):
            if stage in self.stages:
                if stage == "refit":
                    changed = self._refitted(best, cost)
                else:
                    changed = self._tried(self._refined(best.layer, rotation, cost), rotation, stage)
                if self._is_better(changed, stage, errors, cost):
                    chosen, best = stage, changed
        for at in my_windows(len(self.windows)):
            hidden, made = self.streams.read(self._stream, at, at + 1), best.output(at)
            self.streams.write("converted", at, self.model.run(index, module, hidden, attention_output=made[None]))
        step = Step(best.layer, errors, chosen)
        keep(step)
        self.streams.commit()
        return step

    @property
    def position(self) -> int:
        """How many layers the streams are past."""
        assert self.streams.layer is not None
        return self.streams.layer

    def sensitivity(self, index: int) -> Tensor | None:
        """What an error of a layer's output costs, ``[E, E]`` float64; None where that is left out."""
        if "sensitivity" not in self.stages:
            return None
        return kept_sensitivity(self.sensitivities, index).double()

    @property
    def _stream(self) -> str:
        """What a layer is solved for: without the sequence, what the source's layers hand on."""
        return "converted" if "sequence" in self.stages else "source"

    def source_windows(self) -> dict[int, Tensor]:
        """What goes into layer 0 of this process's share of the windows that sensitivities are taken on."""
        hidden = {at: self.model.begin(self.windows[at : at + 1]) for at in my_windows(self.weighed)}
        self.model.release()
        return hidden

    def source_statistics(
        self, index: int, module: torch.nn.Module, source: Layer, hidden: dict[int, Tensor]
    ) -> Statistics:
        """What the source's own layers hand on to a layer in those windows, which are moved past it."""
        seen = traced(self.model, index, module, hidden.items(), hidden.__setitem__)
        inputs = ((at, call.inputs[0]) for at, _, call in seen)
        return statistics_of(source, self.sensitivity(index), inputs, self.windows.shape[1])

    def pass_source(self, index: int, module: torch.nn.Module, hidden: dict[int, Tensor]) -> None:
        """Move those windows past a layer of which all is known."""
        for _ in traced(self.model, index, module, hidden.items(), hidden.__setitem__):
            pass

    def _study(self, index: int, module: torch.nn.Module, source: Layer, sensitivity: Tensor | None) -> Statistics:
        """Move the source's stream on, and keep what the converted layer gets and what it should give."""
        read, write = self.streams.read, partial(self.streams.write, "source")
        states = ((at, read("source", at, at + 1)) for at in my_windows(len(self.windows)))

        def inputs() -> Iterator[tuple[int, Tensor]]:
            for at, own, call in traced(self.model, index, module, states, write):
                other = read(self._stream, at, at + 1)
                given = self.model.attention_inputs(index, module, other)[0]
                makes_up = own - other if self.model.adds else torch.zeros_like(own)
                self.inputs.write(at, given)
                self.wanted.write(at, (call.output + makes_up)[0])
                if at < self.train:
                    yield at, given

        found = statistics_of(source, sensitivity, inputs(), self.windows.shape[1])
        barrier()  # all processes read the held-out windows
        return found

    def _tried(self, layer: Layer, rotation: Rotation | None, name: str) -> Tried:
        """A layer that can be run on all windows; the results of one by another name are not written over."""
        shape = (*self.windows.shape, layer.state["o_proj.weight"].shape[1])
        spill = Spill(self.inputs.path.with_name(f"mixed-{name}.spill"), shape)
        return Tried(layer, lambda window: layer.mixed(self.inputs.read(window), rotation), spill)

    def _held_nats(self, output: Callable[[int], Tensor], cost: Cost) -> Tensor:
        """What a layer's output of each window costs without the limit, at every token of those held out."""
        held = range(self.train, len(self.windows))
        return torch.cat([cost.plain(output(at) - self.wanted.read(at)) for at in held])

    def _is_better(self, tried: Tried, name: str, errors: dict[str, float], cost: Cost) -> bool:
        """Whether a layer does better on the held-out windows than all before it; its error is noted."""
        best = min(errors.values(), default=torch.inf)
        found = float(cost.levelled(self._held_nats(tried.output, cost)).mean())
        errors[name] = found
        return found < best

    def _refitted(self, tried: Tried, cost: Cost) -> Tried:
        state = tried.layer.state
        refit = OutputRefit(state["o_proj.weight"], state.get("o_proj.bias"))
        for at in my_windows(self.train):
            refit.add(tried.mixed(at), self.wanted.read(at), cost)
        all_sum(refit.moments)
        all_sum(refit.error)
        state = {**state, **{name: tensor.float() for name, tensor in refit.solve().items()}}
        return replace(tried, layer=replace(tried.layer, state=state))

    def _refined(self, layer: Layer, rotation: Rotation | None, cost: Cost) -> Layer:
        generator = torch.Generator().manual_seed(0)
        tokens = self.windows.shape[1]
        order: list[int] = []

        def sample() -> Sample:
            if not order:
                order.extend(torch.randperm(self.train, generator=generator).tolist())
            at = order.pop()
            rows = torch.randperm(tokens, generator=generator)[:QUERIES].sort()[0]
            return Sample(self.inputs.read(at), self.wanted.read(at)[rows], rows)

        def output(state: Mapping[str, Tensor], drawn: Sample) -> Tensor:
            return replace(layer, state=state).output(drawn.inputs, rotation, drawn.rows)

        return replace(layer, state=refine(layer.state, output, sample, cost, steps=self.steps))


def descent_steps(windows: Tensor) -> int:
    """Of the local descent, for each layer, on windows ``[n, W]``."""
    return round(PASSES * max(windows.numel() / STRETCH, len(windows)))


def weighed_windows(spec: ModelSpec, windows: Tensor, train: int) -> int:
    """How many windows sensitivities are taken on, of the first ``train``."""
    return min(-(-max(WEIGHED, spec.hidden_size) // windows.shape[1]), train)


def begin_streams(
    model: LayerwiseModel, windows: Tensor, folder: Path, streams: tuple[str, ...], run: str
) -> Activations:
    """Streams that are at layer 0, or as far as an earlier run in the same folder has brought them.

    Args:
        model: the source; what it begins with is released.
        windows: ``[N, W]`` token ids.
        folder: for activations.
        streams: what they are called.
        run: what tells this run from another.
    """
    shape = (*windows.shape, model.begin(windows[:1]).shape[-1])
    made = Activations(folder, streams=streams, shape=shape, run=run)
    if made.layer is None:
        for at in my_windows(len(windows)):
            hidden = model.begin(windows[at : at + 1])
            for stream in streams:
                made.write(stream, at, hidden)
        made.commit()
    model.release()
    return made


def traced(
    model: LayerwiseModel,
    index: int,
    module: torch.nn.Module,
    windows: Iterable[tuple[int, Tensor]],
    hand_on: Callable[[int, Tensor], object],
) -> Iterator[tuple[int, Tensor, AttentionCall]]:
    """Move windows of a text past a layer of the source, and give how its attention was called in each.

    Args:
        model: the source.
        index: the layer's.
        module: the layer.
        windows: each one's place in the text, and what goes into the layer, ``[1, W, E]``.
        hand_on: told what comes out of it.

    Raises:
        CheckpointError: the text makes the model compute no numbers.
    """
    for at, hidden in windows:
        refuse_no_numbers(hidden, index)
        call, made = model.trace(index, module, hidden)
        hand_on(at, made)
        yield at, hidden, call


def output_cost(sensitivity: Tensor | None, hidden_size: int) -> Cost:
    """Of an error, every direction costing the same without sensitivities."""
    return Cost(torch.eye(hidden_size) if sensitivity is None else root(sensitivity).float())


def refuse_stages(without: Collection[str]) -> None:
    """Refuse to leave out what is not a stage.

    Raises:
        ArgumentError: it is none.
    """
    for name in without:
        if name not in STAGES:
            raise ArgumentError("without", name, f"must be one of {', '.join(STAGES)}")


def begin(
    checkpoint: Checkpoint,
    texts: CalibrationTexts,
    folder: Path,
    *,
    stages: Collection[str] = STAGES,
    run: str = "",
    make: type[Sequential] = Sequential,
    progress: Progress,
) -> Sequential:
    """A conversion that is about to convert layer 0.

    Args:
        checkpoint: the source.
        texts: to study it on.
        folder: for activations.
        stages: of `STAGES`, those that are done.
        run: what tells this conversion from another; one that was killed goes on.
        make: the kind of conversion.
        progress: told of windows and layers.

    Raises:
        ArgumentError: see `open_windows`.
    """
    windows, held = open_windows(checkpoint, texts)
    # In float32 whatever the weights are stored in: a layer is solved for what it should be given.
    model = LayerwiseModel(checkpoint, torch.float32)
    return make(model, windows, held=held, folder=folder, stages=stages, run=run, progress=progress)
