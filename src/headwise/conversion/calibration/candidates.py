"""One layer in a conversion: what is known of it, its solution, and what further steps make of that.

A `Calibrator` gives the evidence of each layer, from a text, from saved statistics, or from weights alone. All three
answer the same calls, layer by layer: `collect` before a layer is solved, and `advance` with what was chosen of it,
once that is on disk.

`LayerData` is the layer that is being converted, on the windows of a text. A `Candidate` is a layer that may be
chosen for it. The steps between a layer's solution and what is written each make other candidates out of one: a
descent, the code of its cache, a refit. `select` takes the steps in their order, and goes on with the better
candidate each time, by errors on held-out windows.

Shapes: N windows, W tokens in each, S sampled tokens, H·V inputs of the output projection, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.base.processes import all_sum, my_windows, process_index
from headwise.base.threads import map_in_threads
from headwise.conversion.calibration.windows import DRAWN, SHARE, CalibrationWindows, FirstTokens
from headwise.conversion.codes import design
from headwise.conversion.methods import Evidence
from headwise.conversion.plan import ConversionPlan, Place, read_layer
from headwise.conversion.solvers.device import CPU, Stopwatch, quick_products, to_device
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import RIDGES, Cost, OutputRefit, WeighedTokens, refine
from headwise.conversion.storage import Spill
from headwise.models.specs import GroupedSpec

ALWAYS_TAKEN = ("code", "norm")
"""The steps whose result is taken whatever it loses, because the folder needs it."""


@dataclass(frozen=True, eq=False)
class LayerData:
    """A layer that is being converted, on the windows of a text.

    Attributes:
        index: the layer's number.
        module: the source's layer with its weights.
        spec: the spec of its attention.
        windows: the windows, of which the first are trained on, and the others held out.
        inputs: the inputs of its attention on every window, ``[N, W, E]``.
        wanted: the outputs that its attention should have on every window, ``[N, W, E]``.
        cost: the cost of an error of an output.
        first_tokens: the tokens that each begin a text; None where they are not calibrated on.
        descent_steps: the number of steps of its descent.
        seconds: the seconds that the parts of the conversion have taken, by name.
    """

    index: int
    module: nn.Module
    spec: GroupedSpec
    windows: CalibrationWindows
    inputs: Spill
    wanted: Spill
    cost: Cost
    first_tokens: FirstTokens | None
    descent_steps: int
    seconds: Stopwatch

    def rotation(self, window: int) -> Rotation | None:
        """The rotary tables of a window, by its number; None without RoPE."""
        return self.windows.rotation(self.spec, window)

    def held_costs(self, output: Callable[[int], Tensor]) -> Tensor:
        """The cost of an output, without a limit, at every token of the held-out windows: ``[held · W]``."""

        def costs(window: int) -> Tensor:
            return self.cost.plain(output(window) - self.wanted.read(window))

        return torch.cat([*map_in_threads(costs, range(self.windows.train, len(self.windows)))])

    def loss(self, layer: Layer) -> float:
        """The mean cost of a layer on the held-out windows, without a limit, in nats a token."""
        layer = layer.float()
        costs = self.held_costs(lambda window: layer.output(self.inputs.read(window), self.rotation(window)))
        return float(costs.mean())

    def limited(self, candidate: Candidate) -> LayerData:
        """The layer's data with limits to the cost of one token, by the errors of a candidate: see `Cost.limited`.

        First tokens have a limit of their own, because their errors are far larger.
        """
        first_tokens = None if self.first_tokens is None else self.first_tokens.limited(candidate.layer)
        return replace(self, cost=self.cost.limited(self.held_costs(candidate.output)), first_tokens=first_tokens)


@dataclass(frozen=True)
class Candidate:
    """A layer that may be chosen. On a text it is run at most once on each window.

    Attributes:
        step: the name of the step that made it.
        layer: the layer with its tensors; float32 on a text.
        data: the windows of the text that it is run on; None without a text.
        spill: the file of the inputs of its output projection, ``[N, W, H·V]``; None without a text.
        spilled_windows: the windows whose inputs are in the file.
    """

    step: str
    layer: Layer
    data: LayerData | None
    spill: Spill | None = None
    spilled_windows: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, step: str, layer: Layer, data: LayerData | None) -> Candidate:
        """A layer that has not been run yet."""
        if data is None:
            return cls(step, layer, None)
        shape = (*data.windows.ids.shape, layer.state["o_proj.weight"].shape[1])  # [N, W, H·V]
        return cls(step, layer.float(), data, Spill(data.inputs.path.with_name(f"mixed-{step}.spill"), shape))

    def projecting(self, tensors: Mapping[str, Tensor]) -> Candidate:
        """The layer with another output projection: the inputs of the projection stay, and are not computed again."""
        state = {**self.layer.state, **{name: tensor.float() for name, tensor in tensors.items()}}
        return replace(self, step="refit", layer=replace(self.layer, state=state))

    @property
    def on_text(self) -> LayerData:
        """The windows of the text, where there is one."""
        assert self.data is not None
        return self.data

    def mixed(self, window: int) -> Tensor:
        """The inputs of the output projection on a window, ``[W, H·V]``."""
        data = self.on_text
        assert self.spill is not None
        if window in self.spilled_windows:
            return self.spill.read(window)
        mixed = self.layer.mixed(data.inputs.read(window), data.rotation(window))
        self.spill.write(window, mixed)
        self.spilled_windows.add(window)
        return mixed

    def output(self, window: int) -> Tensor:
        """The layer's output on a window, ``[W, E]``."""
        return self.layer.projected(self.mixed(window))

    def error(self) -> float:
        """The mean levelled cost of a token of the held-out windows; see `Cost`."""
        data = self.on_text
        return float(data.cost.levelled(data.held_costs(self.output)).mean())


