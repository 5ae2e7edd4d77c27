"""Random tensors of hostile numbers, which end where memory ends.

A tensor's last byte is the last one of an allocation, behind which AddressSanitizer reports a read; or of pages that
others follow which nothing may touch, where any read ends the process, also one by an instruction that the sanitizer
does not see (masked loads, gathers and matrix tiles).
"""

from __future__ import annotations

import ctypes
import mmap
import random
from typing import Any

import torch
from torch import Tensor

_PAGES, _EACH = 32, 1 << 16
"""Areas of pages that no memory follows, and the bytes of each."""


class Guarded:
    """Areas of memory behind which no byte can be read; those of a case are given out anew in the next."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGES * (_EACH + mmap.PAGESIZE))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for area in range(_PAGES):
            behind = base + area * (_EACH + mmap.PAGESIZE) + _EACH
            if protect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._taken = 0

    def release(self) -> None:
        """All areas may be given out again."""
        self._taken = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """So many numbers, the last of which ends an area; None where none is left that is large enough."""
        size = count * dtype.itemsize
        if self._taken == _PAGES or not 0 < size <= _EACH:
            return None
        end = self._taken * (_EACH + mmap.PAGESIZE) + _EACH
        self._taken += 1
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=end - size)


class Draw:
    """What is drawn for one case: it follows from the seed.

    Args:
        seed: of the case.
        guarded: areas for some of the tensors; None for allocations alone.
        is_interpreted: whether kernels are interpreted: all tensors that fit are then in such areas, as no sanitizer
            watches, and sizes are small, as it takes long.

    Attributes:
        pick: for choices.
        noise: for numbers.
    """

    def __init__(self, seed: int, guarded: Guarded | None, *, is_interpreted: bool = False) -> None:
        self.pick, self.noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self._guarded, self.is_interpreted = guarded, is_interpreted
        if guarded is not None:
            guarded.release()

    def chance(self, share: float) -> bool:
        """True in this share of draws."""
        return self.pick.random() < share

    def placed(self, x: Tensor, *, is_dense: bool = False) -> Tensor:
        """The same numbers at the end of memory, with other bytes before and between them.

        Args:
            x: the numbers.
            is_dense: whether rows must follow each other; otherwise they may lie apart, and in another order.
        """
        order, strides, stride = list(range(x.dim())), [0] * x.dim(), 1
        if not is_dense and x.dim() > 2 and self.chance(0.4):
            order[-3:-1] = order[-3:-1][::-1]
        for dim in reversed(order):
            strides[dim] = stride
            stride = stride * max(1, x.shape[dim]) + (0 if is_dense else self.pick.choice((0, 0, 0, 1, 5)))
        span = 1 + sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True)) if x.numel() else 0
        before = 0 if is_dense else self.pick.choice((0, 0, 1, 3))
        memory = self._memory(before + span, x.dtype)
        placed = memory.as_strided(x.shape, strides, memory.storage_offset() + before)
        return placed.copy_(x)

    def _memory(self, count: int, dtype: torch.dtype) -> Tensor:
        memory = None
        if self._guarded is not None and (self.is_interpreted or self.chance(0.4)):
            memory = self._guarded.take(count, dtype)
        memory = torch.empty(count, dtype=dtype) if memory is None else memory
        memory.view(torch.uint8).fill_(0xFF)  # of which floats are NaN
        return memory

    def bits(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Numbers of any bits at all."""
        count = torch.Size(shape).numel() * dtype.itemsize
        drawn = torch.randint(0, 256, (count,), generator=self.noise, dtype=torch.uint8)
        return drawn.view(dtype).view(shape)

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Floats: ordinary ones; some of them NaN, infinite, huge, denormal or 0; or of any bits."""
        kind = self.pick.choice(("ordinary", "ordinary", "special", "bits", "one"))
        if kind == "bits":
            return self.bits(*shape, dtype=dtype)
        if kind == "one":
            return torch.full(shape, self.pick.choice(_special(dtype)), dtype=dtype)
        x = torch.randn(shape, generator=self.noise).to(dtype)
        if kind == "special":
            chosen = torch.tensor(_special(dtype), dtype=dtype)
            which = torch.randint(0, len(chosen), shape, generator=self.noise)
            x = torch.where(torch.rand(shape, generator=self.noise) < self.pick.choice((0.02, 0.3)), chosen[which], x)
        return x

    def positive(self, *shape: int) -> Tensor:
        """Finite float32 above 0, of any size."""
        return self.finite(*shape).abs().clamp_min(2.0**-149)

    def finite(self, *shape: int) -> Tensor:
        """Finite float32 of any size."""
        most = torch.finfo(torch.float32).max
        return self.numbers(*shape).nan_to_num(0.0, most, -most)

    def mask(self, B: int, H: int, S: int, T: int) -> Tensor | None:
        """A mask of any kind that broadcasts to ``[B, H, S, T]``, or none."""
        if self.chance(0.5):
            return None
        shape = [size if self.chance(share) else 1 for size, share in ((B, 0.7), (H, 0.3), (S, 0.4), (T, 0.9))]
        mask: Any = torch.rand(shape, generator=self.noise) < self.pick.choice((0.0, 0.3, 0.7, 1.0))
        return self.placed(mask)


def _special(dtype: torch.dtype) -> list[float]:
    limits = torch.finfo(dtype)
    least = limits.smallest_normal * limits.eps  # the least above 0
    return [float("nan"), float("inf"), -float("inf"), limits.max, limits.min, least, -least, 0.0, -0.0]
