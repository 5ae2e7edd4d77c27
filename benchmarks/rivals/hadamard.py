"""Hadamard matrices of the orders that ranks in blocks of 32 need."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(order: int) -> Tensor:
    """An orthogonal matrix ``[order, order]`` of equal absolute values, float64.

    Args:
        order: 2ᵏ times 1, 12 or 20.

    Raises:
        ValueError: the order is none of these.
    """
    matrix = _small(order)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / order**0.5


def _small(order: int) -> Tensor:
    for prime in (0, 11, 19):
        doublings = order // (prime + 1)
        if order % (prime + 1) == 0 and doublings & (doublings - 1) == 0:
            return _paley(prime) if prime else torch.ones(1, 1, dtype=torch.float64)
    raise ValueError(f"no Hadamard matrix of order {order} is made here")


def _paley(prime: int) -> Tensor:
    """Paley's first construction: an order of ``prime + 1``, for a prime that is 3 modulo 4."""
    squares = {x * x % prime for x in range(1, prime)}
    residue = torch.tensor([0.0] + [1.0 if x in squares else -1.0 for x in range(1, prime)], dtype=torch.float64)
    index = (torch.arange(prime)[:, None] - torch.arange(prime)) % prime
    matrix = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = residue[index] + torch.eye(prime, dtype=torch.float64)
    return matrix
