"""Count any torch module while it runs: parameters, FLOPs, what it keeps for the backward pass, caches.

FLOPs are those of torch's `FlopCounterMode`, with four gaps closed. It has no formula for attention on the CPU, for
products with a vector or for grouped experts, which it counts as 0. It sees nothing inside torch's fused modules for
inference and for recurrent networks, which are therefore switched off. And it charges a causal kernel for every pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headwise.measure.timing.machine import cache_nbytes

_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""torch's operators of ``scaled_dot_product_attention`` that `FlopCounterMode` has no formula for on every device."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """The cost of one call of a module, counted while it runs.

    Attributes:
        parameters: the number of the module's parameters, shared ones counted once.
        forward_flops: FLOPs of the call's matrix products; a multiply-add is 2.
        causal_flops: ``forward_flops``, but with fused causal attention charged only for the pairs that it computes.
        backward_flops: FLOPs of the gradients of parameters and inputs; None unless asked for.
        saved_bytes: the bytes that autograd keeps from the forward to the backward pass, without parameters; None
            unless asked for.
        cache_bytes: bytes of the caches among the arguments, after the call.
        by_operator: the forward FLOPs of each torch operator.
    """

    parameters: int
    forward_flops: int
    causal_flops: int
    backward_flops: int | None
    saved_bytes: int | None
    cache_bytes: int
    by_operator: dict[str, int]


def count(module: nn.Module, *args: Any, backward: bool = False, **kwargs: Any) -> Count:
    """Call a module once and count its parameters, FLOPs and bytes.

    A module on the ``meta`` device is counted without arithmetic; attention there takes unfused products. Elsewhere
    the call has its usual effects on statistics and caches. An operator for which torch has no formula counts 0:
    ``by_operator`` names those that have one.

    Args:
        module: any torch module.
        args: positional arguments of the call.
        backward: whether to count the gradients of the sum of the outputs as well, and the bytes that are kept for
            them.
        kwargs: keyword arguments of the call.

    >>> count(torch.nn.Linear(3, 5), torch.zeros(2, 3)).forward_flops
    60
    """
    counter = _Counter()
    saved: int | None = None
    gradients: int | None = None
    with torch.set_grad_enabled(backward):
        with counter.running(), _saved_bytes(module) as saved_bytes:
            out = module(*args, **kwargs)
        forward, causal, by_operator = counter.total, counter.causal, counter.by_operator
        if backward:
            saved = saved_bytes()
            outputs = [tensor for tensor in _tensors(out) if tensor.requires_grad]
            leaves = [*module.parameters(), *_tensors([*args, *kwargs.values()])]
            inputs = [tensor for tensor in leaves if tensor.requires_grad]
            with counter.running():  # torch.autograd.grad leaves every .grad as it is
                seeds = [torch.ones_like(tensor) for tensor in outputs]
                torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
            gradients = counter.total
    return Count(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        forward_flops=forward,
        causal_flops=causal,
        backward_flops=gradients,
        saved_bytes=saved,
        cache_bytes=sum(cache_nbytes(value) for value in (*args, *kwargs.values())),
        by_operator=by_operator,
    )


class _Counter:
    """FlopCounterMode with formulas for every kind of fused attention."""

    def __init__(self) -> None:
        self.total = self.causal = 0
        self.by_operator: dict[str, int] = {}
        self._skipped = 0
        self._formulas: dict[Any, Callable[..., int]] = {}
        for name in _FUSED_ATTENTION:
            for op, products in ((name, (1, 1)), (f"{name}_backward", (3, 2))):
                packet = getattr(torch.ops.aten, op, None)
                if packet is not None:
                    self._formulas[packet] = self._formula(packet, *products)
        aten = torch.ops.aten
        self._formulas |= {
            aten.mv: _matrix_vector_flops,
            aten.dot: _dot_product_flops,
            aten._grouped_mm: _grouped_flops,
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        self._skipped = 0
        with _without_fused_modules(), FlopCounterMode(display=False, custom_mapping=self._formulas) as mode:
            yield
        self.total = mode.get_total_flops()
        self.causal = self.total - self._skipped
        self.by_operator = {str(op): int(n) for op, n in mode.get_flop_counts().get("Global", {}).items()}

    def _formula(self, packet: Any, qk_products: int, v_products: int) -> Callable[..., int]:
        names = [argument.name for argument in packet.default._schema.arguments]

        def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            (B, H, S, D), T, V = arguments["query"], arguments["key"][2], arguments["value"][3]
            per_pair = 2 * B * H * (qk_products * D + v_products * V)
            if arguments.get("is_causal"):
                # torch's flag is top-left: query i sees keys 0 … i.
                square = min(S, T)
                self._skipped += per_pair * (S * T - square * (square + 1) // 2 - (S - square) * T)
            return int(per_pair * S * T)

        return flops


Shape = tuple[int, ...]


def _matrix_vector_flops(matrix: Shape, vector: Shape, **_: Any) -> int:
    return 2 * matrix[0] * matrix[1]


def _dot_product_flops(left: Shape, right: Shape, **_: Any) -> int:
    return 2 * left[0]


def _grouped_flops(left: Shape, right: Shape, *_: Any, out_val: Any = None, **__: Any) -> int:
    """FLOPs of rows ``[M, K]`` by a matrix of each group ``[G, K, N]``; for its gradient ``[N, M]`` by ``[M, K]``."""
    if len(left) == len(right) == 2:
        return 2 * left[0] * left[1] * right[1]
    return 2 * math.prod(left) * right[-1]


@contextmanager
def _without_fused_modules() -> Iterator[None]:
    """Switch off torch's one-operator encoder and recurrent layers, so that the products inside them are seen."""
    fused, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        torch._C._set_mkldnn_enabled(onednn)


@contextmanager
def _saved_bytes(module: nn.Module) -> Iterator[Callable[[], int]]:
    """Add up the storages that autograd saves, each once; a view keeps all of its storage."""
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage  # held, so that no later one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
