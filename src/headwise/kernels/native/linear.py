"""Linear layers for a few tokens, by a kernel that reads each weight once, at the speed of memory."""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.native.build import TYPES, are_plain, built, why_not

MOST_ROWS = 8
"""The most rows that linear.cpp supports; up to about this number, reading the weights takes most of the time."""

# `LinearArguments` of linear.cpp: four pointers, three sizes, two strides, threads.
_ARGUMENTS = struct.Struct("@4P3q2qq")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x Wᵀ + b``: by the compiled kernel for up to `MOST_ROWS` rows, else or with gradients by torch.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]``; the kernel sums in float32, in another order than torch.

    Raises:
        MemoryError: the kernel could not allocate its working memory.
    """
    inputs = x.shape[-1]
    rows = x.numel() // inputs if inputs else 0
    if not 0 < rows <= MOST_ROWS or not _fits(x, weight, bias):
        return F.linear(x, weight, bias)
    library = built().library
    assert library is not None
    x = x if x.is_contiguous() else x.contiguous()
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    arguments = _ARGUMENTS.pack(
        *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(rows, inputs, weight.shape[0], inputs, weight.stride(0)),
        torch.get_num_threads(),
    )
    status = library.headwise_linear(arguments, TYPES[x.dtype])
    if status == 1:
        raise MemoryError("no memory to multiply in")
    assert status == 0
    return out


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel supports these tensors; shapes that do not match are left to torch, which reports them."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return (
        are_plain(*tensors)
        and weight.dim() == 2
        and weight.shape[1] == x.shape[-1]
        and weight.stride(1) == 1
        and (bias is None or (bias.shape == weight.shape[:1] and bias.stride(0) == 1))
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
        and why_not(x.dtype, x.device, needs_grad=needs_grad) is None
    )
