"""A device that is none: tensors whose numbers are the CPU's, and that refuse to meet tensors of the CPU.

It stands in for a GPU where there is none. What runs on it makes every tensor where it should be: an operation on
tensors of two devices is refused as CUDA refuses it, and so are numbers read without a copy to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
"""The name of the device: one that torch has guards and derivatives for, and no numbers."""

_MOVES = ("aten::copy_", "aten::_to_copy", "aten::to")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operations that may take indices from the CPU."""


_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")
"""Operations whose result the processor waits for."""

waited: list[str] = []
"""Operations that waited for the device or moved numbers to or from it, none of which CUDA can record as a graph."""


class _Placed(Tensor):
    """A tensor on the device, around the tensor of the CPU with its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Placed:
        shell = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
        )
        shell.inner = inner
        return shell

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def tolist(self) -> Any:
        """torch refuses this one for subclasses; it copies to the CPU first."""
        return self.inner.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"on the device: {self.inner}"


class _Masks(TorchDispatchMode):
    """Makes the tensors on the device that torch makes by itself within an operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """Makes tensors on the device, and moves those of the CPU to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        # Of numbers and lists torch makes tensors by itself, which would have no numbers.
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], _Placed):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(place, device="cpu") if isinstance(place, list) else place for place in places)
            if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
                args[0].inner[tree_map(_inner, index)] = args[2]
                return None
            return func(args[0], index, *args[2:])
        if func in (torch.where, Tensor.where):
            args = tuple(torch.tensor(each, device="cpu") if isinstance(each, int | float) else each for each in args)
        if func is F.scaled_dot_product_attention:
            with _Masks():
                return func(*args, **(kwargs or {}))
        if (
            func is torch.device
            or not any(map(_is_device, leaves))
            or any(isinstance(leaf, _Placed) for leaf in leaves)
        ):
            return func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor):
            waited.append("torch.tensor")
        args, kwargs = tree_map(lambda leaf: "cpu" if _is_device(leaf) else leaf, (args, kwargs or {}))
        return _Placed(func(*args, **kwargs))


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    placed = [tensor for tensor in tensors if isinstance(tensor, _Placed)]
    name = func._schema.name
    if any(tensor.is_meta and not isinstance(tensor, _Placed) for tensor in tensors):
        raise RuntimeError(f"{name}: torch made a tensor without numbers")
    if placed and name not in _MOVES:
        others = [tensor for tensor in tensors if tensor.ndim and not isinstance(tensor, _Placed)]
        if name in _INDEXED:
            others = [tensor for tensor in others if tensor.is_floating_point()]
        if others:
            shapes = [tuple(tensor.shape) for tensor in others]
            raise RuntimeError(f"{name}: tensors of two devices; those of the CPU have shapes {shapes}")
    # In inference mode `to` is called with the device as an argument without its name.
    asked = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)), None)
    plain_args, plain_kwargs = tree_map(
        lambda leaf: torch.device("cpu") if isinstance(leaf, torch.device) else _inner(leaf), (args, kwargs)
    )
    result = func(*plain_args, **plain_kwargs)
    if name == "aten::copy_" and len(placed) == 1:
        waited.append(name)
    if func._schema.is_mutable:
        return return_and_correct_aliasing(func, args, kwargs, result)
    is_placed = bool(placed) if asked is None else torch.device(asked).type == DEVICE.type
    if name in _WAITS or (name in _MOVES and bool(placed) != is_placed):
        waited.append(name)
    if not is_placed:
        return result
    # The shell does not know that what it holds is to be conjugated or negated when it is read.
    result = tree_map(lambda leaf: leaf.resolve_conj().resolve_neg() if isinstance(leaf, Tensor) else leaf, result)
    result = tree_map(lambda leaf: _Placed(leaf) if isinstance(leaf, Tensor) else leaf, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if placed else result


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, _Placed) else leaf


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.device | str) and str(leaf) == str(DEVICE)


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """A block in which the device exists."""
    with _Factories():
        yield DEVICE


def placed(model: Any) -> Any:
    """A transformers model with its parameters, buffers and codes moved to the device, which it returns.

    ``model.to`` would ask torch to give the tensors there is another kind of storage.
    """
    moved: dict[int, torch.nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = moved.setdefault(id(parameter), torch.nn.Parameter(_Placed(parameter.detach())))
                module._parameters[name] = own
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else _Placed(buffer)
        if getattr(module, "code", None) is not None:
            module.set_code(module.code.to(DEVICE), module.slots)
    return model
