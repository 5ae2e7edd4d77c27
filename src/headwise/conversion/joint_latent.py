"""The rank-R map of a layer's inputs from which several linear maps of them are best decoded.

Shapes: E' inputs, n outputs of one map, R latent rank. Everything is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FLOOR = 1e-6
_TINY = 1e-12
ROUNDS = 8
"""How often down and up are solved for in turn, where maps see the inputs differently."""


class Part(NamedTuple):
    """One map to decode, and what an error of it costs: ``E[δᵀ M δ]`` over its own view of the inputs.

    Attributes:
        rows: ``[n, E']``, the map W.
        metric: ``[n, n]``, M, positive semidefinite.
        moments: ``[E', E']``, S, the second moments of its inputs.
    """

    rows: Tensor
    metric: Tensor
    moments: Tensor


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
    rows = torch.cat([part.rows for part in parts])
    inputs = rows.shape[1]
    if rank >= min(len(rows), inputs):
        exact = rows if len(rows) <= inputs else torch.eye(inputs, dtype=rows.dtype)
        back = torch.eye(len(rows), dtype=rows.dtype) if len(rows) <= inputs else rows
        spare = rank - len(exact)
        down, up = torch.nn.functional.pad(exact, (0, 0, 0, spare)), torch.nn.functional.pad(back, (0, spare))
        return down, list(torch.split(up, [len(part.rows) for part in parts]))
    # Moments of one size, their sizes going into the metrics; and none that is blind to some of the inputs.
    sizes = [float(part.moments.diagonal().mean().clamp_min(_TINY)) for part in parts]
    basis, shares = _input_basis([floored(part.moments / size) for part, size in zip(parts, sizes, strict=True)])
    needed = [_needed(part, size, basis) for part, size in zip(parts, sizes, strict=True)]
    latents = torch.linalg.eigh(_total(needed))[1].flip(-1)[:, :rank].mT
    if not torch.equal(shares[0], shares[-1]):
        for _ in range(rounds):
            latents = _better(latents, needed, shares)
    del needed
    # Latents of mean square 1, uncorrelated: nothing is far larger than the rest in a cache of few bits.
    spread = torch.linalg.cholesky(floored(latents @ latents.mT / len(parts), _TINY))
    latents = torch.linalg.solve_triangular(spread, latents, upper=False)
    ups = [(part.rows @ (basis @ _decoder(latents, share).mT)) for part, share in zip(parts, shares, strict=True)]
    down = torch.linalg.solve(basis.mT, latents.mT).mT
    # Of a latent and its negative, rounding would decide.
    sign = down.gather(1, down.abs().argmax(1, keepdim=True)).sign()
    return down * sign, [up * sign[:, 0] for up in ups]


def _input_basis(moments: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """L, and for each part the shares s of which its moments are ``L diag(s) Lᵀ``; the shares' sum is 1.

    In that basis of the inputs a latent ``y = down x`` is a row of ``down L``, and moments cost no product.
    """
    count = len(moments)
    if count == 1 or torch.equal(moments[0], moments[1]):
        even = torch.full((len(moments[0]),), 1 / count, dtype=moments[0].dtype)
        return torch.linalg.cholesky(_total(moments)), [even] * count
    factor, share, vectors = _together(moments[0], moments[1])
    return factor @ vectors, [share, 1 - share]


def _needed(part: Part, size: float, basis: Tensor) -> Tensor:
    """``Wᵀ M W`` in a basis of the inputs: all that the search for latents needs to know of a part."""
    rows = part.rows @ basis
    return rows.mT @ (floored(part.metric * size) @ rows)


def _decoder(latents: Tensor, share: Tensor) -> Tensor:
    """``[R, E']``, which gives a part's best decoder of given latents, whatever its metric: ``up = W decoderᵀ``."""
    seen = latents * share
    decoder: Tensor = torch.linalg.solve(floored(seen @ latents.mT, _TINY), seen)
    return decoder


def _better(latents: Tensor, needed: list[Tensor], shares: list[Tensor]) -> Tensor:
    """The best latents Y for the best decoders of given ones: ``A₁ Y s₁ + A₂ Y s₂ = C``, a number at a time."""
    grams, target = [], torch.zeros_like(latents)
    for need, share in zip(needed, shares, strict=True):
        decoder = _decoder(latents, share)
        wanted = decoder @ need
        grams.append(wanted @ decoder.mT)
        target += wanted * share
    del decoder, wanted
    scale = float(sum(gram.diagonal().mean() for gram in grams))
    grams = [floored(gram / scale, _TINY) for gram in grams]
    factor, own, vectors = _together(grams[0], grams[1])
    basis = torch.linalg.solve_triangular(factor.mT, vectors, upper=True)
    del grams, factor, vectors
    found = (basis.mT @ target).div_(scale)
    del target
    found.div_((own[:, None] * shares[0] + (1 - own)[:, None] * shares[1]).clamp_min_(_TINY))
    better: Tensor = basis @ found
    return better


def _together(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F, s and V with ``A + B = F Fᵀ`` and ``A = F V diag(s) Vᵀ Fᵀ``, V being orthogonal and F lower triangular."""
    factor = torch.linalg.cholesky(first + second)
    half = torch.linalg.solve_triangular(factor, first, upper=False)
    both = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    half = (both + both.mT).mul_(0.5)
    del both
    share, vectors = torch.linalg.eigh(half)
    return factor, share.clamp(0, 1), vectors


def _total(matrices: list[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else matrices[0] + matrices[1]


def floored(matrix: Tensor, floor: float = _FLOOR) -> Tensor:
    """A positive semidefinite matrix kept away from singular."""
    ridge = floor * matrix.diagonal().mean().clamp_min(torch.finfo(matrix.dtype).tiny / _TINY)
    away = (matrix + matrix.mT).mul_(0.5)
    away.diagonal().add_(ridge)
    return away
