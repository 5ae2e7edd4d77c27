"""A candidate for a converted layer, run on the windows of a text, and its descent on them.

Shapes: W tokens of a window, S sampled tokens, H·V inputs of the output projection, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.conversion.calibration.starts import DRAWN, SHARE, Starts
from headwise.conversion.solvers.device import CPU, moved, quick_products
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import Cost, refine
from headwise.conversion.storage.activations import Spill

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
        rows = moved(start + drawn.sort()[0])
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
