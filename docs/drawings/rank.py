"""The error of a latent against its rank: what the truncation knows of inputs and of the cost of errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from docs.drawings.plots import BLUE, GREEN, ORANGE, as_svg, figure, log_ticks, rounded, styled
from torch import Tensor

from headwise.conversion.solvers.joint_latent import Part, joint_latent
from headwise.conversion.solvers.statistics import cost_without

INPUTS, KEYS, VALUES = 128, 64, 64
"""The width of the layer's inputs, and the rows of its keys and of its values."""
RANKS = (4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 120)
DECAY = 1.0
"""Inputs, and costs of errors, have variances i^(−DECAY) in a random basis."""


@dataclass(frozen=True)
class Errors:
    """The cost of the errors of keys and values at one rank, as a share of what losing all of them costs.

    Attributes:
        rank: of the latent.
        weights: of a truncated SVD of the weights.
        inputs: of one that knows the inputs' second moments.
        both: of one that knows the costs of errors besides.
    """

    rank: int
    weights: float
    inputs: float
    both: float


def parts(seed: int = 0) -> tuple[Part, Part]:
    """Random keys and values of one layer."""
    random = np.random.default_rng(seed)
    moments = _spectrum(INPUTS, random)
    key, value = (
        Part(torch.from_numpy(random.standard_normal((rows, INPUTS))), _spectrum(rows, random), moments)
        for rows in (KEYS, VALUES)
    )
    return key, value


def _spectrum(size: int, random: np.random.Generator) -> Tensor:
    """A random positive matrix whose eigenvalues fall as a power."""
    basis = torch.linalg.qr(torch.from_numpy(random.standard_normal((size, size)))).Q
    values = torch.arange(1, size + 1, dtype=torch.float64) ** -DECAY
    return (basis * values) @ basis.mT


def cost(exact: tuple[Part, Part], down: Tensor, ups: list[Tensor]) -> float:
    """The share of the cost that is left: ``tr(M (W − U A) S (W − U A)ᵀ)`` over that without a latent."""
    wrong = sum(cost_without(part._replace(rows=part.rows - up @ down)) for part, up in zip(exact, ups, strict=True))
    return wrong / sum(cost_without(part) for part in exact)


def measure(rank: int) -> Errors:
    """The errors of three truncations at one rank."""
    exact = parts()
    plain = [torch.eye(len(part.rows), dtype=torch.float64) for part in exact]
    white = torch.eye(INPUTS, dtype=torch.float64)
    known = (
        [Part(part.rows, metric, white) for part, metric in zip(exact, plain, strict=True)],
        [Part(part.rows, metric, part.moments) for part, metric in zip(exact, plain, strict=True)],
        list(exact),
    )
    return Errors(rank, *(cost(exact, *joint_latent(each, rank)) for each in known))


def draw() -> dict[str, str]:
    """The errors by rank."""
    points = [measure(rank) for rank in RANKS]
    with styled():
        made, (axes,) = figure(3.3)
        for name, colour, style, label in (
            ("weights", ORANGE, "D-", "weights"),
            ("inputs", GREEN, "s-", "weights and inputs"),
            ("both", BLUE, "o-", "weights, inputs and costs"),
        ):
            axes.plot(RANKS, rounded(getattr(point, name) for point in points), style, color=colour, label=label)
        log_ticks(axes, "y", [1e-4, 0.001, 0.01, 0.1, 1])
        axes.set_xticks(range(0, 129, 32))
        axes.set_xlabel(f"rank of the latent, of {KEYS + VALUES}")
        axes.set_ylabel("cost of the error, relative")
        axes.legend(loc="lower left")
        return {"rank.svg": as_svg(made)}
