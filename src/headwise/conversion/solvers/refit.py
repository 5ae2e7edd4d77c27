"""Let a converted layer's own matrices make up for what it lost: by a short local descent, then in closed form.

Shapes: S sampled tokens of one window, H·V inputs of the output projection, E hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.conversion.solvers.bfloat16 import quick_products
from headwise.conversion.solvers.joint_latent import NOTHING

RIDGE = 0.1
"""Of the mean square of the inputs: how strongly a refit holds on to what it starts from."""

RATE = 3e-3
"""Of a tensor's own mean size: how far one step of the descent goes at most."""

OUTLIER = 10.0
"""Times the median: what an error costs at most. Tokens that others only rest on, with states a thousand times as
large, would otherwise decide everything, and a least squares fit would serve nobody else."""


@dataclass(frozen=True)
class Cost:
    """What an error of a layer's output costs, in nats.

    Attributes:
        metric: ``[E, E]``, the root of the sensitivity.
        limit: what one token's error costs at most.
    """

    metric: Tensor
    limit: float = math.inf

    def __call__(self, error: Tensor) -> Tensor:
        """``e / (1 + e/limit)`` of each token, ``[S]``, e being ``½ δᵀ G δ``; ``error`` is ``[S, E]``."""
        return self.levelled(self.plain(error))

    def levelled(self, nats: Tensor) -> Tensor:
        """What `plain` costs come to with the limit."""
        return nats / (1 + nats / self.limit)

    def weight(self, error: Tensor) -> Tensor:
        """How much the cost of each token grows with e, ``[S]``."""
        return (1 + self.plain(error) / self.limit) ** -2

    def plain(self, error: Tensor) -> Tensor:
        """Without the limit; float32 even where the product is not, for gradients."""
        return 0.5 * (error @ self.metric).float().square().sum(-1)

    def limited(self, nats: Tensor) -> Cost:
        """With the limit that `plain` costs ``[S]`` lead to."""
        return Cost(self.metric, max(OUTLIER * float(nats.median()), torch.finfo(torch.float32).tiny))


@dataclass(frozen=True)
class Sample:
    """A step of the descent: a window, and some of its tokens.

    Attributes:
        inputs: ``[T, E]``, what goes into the attention.
        wanted: ``[S, E]``, what should come out at ``rows``.
        rows: ``[S]`` positions.
    """

    inputs: Tensor
    wanted: Tensor
    rows: Tensor


class OutputRefit:
    """Ridge regression of the wanted output on the heads' mixed values, from the projection there is.

    Args:
        weight: ``[E, H·V]``.
        bias: ``[E]`` or None; with one, it is refitted too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.start = weight.double() if bias is None else torch.cat((weight, bias[:, None]), 1).double()
        width = self.start.shape[1]
        self.has_bias = bias is not None
        self.moments = torch.zeros(width, width, dtype=torch.float64)
        self.error = torch.zeros_like(self.start)

    def add(self, mixed: Tensor, wanted: Tensor, cost: Cost) -> None:
        """Add tokens, ``[S, H·V]`` and ``[S, E]``, weighted by what their error now costs."""
        seen = torch.cat((mixed, mixed.new_ones(len(mixed), 1)), dim=1) if self.has_bias else mixed
        error = wanted - seen @ self.start.float().mT
        weighted = seen * cost.weight(error)[:, None]
        # A window's products in float32, which the ridge is far above; their sums in float64.
        self.moments += weighted.mT @ seen
        self.error += error.mT @ weighted

    def solve(self, ridge: float = RIDGE) -> dict[str, Tensor]:
        """The new ``o_proj``, float64."""
        size = self.moments.diagonal().mean().clamp_min(NOTHING)
        penalty = ridge * size * torch.eye(len(self.moments), dtype=torch.float64)
        found = self.start + torch.linalg.solve(self.moments + penalty, self.error.mT).mT
        if not self.has_bias:
            return {"o_proj.weight": found}
        return {"o_proj.weight": found[:, :-1].contiguous(), "o_proj.bias": found[:, -1].contiguous()}


def refine(
    state: Mapping[str, Tensor],
    output: Callable[[Mapping[str, Tensor], Sample], Tensor],
    sample: Callable[[], Sample],
    cost: Cost,
    *,
    steps: int,
) -> dict[str, Tensor]:
    """Descend on the layer's own error by all its matrices, with Adam, its rate falling to 0.

    Args:
        state: the converted layer's tensors.
        output: the layer, a function of its tensors and a sample.
        sample: gives a step's, over whose tokens the cost is averaged.
        cost: of an error.
        steps: how many.

    Returns:
        The tensors after the last step, float32.
    """
    moved = {name: tensor.detach().float().clone().requires_grad_() for name, tensor in state.items()}
    groups = [
        {"params": [tensor], "lr": RATE * float(tensor.detach().square().mean().sqrt())} for tensor in moved.values()
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    warmup = max(steps // 10, 1)
    for step in range(steps):
        share = min((step + 1) / warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        drawn = sample()
        with torch.enable_grad():
            with quick_products():
                nats = cost(output(moved, drawn).float() - drawn.wanted)
            nats.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in moved.items()}
