"""Choose between a layer's solution and what further steps make of it, by their errors on held-out windows.

`LayerData` is the layer that is being converted, on the windows of a text. A `Candidate` is a layer that may be
chosen for it. `select` takes the steps in their order, and goes on with the better candidate each time.

Shapes: N windows, W tokens in each, H·V inputs of the output projection, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.base.threads import map_in_threads
from headwise.conversion.calibration.windows import CalibrationWindows, FirstTokens
from headwise.conversion.solvers.device import Stopwatch
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import Cost
from headwise.conversion.storage import Spill
from headwise.models.specs import GroupedSpec

ALWAYS_TAKEN = ("code", "norm")
"""The steps whose result is taken whatever it loses, because the folder needs it."""


@dataclass(frozen=True, kw_only=True, eq=False)
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

    def projecting(self, step: str, tensors: Mapping[str, Tensor]) -> Candidate:
        """The layer with another output projection: the inputs of the projection stay, and are not computed again."""
        state = {**self.layer.state, **{name: tensor.float() for name, tensor in tensors.items()}}
        return replace(self, step=step, layer=replace(self.layer, state=state))

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
