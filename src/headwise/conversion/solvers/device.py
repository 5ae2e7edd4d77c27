"""The device that layers are solved on, its products in bfloat16, and weights that cannot be solved.

Functions of tensors compute where their arguments are, and make new tensors on the device of the block that they are
called in, so that no function of a solver has a device among its arguments. What is read from files, and random
numbers, which are drawn on the CPU so that every device draws the same ones, is moved there first; what is written is
moved back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from headwise.errors import ArgumentError, CheckpointError
from headwise.models.checkpoints import Checkpoint
from headwise.runtime.hf import as_device
from headwise.runtime.kernels.native import multiplies_bfloat16

CPU = torch.device("cpu")

QUICK = multiplies_bfloat16() and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
"""Whether the processor multiplies bfloat16 matrices, and torch lets it (ONEDNN_MAX_CPU_ISA may not). Read from
features, not timed, so that a continued run computes the numbers that an uninterrupted one would have."""


def own_device(name: str | None) -> torch.device:
    """The device of a name, to solve layers on; see `as_device`.

    Args:
        name: the name of the device, such as ``cuda``; the CPU when None.

    Raises:
        ArgumentError: torch has no such device on this machine, or it is neither a CPU nor a CUDA GPU.
    """
    device = as_device(name)
    if device.type not in ("cpu", "cuda"):  # others have no float64
        raise ArgumentError("device", name, "must be cpu or cuda: layers are solved in float64")
    return device


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """A block whose new tensors are made on a device.

    For example, within ``with computing_on(torch.device("cuda")):`` ``torch.eye(3)`` is on the GPU.
    """
    # Every call of torch takes longer within the block, so that there is none where nothing changes.
    return nullcontext() if device == torch.get_default_device() else device


def to_device(tensor: Tensor) -> Tensor:
    """The tensor on the device of the block."""
    return tensor.to(torch.get_default_device())


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes of a GPU that tensors of this process have had since `reset_peak`; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Begin to count a GPU's memory anew; see `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def clock() -> float:
    """The time in seconds, once the device of the block has computed what it was given."""
    device = torch.get_default_device()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch(defaultdict[str, float]):
    """The seconds that the parts of a conversion have taken, by name."""

    def __init__(self) -> None:
        super().__init__(float)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of a block to a part, without that of timed blocks within it."""
        start, within = clock(), sum(self.values())
        yield
        self[part] += clock() - start - (sum(self.values()) - within)


def is_quick(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 matrices."""
    return QUICK or device.type == "cuda"


def quick_products() -> torch.autocast:
    """A context in which float32 matrix products are computed in bfloat16: on a GPU, and on a CPU where `QUICK`.

    It serves gradients, whose direction is what counts, and a text's hidden states, whose rounding is far below what
    a conversion loses. Statistics, refits and what decides between solutions are computed outside of it, in float32
    and float64.
    """
    device = torch.get_default_device()
    return torch.autocast("cuda" if device.type == "cuda" else "cpu", torch.bfloat16, enabled=is_quick(device))


@contextmanager
def refuse_unsolvable(checkpoint: Checkpoint, layer: int | None = None) -> Iterator[None]:
    """Refuse weights by name where a decomposition does not converge: their products leave the range of float64.

    Args:
        checkpoint: the source.
        layer: the number of the layer whose weights they are; None where it is not known.

    Raises:
        CheckpointError: torch raised a ``LinAlgError`` in the block.
    """
    try:
        yield
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, and not in its list
        rule = "are so large or so small that matrices made of them cannot be decomposed"
        rule += "" if layer is None else f", in layer {layer}"
        raise CheckpointError("weights", str(checkpoint.path), rule) from None