Step = Callable[[Candidate], Iterable[Candidate]]
"""A function that makes other candidates out of one."""


@torch.no_grad()
def select(solved: Layer, steps: Mapping[str, Step], data: LayerData | None) -> tuple[Candidate, dict[str, Any]]:
    """Take a solution through further steps, and select what has the least error on held-out windows.

    Args:
        solved: the layer as the method solved it.
        steps: the steps by name, in their order; each begins with what was selected of those before it.
        data: the layer on the windows of a text; None without a text, where nothing is measured.

    Returns:
        The selected layer; and as JSON-able values ``errors``, the mean levelled cost (`Cost`) of a token of the
        held-out windows after each step (estimated nats where there are sensitivities), and ``chosen``, the step that
        made the layer. Without a text there are no such values.
    """
    best = Candidate.of("solved", solved, data)
    if data is None:
        for step in steps.values():
            (best,) = step(best)
        return best, {}
    with data.seconds.timed("windows"):
        # The limit to the cost of one token is the solution's for all steps, so that their errors can be compared.
        best = replace(best, data=data.limited(best))
        least = best.error()
        errors = {"solved": least}
        for name, step in steps.items():
            for candidate in step(best):
                error = candidate.error()
                errors[name] = min(error, errors.get(name, error))
                if name in ALWAYS_TAKEN or error < least:
                    best, least = candidate, error
    return best, {"errors": errors, "chosen": best.step}


class Calibrator:
    """Calibration on weights alone. Subclasses have evidence from a text.

    Attributes:
        tokens: the number of calibration tokens, held-out tokens included.
        window: the number of tokens in each window.
        is_sequential: whether layers must be converted in order, each once, because a text goes through them.
        has_evidence: whether layers are solved from more than their weights.
        read_seconds: seconds spent on reading evidence from disk.
    """

    tokens: int = 0
    window: int = 0
    is_sequential: bool = False
    has_evidence: bool = False
    read_seconds: float = 0.0

    def may_be_saved(self, place: Place) -> bool:
        """Whether an earlier run may have converted and saved a layer already."""
        return True

    def collect(self, place: Place, source: Layer) -> tuple[Evidence, LayerData | None]:
        """Collect what a layer is solved from, and the windows of the text that its solution is measured on.

        Args:
            place: the layer's place in the model.
            source: the source layer with its weights.

        Returns:
            The evidence, and the layer on the windows of a text; None where there is no text.
        """
        return Evidence(), None

    def advance(self, data: LayerData | None, best: Candidate) -> None:
        """Go on to the next layer, once the result is on disk: a run killed after this does not solve it again."""

    def source_evidence(self, plan: ConversionPlan) -> Iterator[tuple[Layer, Evidence]]:
        """Each layer of the source in turn, with its evidence: statistics of the inputs that the source gives it."""
        for place in plan.places:
            source = read_layer(plan.checkpoint, place)
            yield source, self.collect(place, source)[0]


NOTHING_KNOWN = Calibrator()
"""The calibrator of conversions by weights alone."""


QUERIES = 256
"""The number of queries of a window that each step of the descent draws at random."""

