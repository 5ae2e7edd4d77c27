"""A joint latent: the rank-R map of a layer's inputs from which several linear maps of them are best decoded.

Shapes: E' inputs, n outputs of one map, R latent rank. Everything is float64. With E = 4096 a matrix of E² is 134 MB,
so a matrix is deleted as soon as it has served.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FLOOR = 1e-6
"""The multiple of a matrix's mean diagonal that is added to its diagonal, to keep it away from singular."""

_TINY = 1e-12

_CLEAR = 1e-9
"""The least energy of a singular vector, as a share of the largest, that rounding does not blur."""

NOTHING = 1e-60
"""The least mean diagonal of a matrix. Zero matrices, of layers that compute nothing, are regularised: they count as
this multiple of the identity, whose square, times `_FLOOR`, is still far from underflow."""


class Part(NamedTuple):
    """One map to decode, with the cost ``E[δᵀ M δ]`` of an error δ of its outputs.

    Attributes:
        rows: the map W, ``[n, E']``.
        metric: the cost M of an error, positive semidefinite: ``[n, n]``, or the blocks on its diagonal, ``[g, n/g,
            n/g]``.
        moments: the second moments S of the inputs, weighted as they count for this map, ``[E', E']``.
    """

    rows: Tensor
    metric: Tensor
    moments: Tensor


def weighted(metric: Tensor, rows: Tensor) -> Tensor:
    """The product ``M W`` ``[n, E']`` of a part's metric, or a factor of it, and rows."""
    blocks = metric.reshape(-1, *metric.shape[-2:])
    return (blocks @ rows.view(*blocks.shape[:2], -1)).view_as(rows)


def joint_latent(parts: list[Part], rank: int) -> tuple[Tensor, list[Tensor]]:
    """Find a latent ``down x`` and decoders ``up`` that make ``Σ tr(M (W − up·down) S (W − up·down)ᵀ)`` small.

    If all parts have the same moments this is the least possible value, a truncated SVD of the weighted maps.
    Otherwise ``down`` is solved for the mean of their moments, and each ``up`` for its part's own. Latent channels
    are in order: the first r of them are the latent of rank r.

    For example ``joint_latent([Part(w_v, value_metric, moments)], 64)`` is a value latent of 64 channels.

    Args:
        parts: the one or two maps to decode.
        rank: the rank R of the latent; where all rows fit in it they are returned as they are.

    Returns:
        ``down`` ``[R, E']``, and an ``up`` ``[n, R]`` for each part.
    """
    rows = [part.rows for part in parts]
    if rank >= min(sum(map(len, rows)), int(_read(rows).sum())):
        return whole_latent(rows, rank)
    # Moments are scaled to one size, and the metrics by the sizes.
    sizes = [float(part.moments.diagonal().mean().clamp_min(NOTHING)) for part in parts]
    mean = torch.zeros_like(parts[0].moments)
    for part, size in zip(parts, sizes, strict=True):
        mean.add_(part.moments, alpha=1 / size)
    mean /= mean.diagonal().mean().clamp_min(NOTHING)
    factor = torch.linalg.cholesky(observed(mean))
    del mean
    metrics = [floored(part.metric * size) for part, size in zip(parts, sizes, strict=True)]
    leading = _leading_by_rows(parts, metrics, factor, rank)
    if leading is None:
        leading = _leading_by_inputs(parts, metrics, factor, rank)
    del metrics
    # Channels are uncorrelated and of mean square 1, so that a cache of few bits rounds all of them equally.
    down = torch.linalg.solve_triangular(factor, leading, upper=False, left=False)
    del factor, leading
    # Rounding would decide between a channel and its negative: the largest weight is made positive.
    down *= down.gather(1, down.abs().argmax(1, keepdim=True)).sign()
    return down, [_decoder(part, size, down) for part, size in zip(parts, sizes, strict=True)]


