"""The rank-R map of a layer's inputs from which several linear maps of them are best decoded.

Shapes: E' inputs, n outputs of one map, R latent rank. Everything is float64. With E = 4096 a matrix of E² is 134 MB,
so what has served is let go at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FLOOR = 1e-6
_TINY = 1e-12
NOTHING = 1e-60
"""Least size of a matrix, by the mean of its diagonal: one that is zero, of a layer that does nothing, counts as so
small a multiple of the identity. Its square, and a floor below that, are still far from underflow."""


class Part(NamedTuple):
    """One map to decode, and what an error of it costs: ``E[δᵀ M δ]`` over its own view of the inputs.

    Attributes:
        rows: ``[n, E']``, the map W.
        metric: M, positive semidefinite: ``[n, n]``, or the blocks on its diagonal, ``[g, n/g, n/g]``.
        moments: ``[E', E']``, S, the second moments of its inputs.
    """

    rows: Tensor
    metric: Tensor
    moments: Tensor


def weighted(metric: Tensor, rows: Tensor) -> Tensor:
    """``M W``, of a part's metric and rows ``[n, E']``."""
    blocks = metric.reshape(-1, *metric.shape[-2:])
    return (blocks @ rows.view(*blocks.shape[:2], -1)).view_as(rows)


def joint_latent(parts: list[Part], rank: int) -> tuple[Tensor, list[Tensor]]:
    """down ``[R, E']`` and an up ``[n, R]`` for each part, with ``Σ tr(M (W − up·down) S (W − up·down)ᵀ)`` small.

    Where all parts see the same inputs this is the least there is, a truncated SVD of the weighted maps. Otherwise
    down is that of their mean moments, and each up is the best for its part's own. Its latents come in order: the
    first r of them are those of rank r.

    Args:
        parts: one or two of them.
        rank: R; where all rows fit in it they are given back as they are.
    """
    if rank >= min(sum(len(part.rows) for part in parts), parts[0].rows.shape[1]):
        return whole_latent([part.rows for part in parts], rank)
    # Moments of one size, their sizes going into the metrics.
    sizes = [float(part.moments.diagonal().mean().clamp_min(NOTHING)) for part in parts]
    mean = torch.zeros_like(parts[0].moments)
    for part, size in zip(parts, sizes, strict=True):
        mean.add_(part.moments, alpha=1 / size)
    mean /= mean.diagonal().mean().clamp_min(NOTHING)
    factor = torch.linalg.cholesky(observed(mean))
    needed = torch.zeros_like(mean)
    del mean
    for part, size in zip(parts, sizes, strict=True):
        rows = part.rows @ factor
        needed.addmm_(rows.mT, weighted(floored(part.metric * size), rows))
    del rows
    # Of directions that nothing needs, those that inputs vary most in: others would be read by large numbers.
    least = _TINY * needed.diagonal().mean().clamp_min(NOTHING)
    needed.addmm_(factor.mT, factor, alpha=float(least))
    # Of mean square 1 and uncorrelated: nothing is far larger than the rest in a cache of few bits.
    down = torch.linalg.solve_triangular(factor, _leading(needed, rank), upper=False, left=False)
    del factor, needed
    # Of a latent and its negative, rounding would decide.
    down *= down.gather(1, down.abs().argmax(1, keepdim=True)).sign()
    return down, [_decoder(part, size, down) for part, size in zip(parts, sizes, strict=True)]


def whole_latent(rows: list[Tensor], rank: int) -> tuple[Tensor, list[Tensor]]:
    """As `joint_latent`, of maps ``[n, E']`` whose rows, or whose inputs, all have a place in the latent."""
    every = torch.cat(rows)
    count, inputs = every.shape
    own = torch.eye(min(count, inputs), dtype=every.dtype)
    down, up = (every, own) if count <= inputs else (own, every)
    spare = rank - len(down)
    down, up = torch.nn.functional.pad(down, (0, 0, 0, spare)), torch.nn.functional.pad(up, (0, spare))
    return down, list(torch.split(up, [len(part) for part in rows]))


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """The eigenvectors of the largest eigenvalues, as rows: ``[R, E']``."""
    vectors: Tensor = torch.linalg.eigh(matrix)[1]
    return vectors.flip(-1)[:, :rank].mT.contiguous()


def _decoder(part: Part, size: float, down: Tensor) -> Tensor:
    """``W S downᵀ (down S downᵀ)⁻¹``, ``[n, R]``: the best up of a part for given latents, whatever its metric."""
    seen = observed(part.moments / size) @ down.mT
    up: Tensor = torch.linalg.solve(floored(down @ seen, _TINY), (part.rows @ seen).mT).mT
    return up


def observed(moments: Tensor) -> Tensor:
    """Moments of inputs ``[E', E']``, floored; where the inputs are nothing, all count alike."""
    is_nothing = bool(moments.diagonal().mean() <= NOTHING)
    return floored(torch.eye(len(moments), dtype=moments.dtype) if is_nothing else moments)


def floored(matrix: Tensor, floor: float = _FLOOR) -> Tensor:
    """A positive semidefinite matrix ``[..., n, n]``, or all of its diagonal blocks, kept away from singular."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean()
    away = (matrix + matrix.mT).mul_(0.5)
    away.diagonal(dim1=-2, dim2=-1).add_(floor * mean.clamp_min(NOTHING))
    return away
