"""Sums over ranks with the derivatives that a layer shared out by heads needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""The ranks that share a layer; all of the default group when None."""


def entering(x: Tensor, group: Group) -> Tensor:
    """The same tensor; each rank computes a part of its derivative, and the sum of the parts is returned."""
    return _Entering.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, of which every rank goes on with the whole: its derivative is that of the sum."""
    return _Summed.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def shared(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, of which every rank uses a part: the parts of its derivative are summed too."""
    return entering(summed(x, group), group)


def all_reduced(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum over ranks, or another reduction, as a new tensor without a derivative."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=op, group=group)
    return total


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