STEPS = 5
"""The number of steps that a layer's descent takes on every `STRETCH` tokens of the training windows."""

SHORT_STEPS = 7
"""The number of steps on every window of fewer than `STRETCH` tokens."""

STRETCH = 512
"""The number of tokens from which a window counts by its tokens."""

CODE_WINDOWS = 16
"""The most windows that the code of a layer's cache is designed on."""


def descent_steps(windows: CalibrationWindows) -> int:
    """The number of steps of each layer's descent on the windows that are trained on."""
    if windows.width < STRETCH:
        return SHORT_STEPS * windows.train
    return round(STEPS * windows.train * windows.width / STRETCH)


def descended(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate after its descent on the training windows; see `descend`."""
    data = candidate.on_text
    with data.seconds.timed("descent"):
        layer = descend(candidate.layer, data)
    yield Candidate.of("refine", layer, data)


def descend(layer: Layer, data: LayerData) -> Layer:
    """Lower a layer's own error by gradient descent on all its matrices; see `refine`.

    A step draws its queries from one half of a window; those of the first half attend to nothing behind it, and cost
    half as much.

    Args:
        layer: the layer, float32.
        data: the layer on the windows of the text.
    """
    generator = torch.Generator().manual_seed(0)
    width = data.windows.width
    # A window without `QUERIES` tokens in each half is not divided.
    parts = 2 if layer.spec.is_causal and width >= 2 * QUERIES else 1
    bounds = [width * part // parts for part in range(parts + 1)]
    order: list[int] = []

    def sample() -> tuple[int, int, Tensor, FirstTokens | None]:
        """A window, the end of one of its parts, some tokens ``[S]`` of that part, and some first tokens."""
        if not order:
            order.extend(torch.randperm(data.windows.train * parts, generator=generator, device=CPU).tolist())
        window, part = divmod(order.pop(), parts)
        start, end = bounds[part], bounds[part + 1]
        drawn = torch.randperm(end - start, generator=generator, device=CPU)[:QUERIES]
        first_tokens = None if data.first_tokens is None else data.first_tokens.drawn(DRAWN, generator)
        return window, end, to_device(start + drawn.sort()[0]), first_tokens

    def cost(state: Mapping[str, Tensor], drawn: tuple[int, int, Tensor, FirstTokens | None]) -> Tensor:
        window, end, rows, first_tokens = drawn
        inputs, wanted = data.inputs.read(window)[:end], data.wanted.read(window)[rows]
        rotation, changed = data.rotation(window), replace(layer, state=state)
        with quick_products():
            output = changed.output(inputs, rotation, rows).float()
            nats = data.cost(output - wanted).mean()
            if first_tokens is not None:
                nats = nats + SHARE * first_tokens.cost(first_tokens.error(changed)).mean()
        return nats

    return replace(layer, state=refine(layer.state, cost, sample, steps=data.descent_steps))


def coded(candidate: Candidate, *, token_bytes: int) -> Iterator[Candidate]:
    """The layer with a code of its cache, in that code's basis; see `headwise.conversion.codes.design`.

    Args:
        candidate: the candidate that gets a code.
        token_bytes: the bytes of a token's codes in this layer.
    """
    data = candidate.on_text
    numbers = range(min(data.windows.train, CODE_WINDOWS))
    windows = ((data.inputs.read(window), data.rotation(window)) for window in numbers)
    with data.seconds.timed("code"):
        alone = None if data.first_tokens is None else data.first_tokens.inputs
        begin_alike = data.windows.begin > 0
        designed = design(candidate.layer, windows, data.cost.metric, alone, begin_alike=begin_alike)
        layer = designed.coded(token_bytes)
    yield Candidate.of("code", layer, data)


def refitted(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with its output projection refitted on the training windows, with each of `RIDGES`."""
    data, state = candidate.on_text, candidate.layer.state
    refit = OutputRefit(state["o_proj.weight"], state.get("o_proj.bias"))

    def weighed(window: int) -> WeighedTokens:
        return refit.weighed(candidate.mixed(window), data.wanted.read(window), data.cost)

    for tokens in map_in_threads(weighed, my_windows(data.windows.train)):
        refit.add(tokens)
    if data.first_tokens is not None and process_index() == 0:
        beside = data.windows.train * data.windows.width
        refit.add(data.first_tokens.weighed(refit, candidate.layer, beside))
    all_sum(refit.moments)
    all_sum(refit.error)
    for ridge in RIDGES:
        yield candidate.projecting(refit.solve(ridge))
