"""A machine's measured limits: bytes read a second, and FLOPs a second of a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ATTAINABLE = 0.7
"""The share of a square product's FLOPs a second that products of other shapes are expected to reach."""

_READ_BYTES = 256 * 1024**2
"""Bytes that are read to measure a rate: more than any cache holds."""
_SIZE = {"cpu": 1024, "cuda": 8192}
"""Width of the square product, by device."""


@dataclass(frozen=True)
class Limits:
    """Measured limits of one dtype on one device."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least time for reading ``nbytes`` and computing ``flops``: the longer of the two."""
        return max(nbytes / self.bytes_per_second, flops / (ATTAINABLE * self.flops_per_second))


class Probes:
    """The calls that measure limits, to be timed in turn with the calls that the limits are for.

    Reading is a sum of 256 MB (on a GPU a copy, which reads and writes); the product is square, 1024 wide (8192 on a
    GPU).
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.device = torch.device(device)
        size = _SIZE[self.device.type]
        self._is_copied = self.device.type != "cpu"
        self._read = torch.ones(_READ_BYTES // 4, device=device)
        self._into = torch.empty_like(self._read) if self._is_copied else None
        self._a, self._b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))

    def calls(self) -> dict[str, Callable[[], object]]:
        """The two calls, ``read`` and ``product``, for the functions of `headwise.measure.timing.timing`."""
        into = self._into
        read = self._read.sum if into is None else (lambda: into.copy_(self._read))
        return {"read": read, "product": lambda: self._a @ self._b}

    def limits(self, read: float, product: float) -> Limits:
        """The limits, from the seconds that the two calls took."""
        moved = self._read.nbytes * (2 if self._is_copied else 1)
        return Limits(moved / read, 2 * self._a.shape[0] ** 3 / product)
