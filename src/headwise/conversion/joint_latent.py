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

ROUNDS = 5
"""How often down and up are solved for in turn, where maps see the inputs differently."""

BEYOND = 1.9
"""How far a round goes on the way to its solution and past it: below 2 no error grows by
that, and fewer rounds are needed."""


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


def joint_latent(parts: list[Part], rank: int, *, rounds: int = ROUNDS) -> tuple[Tensor, list[Tensor]]:
    """down ``[R, E']`` and an up ``[n, R]`` for each part that minimise ``Σ tr(M (W − up·down) S (W − up·down)ᵀ)``.

    Where all parts see the same inputs this is a truncated SVD of the weighted maps. Otherwise that is where it
    begins; then up and down, each a least-squares problem with the other held, are solved in turn. A rank that all
    rows fit in gives them back as they are.

    Args:
        parts: one or two of them.
        rank: R.
        rounds: how many turns.
    """
    if rank >= min(sum(len(part.rows) for part in parts), parts[0].rows.shape[1]):
        return whole_latent([part.rows for part in parts], rank)
    # Moments of one size, their sizes going into the metrics; and none that is blind to some of the inputs.
    sizes = [float(part.moments.diagonal().mean().clamp_min(NOTHING)) for part in parts]
    basis, shares = _input_basis([observed(part.moments / size) for part, size in zip(parts, sizes, strict=True)])
    needed = [_needed(part, size, basis) for part, size in zip(parts, sizes, strict=True)]
    turns = 0 if torch.equal(shares[0], shares[-1]) else rounds
    latents = _improved(_leading(_total(needed), rank), needed, shares, turns)
    del needed
    # Latents of mean square 1, uncorrelated: nothing is far larger than the rest in a cache of few bits.
    spread = torch.linalg.cholesky(floored(latents @ latents.mT / len(parts), _TINY))
    latents = torch.linalg.solve_triangular(spread, latents, upper=False)
    del spread
    ups = [(part.rows @ (basis @ _decoder(latents, share).mT)) for part, share in zip(parts, shares, strict=True)]
    down = torch.linalg.solve(basis.mT, latents.mT).mT
    # Of a latent and its negative, rounding would decide.
    sign = down.gather(1, down.abs().argmax(1, keepdim=True)).sign()
    return down.mul_(sign), [up.mul_(sign[:, 0]) for up in ups]


def whole_latent(rows: list[Tensor], rank: int) -> tuple[Tensor, list[Tensor]]:
    """As `joint_latent`, of maps ``[n, E']`` whose rows, or whose inputs, all have a place in the latent."""
    every = torch.cat(rows)
    count, inputs = every.shape
    own = torch.eye(min(count, inputs), dtype=every.dtype)
    down, up = (every, own) if count <= inputs else (own, every)
    spare = rank - len(down)
    down, up = torch.nn.functional.pad(down, (0, 0, 0, spare)), torch.nn.functional.pad(up, (0, spare))
    return down, list(torch.split(up, [len(part) for part in rows]))


def _input_basis(moments: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """L, and for each part the shares s of which its moments are ``L diag(s) Lᵀ``; the shares' sum is 1.

    In that basis of the inputs a latent ``y = down x`` is a row of ``down L``, and moments cost no product.
    """
    count = len(moments)
    if count == 1 or torch.equal(moments[0], moments[1]):
        even = torch.full((len(moments[0]),), 1 / count, dtype=moments[0].dtype)
        return torch.linalg.cholesky(_total(moments)), [even] * count
    factor, share, vectors = _together(moments)
    return factor @ vectors, [share, 1 - share]


def _needed(part: Part, size: float, basis: Tensor) -> Tensor:
    """``Wᵀ M W`` in a basis of the inputs: all that the search for latents needs to know of a part."""
    rows = part.rows @ basis
    return rows.mT @ weighted(floored(part.metric * size), rows)


def _decoder(latents: Tensor, share: Tensor) -> Tensor:
    """``[R, E']``, which gives a part's best decoder of given latents, whatever its metric: ``up = W decoderᵀ``."""
    seen = latents * share
    decoder: Tensor = torch.linalg.solve(floored(seen @ latents.mT, _TINY), seen)
    return decoder


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """The eigenvectors of the largest eigenvalues, as rows: ``[R, E']``."""
    vectors: Tensor = torch.linalg.eigh(matrix)[1]
    return vectors.flip(-1)[:, :rank].mT.contiguous()


def _improved(latents: Tensor, needed: list[Tensor], shares: list[Tensor], rounds: int) -> Tensor:
    """Latents by turns: the best decoders of given ones, then the best latents for these decoders."""
    for left in reversed(range(rounds)):
        grams, target = [], torch.zeros_like(latents)
        for need, share in zip(needed, shares, strict=True):
            decoder = _decoder(latents, share)
            wanted = decoder @ need
            grams.append(floored(wanted @ decoder.mT, _TINY))
            target.addcmul_(wanted, share)
            del decoder, wanted
        latents = torch.lerp(latents, _best(target, grams, shares), BEYOND if left else 1.0)
    return latents


def _best(target: Tensor, grams: list[Tensor], shares: list[Tensor]) -> Tensor:
    """The Y of ``A₁ Y s₁ + A₂ Y s₂ = C``, a number at a time; the list of both A is emptied."""
    factor, own, vectors = _together(grams)
    basis = torch.linalg.solve_triangular(factor.mT, vectors, upper=True)
    del factor, vectors
    found = basis.mT @ target
    found.div_((own[:, None] * shares[0] + (1 - own)[:, None] * shares[1]).clamp_min_(_TINY))
    best: Tensor = basis @ found
    return best


def _together(pair: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """F, s and V with ``A + B = F Fᵀ`` and ``A = F V diag(s) Vᵀ Fᵀ``, V being orthogonal and F lower triangular.

    The list is emptied: finding V takes five matrices as large as A, and nobody needs A any more.
    """
    factor = torch.linalg.cholesky(_total(pair))
    half = torch.linalg.solve_triangular(factor, pair[0], upper=False)
    pair.clear()
    both = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    del half
    share, vectors = torch.linalg.eigh(both)
    return factor, share.clamp(0, 1), vectors


def _total(matrices: list[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else matrices[0] + matrices[1]


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
