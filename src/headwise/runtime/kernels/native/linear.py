"""Linear layers: of a few tokens by a kernel that reads each weight once, at memory speed; of many by torch."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.runtime.kernels.native.abi import MOST_ROWS
from headwise.runtime.kernels.native.build import are_plain, call, is_watched, why_not

_WIDE_ROWS = 1024
"""Rows that are multiplied in float32 at a time, so that a long text's logits are not held twice."""


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
        return linear_of_many(x, weight, bias)
    x = x if x.is_contiguous() else x.contiguous()
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    sizes = {"rows": rows, "inputs": inputs, "outputs": weight.shape[0], "x_stride": inputs}
    sizes |= {"weight_stride": weight.stride(0), "y_stride": weight.shape[0]}
    tensors = {"x": x, "weight": weight, "bias": bias, "y": out}
    call("headwise_linear", tensors, sizes, x.dtype)
    return out


def linear_of_many(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x Wᵀ + b`` by torch, and bfloat16 in float32 where the processor cannot multiply it.

    There torch's own products of bfloat16 are many times slower: ``headwise doctor`` measures both, in float32 82 and
    in bfloat16 1 GFLOP/s on an EPYC of the Zen 3 generation with torch 2.13.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]``, rounded once.
    """
    inputs = x.shape[-1]
    rows = x.numel() // inputs if inputs else 0
    is_slow = rows > MOST_ROWS and x.dtype == torch.bfloat16 and not multiplies_bfloat16()
    if not is_slow or _needs_grad(x, weight, bias) or is_watched() or not _is_plain_product(x, weight, bias):
        return F.linear(x, weight, bias)
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    flat = x.reshape(rows, inputs)
    out = x.new_empty(rows, weight.shape[0])
    for begin in range(0, rows, _WIDE_ROWS):
        part = slice(begin, begin + _WIDE_ROWS)
        out[part] = F.linear(flat[part].float(), wide, wide_bias)
    return out.view(*x.shape[:-1], weight.shape[0])


@cache
def multiplies_bfloat16() -> bool:
    """Whether torch leaves products of bfloat16 to oneDNN, as on processors with AVX-512 or ARM's bfloat16.

    Elsewhere torch multiplies bfloat16 by plain loops. oneDNN may still take longer for it than for float32, on a
    processor with AVX-512 that has no products of bfloat16.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel supports these tensors; see `_is_plain_product`."""
    needs_grad = _needs_grad(x, weight, bias)
    return _is_plain_product(x, weight, bias) and why_not(x.dtype, x.device, needs_grad=needs_grad) is None


def _is_plain_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are matrices of one type in memory that match; others are left to torch, which reports them."""
    return (
        are_plain(x, weight, bias)
        and weight.dim() == 2
        and weight.shape[1] == x.shape[-1]
        and weight.stride(1) == 1
        and (bias is None or (bias.shape == weight.shape[:1] and bias.stride(0) == 1))
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
    )


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
