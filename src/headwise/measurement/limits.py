"""What a machine can do at most: bytes read a second, and operations a second of a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ATTAINABLE = 0.7
"""Of the measured peak of a square matrix product: what other shapes may be asked to reach."""

_READ_BYTES = 256 * 1024**2
_SIZE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Limits:
    """Measured limits of one dtype on one device."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least time for reading so many bytes and doing so much: the longer of the two."""
        return max(nbytes / self.bytes_per_second, flops / (ATTAINABLE * self.flops_per_second))


class Probes:
    """The calls that measure limits, to be timed among the calls they are the limits of.

    Reading is summing 256 MB (on a GPU copying them, which reads and writes); the product is square, 1024 wide (8192
    on a GPU).
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        size = _SIZE[torch.device(device).type]
        self._is_copied = torch.device(device).type != "cpu"
        self._read = torch.ones(_READ_BYTES // 4, device=device)
        self._into = torch.empty_like(self._read) if self._is_copied else None
        self._a, self._b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))

    def calls(self) -> dict[str, Callable[[], object]]:
        """By name, for `headwise.measurement.timing`."""
        into = self._into
        read = self._read.sum if into is None else (lambda: into.copy_(self._read))
        return {"read": read, "product": lambda: self._a @ self._b}

    def limits(self, read: float, product: float) -> Limits:
        """The limits, from the seconds that the two calls took."""
        moved = self._read.nbytes * (2 if self._is_copied else 1)
        return Limits(moved / read, 2 * self._a.shape[0] ** 3 / product)
