"""The gradients of a step's windows, on a CPU of two windows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from headwise.base.threads import WORKERS, side_by_side

Part = TypeVar("Part")


def add_gradients(
    loss_of: Callable[[Part], Tensor], parts: Sequence[Part], parameters: Sequence[nn.Parameter], *, apart: bool
) -> float:
    """Add the gradients of several parts of a loss to those of the parameters; the sum of the parts.

    For example ``add_gradients(lambda window: loss(model(window)), windows, [*model.parameters()], apart=True)``.

    Args:
        loss_of: computes a part.
        parts: what it is called with.
        parameters: that are trained.
        apart: whether parts are computed side by side, each thread a fixed share of them with gradients of its own,
            so that sums do not depend on which thread is finished first.
    """
    if not apart or len(parts) < 2 or torch.get_num_threads() < WORKERS:
        losses = []
        for part in parts:
            loss = loss_of(part)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return sum(float(loss) for loss in losses)

    def summed(share: Sequence[Part]) -> tuple[float, list[Tensor | None]]:
        total, sums = 0.0, list[Tensor | None]([None] * len(parameters))
        for part in share:
            loss = loss_of(part)
            _add(sums, torch.autograd.grad(loss, parameters, allow_unused=True), parameters)
            total += float(loss.detach())
        return total, sums

    shares = [parts[first::WORKERS] for first in range(WORKERS)]
    gradients, total = [parameter.grad for parameter in parameters], 0.0
    for part_of_loss, sums in side_by_side(summed, shares):
        total += part_of_loss
        _add(gradients, sums, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return total


def _add(sums: list[Tensor | None], more: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> None:
    """Add gradients in place. The first of each is copied: one tensor may be the gradient of two parameters."""
    for index, (own, gradient, parameter) in enumerate(zip(sums, more, parameters, strict=True)):
        if gradient is not None:
            sums[index] = torch.empty_like(parameter).copy_(gradient) if own is None else own.add_(gradient)
