"""Spend one total over layers: a size for each, such that what they lose together is least.

Sizes are counted in steps, as large for every layer, from the layer's share of an even plan, so that a plan whose
steps sum to 0 spends exactly what the even one does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from headwise.errors import ArgumentError

STEP = 8
"""Cached values a token that sizes differ by; 2 where some layer has fewer than `COARSE`."""

COARSE = 48


class Node(NamedTuple):
    """What a layer loses at one size.

    Attributes:
        rank: of its latent, R.
        rotary: width of its rotary key, P.
        loss: nats a token.
    """

    rank: int
    rotary: int
    loss: float

    @property
    def values(self) -> int:
        """Cached a token."""
        return self.rank + self.rotary


class Choice(NamedTuple):
    """A size that a layer may have, and its steps from the even one."""

    steps: int
    node: Node


def step_of(shares: Sequence[int]) -> int:
    """What the sizes of layers differ by whose even shares are these, in values."""
    return STEP if min(shares) >= COARSE else 2


def curve(nodes: Sequence[Node], share: int, step: int) -> list[Choice]:
    """The best size of every number of values that measured ones allow, from the smallest up.

    Between two of them the loss is taken to be exponential, first in the rank and then in the rotary width; of one
    width it is not let rise with the rank.

    Args:
        nodes: what was measured, one of them of the even share; of each rotary width, the smallest and the largest
            of all ranks among them.
        share: that share, in values.
        step: `step_of` the shares of all layers.
    """
    lines = {
        rotary: _falling(sorted(node for node in nodes if node.rotary == rotary))
        for rotary in sorted({node.rotary for node in nodes})
    }
    smallest, largest = min(node.rank for node in nodes), max(node.rank for node in nodes)
    best: dict[int, Node] = {}
    for rotary in sorted({*lines, *range(min(lines), max(lines) + 1, step)}):
        for rank in range(smallest, largest + 1):
            steps, rest = divmod(rank + rotary - share, step)
            if rest:
                continue
            found = Node(rank, rotary, _at(lines, rank, rotary))
            if steps not in best or found.loss < best[steps].loss:
                best[steps] = found
    return [Choice(steps, best[steps]) for steps in sorted(best)]


def allocate(curves: Sequence[Sequence[Choice]]) -> list[Node]:
    """One size a layer, the steps' sum being 0 and the losses' least: exact, by dynamic programming over the sum.

    Where several plans lose the same, the last layer keeps the size that stands first, then the one before it, and so
    on.

    Raises:
        ArgumentError: no choice of sizes has steps that sum to 0.
    """
    lowest = [min(choice.steps for choice in choices) for choices in curves]
    wanted = -sum(lowest)
    loss = torch.full((wanted + 1,), math.inf, dtype=torch.float64) if wanted >= 0 else torch.empty(0)
    if wanted >= 0:
        loss[0] = 0.0
    taken = []
    for low, choices in zip(lowest, curves, strict=True):
        best = torch.full_like(loss, math.inf)
        which = torch.zeros(len(loss), dtype=torch.long)
        for number, choice in enumerate(choices):
            at = choice.steps - low
            if at >= len(loss):
                continue
            through = loss[: len(loss) - at] + choice.node.loss
            better = through < best[at:]
            best[at:][better] = through[better]
            which[at:][better] = number
        loss = best
        taken.append(which)
    if wanted < 0 or not math.isfinite(float(loss[wanted])):
        raise ArgumentError("sizes", len(curves), "must have one choice each whose steps sum to 0")
    plan: list[Node] = []
    left = wanted
    for low, choices, which in zip(reversed(lowest), reversed(curves), reversed(taken), strict=True):
        choice = choices[int(which[left])]
        plan.append(choice.node)
        left -= choice.steps - low
    return plan[::-1]


def _falling(nodes: Sequence[Node]) -> list[Node]:
    """With losses that never rise: more can always be left unused."""
    least = itertools.accumulate((node.loss for node in nodes), min)
    return [node._replace(loss=loss) for node, loss in zip(nodes, least, strict=True)]


def _at(lines: Mapping[int, Sequence[Node]], rank: int, rotary: int) -> float:
    """The loss at a size between those measured: by each rotary width beside it, and then between the two."""
    below = max(width for width in lines if width <= rotary)
    above = min(width for width in lines if width >= rotary)
    losses = []
    for width in (below, above):
        low = max(node for node in lines[width] if node.rank <= rank)
        high = min(node for node in lines[width] if node.rank >= rank)
        losses.append(_between(low.rank, low.loss, high.rank, high.loss, rank))
    return _between(below, losses[0], above, losses[1], rotary)


def _between(low: int, at_low: float, high: int, at_high: float, at: int) -> float:
    if high == low or at_high == at_low:
        return at_low
    part = (at - low) / (high - low)
    if at_low <= 0 or at_high <= 0:
        return (1 - part) * at_low + part * at_high
    return math.exp((1 - part) * math.log(at_low) + part * math.log(at_high))
