"""The softmax of random scores, with and without the division by the root of the width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from docs.drawings.plots import BLUE, INK, ORANGE, as_svg, figure, log_ticks, rounded, styled
from torch import Tensor

from headwise import attend_with_weights

WIDTHS = tuple(2**power for power in range(11))
"""Of queries and keys, from 1 to 1,024."""
BATCH, QUERIES, KEYS = 32, 8, 64


@dataclass(frozen=True)
class Softmax:
    """The weights of random queries over random keys, all of whose numbers have variance 1.

    Attributes:
        width: d.
        entropy: the mean of the weights' entropy, in nats.
        gradient: the median of the Frobenius norm of the derivative of the weights by the scores.
    """

    width: int
    entropy: float
    gradient: float


def measure(width: int, *, scaled: bool) -> Softmax:
    """The weights at one width, divided by its root or not."""
    random = np.random.default_rng(width)
    query, key = (torch.from_numpy(random.standard_normal((BATCH, 1, tokens, width))) for tokens in (QUERIES, KEYS))
    _, weights = attend_with_weights(query, key, key, scale=None if scaled else 1.0)
    return Softmax(width, float(entropy(weights).mean()), float(gradient_norm(weights).median()))


def entropy(weights: Tensor) -> Tensor:
    """``−Σ p ln p`` of weights ``[…, T]``."""
    return -torch.special.xlogy(weights, weights).sum(-1)


def gradient_norm(weights: Tensor) -> Tensor:
    """The Frobenius norm of ``diag(p) − p pᵀ``, the derivative of weights ``[…, T]`` by their scores."""
    square, cube = weights.square().sum(-1), weights.pow(3).sum(-1)
    return (square - 2 * cube + square.square()).clamp_min(0).sqrt()


def draw() -> dict[str, str]:
    """Entropy and gradient against the width."""
    with styled():
        made, (upper, lower) = figure(4.6, rows=2)
        for scaled, colour, label in ((True, BLUE, "divided by √d"), (False, ORANGE, "not divided")):
            points = [measure(width, scaled=scaled) for width in WIDTHS]
            upper.plot(WIDTHS, rounded(point.entropy for point in points), "o-", color=colour, label=label)
            lower.plot(WIDTHS, rounded(point.gradient for point in points), "o-", color=colour, label=label)
        upper.axhline(float(np.log(KEYS)), color=INK, linestyle=":", linewidth=1)
        upper.text(1024, float(np.log(KEYS)) + 0.08, f"uniform: ln {KEYS}", ha="right", va="bottom")
        upper.set_ylabel("entropy, nats")
        upper.set_ylim(0, 5)
        lower.set_ylabel("norm of the gradient")
        log_ticks(lower, "y", [1e-4, 1e-3, 1e-2, 1e-1, 1])
        for axes in (upper, lower):
            log_ticks(axes, "x", WIDTHS[::2], base=2)
        lower.set_xlabel("d, width of queries and keys")
        lower.legend(loc="lower left")
        return {"scaling.svg": as_svg(made)}
