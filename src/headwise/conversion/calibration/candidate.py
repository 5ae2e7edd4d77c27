"""A layer that might replace the source's, run on the windows of a text, and its descent on them.

Shapes: W tokens of a window, S sampled tokens, H·V inputs of the output projection, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import Cost, Sample, refine
from headwise.conversion.storage.activations import Spill

QUERIES = 256
"""Of a window, drawn anew for each step of the descent."""


@dataclass(frozen=True)
class Candidate:
    """A layer that is run once on each window that is asked for.

    Attributes:
        layer: the layer.
        run: gives the inputs of its output projection on a window, ``[W, H·V]``, by the window's number.
        spill: where those are kept.
        kept: the windows whose are.
    """

    layer: Layer
    run: Callable[[int], Tensor]
    spill: Spill
    kept: set[int] = field(default_factory=set)

    def mixed(self, window: int) -> Tensor:
        """The inputs of its output projection, ``[W, H·V]``."""
        if window in self.kept:
            return self.spill.read(window)
        mixed = self.run(window)
        self.spill.write(window, mixed)
        self.kept.add(window)
        return mixed

    def output(self, window: int) -> Tensor:
        """The layer's output, ``[W, E]``."""
        return self.layer.projected(self.mixed(window))


@dataclass(frozen=True)
class TrainingWindows:
    """What goes into a layer on the windows it is trained on, and what should come out.

    Attributes:
        inputs: of every window.
        wanted: the outputs.
        count: how many of the windows are trained on.
        tokens: in each.
    """

    inputs: Spill
    wanted: Spill
    count: int
    tokens: int


def descend(layer: Layer, windows: TrainingWindows, rotation: Rotation | None, cost: Cost, *, steps: int) -> Layer:
    """A layer after a descent on its own error by all its matrices; see `refine`.

    Args:
        layer: float32.
        windows: to train on.
        rotation: of a window's positions.
        cost: of an error of the output.
        steps: how many.
    """
    generator = torch.Generator().manual_seed(0)
    order: list[int] = []

    def sample() -> Sample:
        if not order:
            order.extend(torch.randperm(windows.count, generator=generator).tolist())
        window = order.pop()
        rows = torch.randperm(windows.tokens, generator=generator)[:QUERIES].sort()[0]
        return Sample(windows.inputs.read(window), windows.wanted.read(window)[rows], rows)

    def output(state: Mapping[str, Tensor], drawn: Sample) -> Tensor:
        return replace(layer, state=state).output(drawn.inputs, rotation, drawn.rows)

    return replace(layer, state=refine(layer.state, output, sample, cost, steps=steps))
