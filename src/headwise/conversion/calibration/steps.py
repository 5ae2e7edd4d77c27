"""The steps between a layer's solution and what is written: a descent, the code of its cache, a refit.

Each makes other candidates out of one; `headwise.conversion.calibration.candidates.select` chooses between them.

Shapes: W tokens in each window, S sampled tokens, H·V inputs of the output projection, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headwise.base.processes import all_sum, my_windows, process_index
from headwise.base.threads import map_in_threads
from headwise.conversion.calibration.candidates import Candidate, LayerData
from headwise.conversion.calibration.windows import DRAWN, SHARE, CalibrationWindows, FirstTokens
from headwise.conversion.codes import design
from headwise.conversion.solvers.device import CPU, quick_products, to_device
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.refit import RIDGES, OutputRefit, WeighedTokens, refine

QUERIES = 256
"""The number of queries of a window that each step of the descent draws at random."""

STEPS = 5
"""The number of steps that a layer's descent takes on every `STRETCH` tokens of the training windows."""

SHORT_STEPS = 7
"""The number of steps on every window of fewer than `STRETCH` tokens."""

STRETCH = 512
"""The number of tokens from which a window counts by its tokens."""

CODE_WINDOWS = 32
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
        layer = design(candidate.layer, windows, data.cost.metric).coded(token_bytes)
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
        yield candidate.projecting("refit", refit.solve(ridge))
