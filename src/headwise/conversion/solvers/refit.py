"""Adjust a converted layer's own matrices to lower its error: by a short local descent, then in closed form.

Shapes: S tokens, H·V inputs of the output projection, E hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from headwise.base.threads import WORKERS, workers
from headwise.conversion.solvers.joint_latent import NOTHING

Drawn = TypeVar("Drawn")

RIDGES = (0.1, 0.3, 1.0)
"""The ridge penalties of a refit on its distance from the start that are tried, as shares of the inputs' mean square:
the less a refit has left to gain, the larger the one that suits it."""

RATE = 4e-3
"""The peak learning rate of the descent, as a share of a tensor's root mean square."""

OUTLIER = 10.0
"""The limit of one token's cost, as a multiple of the median. A few tokens that attention rests on have states a
thousand times as large as the others', and would otherwise decide a least squares fit alone."""


@dataclass(frozen=True)
class Cost:
    """The cost of an error of a layer's output, in nats.

    Attributes:
        metric: a factor L of the sensitivity L Lᵀ, ``[E, E]``.
        limit: the cost in nats that one token's error approaches as it grows.
    """

    metric: Tensor
    limit: float = math.inf

    def __call__(self, error: Tensor) -> Tensor:
        """The levelled cost of each token, ``[S]``: ``e / (1 + e/limit)``, e = ``½ δᵀ G δ``, of errors ``[S, E]``."""
        return self.levelled(self.plain(error))

    def levelled(self, nats: Tensor) -> Tensor:
        """The `plain` costs, levelled off at the limit."""
        return nats / (1 + nats / self.limit)

    def weight(self, error: Tensor) -> Tensor:
        """The derivative of each token's levelled cost by its `plain` cost, ``[S]``."""
        return (1 + self.plain(error) / self.limit) ** -2

    def plain(self, error: Tensor) -> Tensor:
        """The cost of each token without the limit, ``[S]``; float32 even where the product is not, for gradients."""
        return 0.5 * (error @ self.metric).float().square().sum(-1)

    def limited(self, nats: Tensor) -> Cost:
        """The cost with a limit of `OUTLIER` times the median of `plain` costs ``[S]``."""
        return Cost(self.metric, max(OUTLIER * float(nats.median()), torch.finfo(torch.float32).tiny))


class WeighedTokens(NamedTuple):
    """Tokens of a refit.

    Attributes:
        inputs: the inputs of the output projection, ``[S, H·V]``, or with a bias one column more, which is 1.
        weighted: the same inputs, each token's times its weight.
        error: the error of the output at the start, ``[S, E]``.
    """

    inputs: Tensor
    weighted: Tensor
    error: Tensor


class OutputRefit:
    """Ridge regression of the wanted output on the heads' mixed values, starting from a given projection.

    Args:
        weight: the projection, ``[E, H·V]``.
        bias: the bias ``[E]``, which is refitted too, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.start = weight.double() if bias is None else torch.cat((weight, bias[:, None]), 1).double()
        width = self.start.shape[1]
        self.has_bias = bias is not None
        self.moments = torch.zeros(width, width, dtype=torch.float64)
        self.error = torch.zeros_like(self.start)

    def weighed(self, mixed: Tensor, wanted: Tensor, cost: Cost) -> WeighedTokens:
        """Weigh tokens by the cost of their error at the start; this may be done side by side.

        Args:
            mixed: the inputs of the output projection, ``[S, H·V]``.
            wanted: the outputs that it should have, ``[S, E]``.
            cost: the cost of an error of the output.
        """
        inputs = torch.cat((mixed, mixed.new_ones(len(mixed), 1)), dim=1) if self.has_bias else mixed
        error = wanted - inputs @ self.start.float().mT  # [S, E]
        return WeighedTokens(inputs, inputs * cost.weight(error)[:, None], error)

    def add(self, tokens: WeighedTokens) -> None:
        """Add the tokens of a window to the sums that `solve` reads."""
        # Products of a window are float32, whose rounding is far below the ridge; their sums are float64.
        self.moments += tokens.weighted.mT @ tokens.inputs
        self.error += tokens.error.mT @ tokens.weighted

    def solve(self, ridge: float = RIDGES[0]) -> dict[str, Tensor]:
        """The refitted ``o_proj``, float64; see `RIDGES`."""
        size = self.moments.diagonal().mean().clamp_min(NOTHING)
        penalty = ridge * size * torch.eye(len(self.moments), dtype=torch.float64)
        weight = self.start + torch.linalg.solve(self.moments + penalty, self.error.mT).mT
        if not self.has_bias:
            return {"o_proj.weight": weight}
        return {"o_proj.weight": weight[:, :-1].contiguous(), "o_proj.bias": weight[:, -1].contiguous()}


def refine(
    state: Mapping[str, Tensor],
    cost: Callable[[Mapping[str, Tensor], Drawn], Tensor],
    sample: Callable[[], Drawn],
    *,
    steps: int,
) -> dict[str, Tensor]:
    """Lower the layer's own error by gradient descent on all its matrices: Adam, its rate falling linearly to 0.

    The gradients of `WORKERS` steps are taken at one point, side by side, and then stepped along one after another: a
    step for each core keeps two cores busier than operations that are divided between them.

    Args:
        state: the converted layer's tensors.
        cost: the cost of the layer's errors on a sample, a function of its tensors and the sample.
        sample: the function that draws the sample of a step.
        steps: the number of steps.

    Returns:
        The tensors after the last step, float32.
    """
    tensors = {name: tensor.detach().float().clone().requires_grad_() for name, tensor in state.items()}
    # A step of Adam has the size of its rate, whatever the gradient: rates follow the size of each tensor's numbers.
    groups = [
        {"params": [tensor], "lr": RATE * float(tensor.detach().square().mean().sqrt())}
        for tensor in tensors.values()
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.8, 0.9), fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    warmup = max(steps // 10, 1)

    def gradient(batch: Drawn) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(cost(tensors, batch), [*tensors.values()], allow_unused=True)

    with workers() as threads:
        for first in range(0, steps, WORKERS):
            together = range(first, min(first + WORKERS, steps))
            # Samples are drawn in this thread, in order, so that every run draws the same ones.
            gradients = [*threads.map(gradient, (sample() for _ in together))]
            for step, own in zip(together, gradients, strict=True):
                factor = min((step + 1) / warmup, 1.0) * (1 - step / steps)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * factor
                for tensor, slope in zip(tensors.values(), own, strict=True):
                    tensor.grad = slope
                optimizer.step()
    return {name: tensor.detach() for name, tensor in tensors.items()}