def whole_latent(rows: list[Tensor], rank: int) -> tuple[Tensor, list[Tensor]]:
    """`joint_latent` for maps ``[n, E']`` whose rows, or the inputs that they read, all fit in the latent."""
    stacked, read = torch.cat(rows), _read(rows)  # [Σn, E'], [E']
    if len(stacked) <= int(read.sum()):
        down, up = stacked, torch.eye(len(stacked), dtype=stacked.dtype)
    else:
        down, up = torch.eye(len(read), dtype=stacked.dtype)[read], stacked[:, read]
    spare = rank - len(down)
    down, up = torch.nn.functional.pad(down, (0, 0, 0, spare)), torch.nn.functional.pad(up, (0, spare))
    return down, list(torch.split(up, [len(part) for part in rows]))


def _read(rows: list[Tensor]) -> Tensor:
    """The inputs that some map reads, bool ``[E']``: a constant, for biases, may be read by none."""
    return torch.stack([part.any(0) for part in rows]).any(0)


def _leading_by_rows(parts: list[Part], metrics: list[Tensor], factor: Tensor, rank: int) -> Tensor | None:
    """The leading right singular vectors ``[R, E']`` of the weighted maps, from their products with each other.

    These are far smaller than those of the inputs where few key heads serve a wide model.

    Returns:
        None where they are not smaller, or the maps have so little rank that other directions must be chosen.
    """
    if sum(len(part.rows) for part in parts) >= len(factor):
        return None
    maps = torch.cat(
        [weighted(torch.linalg.cholesky(m).mT, part.rows @ factor) for part, m in zip(parts, metrics, strict=True)]
    )  # [n, E']
    energy, vectors = torch.linalg.eigh(maps @ maps.mT)
    energy, vectors = energy.flip(0)[:rank], vectors.flip(-1)[:, :rank]
    if energy[-1] <= _CLEAR * energy[0]:
        return None
    leading: Tensor = (vectors / energy.sqrt()).mT @ maps
    return leading


def _leading_by_inputs(parts: list[Part], metrics: list[Tensor], factor: Tensor, rank: int) -> Tensor:
    """The leading right singular vectors ``[R, E']`` of the weighted maps."""
    gram = torch.zeros_like(factor)  # [E', E'], of the weighted maps
    for part, metric in zip(parts, metrics, strict=True):
        rows = part.rows @ factor
        gram.addmm_(rows.mT, weighted(metric, rows))
        del rows
    # Among directions that no part needs, prefer those in which inputs vary most: others need large weights.
    ridge = _TINY * gram.diagonal().mean().clamp_min(NOTHING)
    gram.addmm_(factor.mT, factor, alpha=float(ridge))
    vectors: Tensor = torch.linalg.eigh(gram)[1]
    return vectors.flip(-1)[:, :rank].mT.contiguous()


def _decoder(part: Part, size: float, down: Tensor) -> Tensor:
    """``W S downᵀ (down S downᵀ)⁻¹``, ``[n, R]``: a part's best ``up`` for a given latent, whatever its metric."""
    covariance = observed(part.moments / size) @ down.mT  # [E', R], of inputs and latents
    up: Tensor = torch.linalg.solve(floored(down @ covariance, _TINY), (part.rows @ covariance).mT).mT
    return up


def observed(moments: Tensor) -> Tensor:
    """Second moments of inputs ``[E', E']``, kept away from singular; the identity in place of zero moments."""
    is_zero = bool(moments.diagonal().mean() <= NOTHING)
    return floored(torch.eye(len(moments), dtype=moments.dtype) if is_zero else moments)


def floored(matrix: Tensor, floor: float = _FLOOR) -> Tensor:
    """A positive semidefinite matrix ``[..., n, n]``, or all of its diagonal blocks, kept away from singular."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean()
    regularised = (matrix + matrix.mT).mul_(0.5)
    regularised.diagonal(dim1=-2, dim2=-1).add_(floor * mean.clamp_min(NOTHING))
    return regularised
