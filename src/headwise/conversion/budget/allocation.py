"""Allocate one total of cached values to layers: a size for each, such that the sum of their losses is least.

A layer's size is counted in steps from its share of the even allocation. Steps are equally large for all layers, so
that an allocation whose steps sum to 0 spends exactly as much as the even one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from headwise.errors import ArgumentError

STEP = 8
"""The cached values a token of one step; 2 where the even share of some layer is below `COARSE`."""

COARSE = 48
"""The least even share, in values a token, for steps of `STEP` values."""


class Node(NamedTuple):
    """The loss of a layer at one size.

    Attributes:
        rank: the width R of the latent.
        rotary: the width P of the rotary key.
        loss: the loss in nats a token.
        token_bytes: bytes of a token's codes; None for a cache without codes.
    """

    rank: int
    rotary: int
    loss: float
    token_bytes: int | None = None

    @property
    def values(self) -> int:
        """The cached values a token."""
        return self.rank + self.rotary


class Choice(NamedTuple):
    """A size that a layer may have, and its distance from the even size in steps."""

    steps: int
    node: Node


def step_of(shares: Sequence[int]) -> int:
    """The step, in values a token, of layers with these even shares."""
    return STEP if min(shares) >= COARSE else 2


def curve(nodes: Sequence[Node], share: int, step: int) -> list[Choice]:
    """The best size for each number of values within the measured range, from the smallest up.

    Between measured sizes the loss is interpolated exponentially, first in the rank and then in the rotary width. At
    one rotary width it is made not to rise with the rank.

    Args:
        nodes: the measured sizes: one has the even share, and every rotary width has the smallest and the largest
            of all ranks.
        share: the layer's even share, in cached values a token.
        step: `step_of` the even shares of all layers.
    """
    lines = {
        rotary: _falling(sorted(node for node in nodes if node.rotary == rotary))
        for rotary in sorted({node.rotary for node in nodes})
    }
    smallest, largest = min(node.rank for node in nodes), max(node.rank for node in nodes)
    best: dict[int, Node] = {}
    for rotary in sorted({*lines, *range(min(lines), max(lines) + 1, step)}):
        for rank in range(smallest, largest + 1):
            steps, remainder = divmod(rank + rotary - share, step)
            if remainder:
                continue
            node = Node(rank, rotary, _loss_at(lines, rank, rotary))
            if steps not in best or node.loss < best[steps].loss:
                best[steps] = node
    return [Choice(steps, best[steps]) for steps in sorted(best)]


REFINED, HALF = 0.6, 0.5
"""The part of a smaller rank's loss that is left when a layer has been refined that keeps `HALF` of its values or
fewer: 0.5 to 0.65 at ten sizes of two layers. What rounding loses hardly changes."""

DESCENDED = 5 / 6
"""The largest part of its values that a layer keeps where a descent is worth its time. Where all
of them are kept, held-out windows never chose a descent."""


def left_by_descent(kept: float) -> float:
    """The part of a smaller rank's loss that is left by a descent, where a layer keeps a part of its values.

    Between `HALF` and `DESCENDED` the gain falls to nothing: ``left_by_descent(0.9)`` is 1.0.
    """
    return REFINED + (1 - REFINED) * min(max((kept - HALF) / (DESCENDED - HALF), 0.0), 1.0)


def coded_curve(
    nodes: Sequence[Node], rounding: Sequence[tuple[float, float]], values: int, share: int, step: int
) -> list[Choice]:
    """The best size and number of bits for each number of bytes a token, from the smallest up.

    The loss is that of the size and that of the rounding in sum. The rounding's depends on the bits of a value alone.

    Args:
        nodes: the measured sizes with their losses, without codes; every rotary width has a smallest and a largest
            rank.
        rounding: pairs of a number of bits a value, rising, and the loss of rounding at it in nats a token.
        values: the number of values of a token that the source's layer caches.
        share: the layer's even share, in bytes a token of codes.
        step: the size of a step, in bytes a token.
    """
    # Sizes between the measured ones: rotary widths in steps of 16, ranks in steps of 8.
    sizes: dict[tuple[int, int], float] = {}
    lines = {width: _falling(sorted(n for n in nodes if n.rotary == width)) for width in {n.rotary for n in nodes}}
    widths = sorted(lines)
    for rotary in sorted({*widths, *range(widths[0], widths[-1] + 1, 16)}):
        below, above = max(w for w in widths if w <= rotary), min(w for w in widths if w >= rotary)
        low = max(lines[w][0].rank for w in (below, above))
        high = min(lines[w][-1].rank for w in (below, above))
        for rank in sorted({*range(low, high + 1, 8), high}):
            sizes[rank, rotary] = left_by_descent((rank + rotary) / values) * _loss_at(lines, rank, rotary)
    bits, logs = [b for b, _ in rounding], [math.log(loss) for _, loss in rounding]
    best: dict[int, Node] = {}
    for (rank, rotary), loss in sizes.items():
        count = rank + rotary
        for steps in range(-(share * 3 // 4) // step, 2 * share // step):
            token_bytes = share + steps * step
            average = 8 * (token_bytes - 1) / count
            if not bits[0] <= average <= 8:
                continue
            place = min(max(bisect.bisect_right(bits, average), 1), len(bits) - 1)
            part = (average - bits[place - 1]) / (bits[place] - bits[place - 1])
            total = loss + math.exp((1 - part) * logs[place - 1] + part * logs[place])
            if steps not in best or total < best[steps].loss:
                best[steps] = Node(rank, rotary, total, token_bytes)
    return [Choice(steps, best[steps]) for steps in sorted(best)]


def allocate(curves: Sequence[Sequence[Choice]]) -> list[Node]:
    """Choose one size for each layer such that steps sum to 0 and the sum of losses is least.

    The optimum is exact, by dynamic programming over the sum of steps. Among allocations with equal losses the last
    layer gets the first of its possible choices, then the layer before it, and so on.

    Args:
        curves: the choices of each layer, as `curve` or `coded_curve` lists them.

    Raises:
        ArgumentError: a layer has no choices, or no choice of sizes has steps that sum to 0.
    """
    if not all(curves):
        raise ArgumentError("sizes", len(curves), "must have at least one choice each")
    # Steps are counted from each layer's smallest choice, so that sums are indices from 0 to ``total``.
    lowest = [min(choice.steps for choice in choices) for choices in curves]
    total = -sum(lowest)
    loss = torch.full((total + 1,), math.inf, dtype=torch.float64) if total >= 0 else torch.empty(0)
    if total >= 0:
        loss[0] = 0.0
    layer_numbers = []
    for low, choices in zip(lowest, curves, strict=True):
        best = torch.full_like(loss, math.inf)
        numbers = torch.zeros(len(loss), dtype=torch.long)
        for number, choice in enumerate(choices):
            offset = choice.steps - low
            if offset >= len(loss):
                continue
            losses = loss[: len(loss) - offset] + choice.node.loss
            is_better = losses < best[offset:]
            best[offset:][is_better] = losses[is_better]
            numbers[offset:][is_better] = number
        loss = best
        layer_numbers.append(numbers)
    if total < 0 or not math.isfinite(float(loss[total])):
        raise ArgumentError("sizes", len(curves), "must have one choice each whose steps sum to 0")
    nodes: list[Node] = []
    remaining = total
    for low, choices, numbers in zip(reversed(lowest), reversed(curves), reversed(layer_numbers), strict=True):
        choice = choices[int(numbers[remaining])]
        nodes.append(choice.node)
        remaining -= choice.steps - low
    return nodes[::-1]


LEAST_PART = 0.1
"""The least part of its neighbour's loss that a size is taken to lose where sizes between them are estimated. An
exponential through zero would have every size beside a lossless one lose nothing."""


def _falling(nodes: Sequence[Node]) -> list[Node]:
    """Sizes of one rotary width with losses that never rise: a larger latent need not be used in full."""
    least_losses = itertools.accumulate((node.loss for node in nodes), min)
    return [node._replace(loss=loss) for node, loss in zip(nodes, least_losses, strict=True)]


def _loss_at(lines: Mapping[int, Sequence[Node]], rank: int, rotary: int) -> float:
    """The loss at any size: interpolated in the rank at both neighbouring rotary widths, then between these."""
    below = max(width for width in lines if width <= rotary)
    above = min(width for width in lines if width >= rotary)
    losses = []
    for width in (below, above):
        low = max(node for node in lines[width] if node.rank <= rank)
        high = min(node for node in lines[width] if node.rank >= rank)
        losses.append(_interpolate(low.rank, low.loss, high.rank, high.loss, rank))
    return _interpolate(below, losses[0], above, losses[1], rotary)


def _interpolate(low: int, at_low: float, high: int, at_high: float, position: int) -> float:
    """The value at a position between ``low`` and ``high``, interpolated exponentially. Neither end counts as less
    than `LEAST_PART` of the other: towards a size that loses nothing, losses fall more like a parabola.
    """
    most = max(at_low, at_high)
    if position in (low, high) or most <= 0:
        return at_high if position == high else at_low
    part = (position - low) / (high - low)
    logs = [math.log(max(value, LEAST_PART * most)) for value in (at_low, at_high)]
    return math.exp((1 - part) * logs[0] + part * logs[1])
