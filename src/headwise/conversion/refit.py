"""Let a converted layer's own matrices make up for what it lost: in closed form, then by a short local descent.

Shapes: S sampled tokens of one window, H·V inputs of the output projection, E hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-2
"""Of the mean square of the inputs: how strongly a refit holds on to what it starts from."""


RATE = 2e-3
"""Of a tensor's own mean size: how far one step of the descent goes at most."""


@dataclass(frozen=True)
class Sample:
    """One window's part in a refit.

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

    def add(self, mixed: Tensor, wanted: Tensor) -> None:
        """Add tokens: ``[S, H·V]`` and ``[S, E]``."""
        seen = mixed.double()
        if self.has_bias:
            seen = torch.cat((seen, seen.new_ones(len(seen), 1)), dim=1)
        self.moments.addmm_(seen.mT, seen)
        self.error.addmm_((wanted.double() - seen @ self.start.mT).mT, seen)

    def solve(self, ridge: float = RIDGE) -> dict[str, Tensor]:
        """The new ``o_proj``, float64."""
        penalty = ridge * self.moments.diagonal().mean() * torch.eye(len(self.moments), dtype=torch.float64)
        found = self.start + torch.linalg.solve(self.moments + penalty, self.error.mT).mT
        if not self.has_bias:
            return {"o_proj.weight": found}
        return {"o_proj.weight": found[:, :-1].contiguous(), "o_proj.bias": found[:, -1].contiguous()}


def refine(
    state: Mapping[str, Tensor],
    output: Callable[[Mapping[str, Tensor], Sample], Tensor],
    samples: Callable[[], Iterator[Sample]],
    metric: Tensor,
    *,
    steps: int,
    rate: float = RATE,
) -> dict[str, Tensor]:
    """Descend on the layer's own error by all its matrices, with Adam, its rate falling to 0.

    Args:
        state: the converted layer's tensors.
        output: the layer, a function of its tensors and a sample.
        samples: the samples of each step, whose errors are averaged.
        metric: ``[E, E]``, the root of what an error costs.
        steps: how many.
        rate: of each tensor's own mean size.

    Returns:
        The tensors after the last step, float32.
    """
    moved = {name: tensor.detach().float().clone().requires_grad_() for name, tensor in state.items()}
    groups = [
        {"params": [tensor], "lr": rate * float(tensor.detach().square().mean().sqrt())} for tensor in moved.values()
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    peaks = [group["lr"] for group in optimizer.param_groups]
    warmup = max(steps // 10, 1)
    for step in range(steps):
        share = min((step + 1) / warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        with torch.enable_grad():
            for sample in samples():
                error = (output(moved, sample) - sample.wanted) @ metric
                (0.5 * error.square().sum(-1).mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in moved.items()}
