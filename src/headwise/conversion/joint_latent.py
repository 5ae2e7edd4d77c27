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
    parts = [
        Part(part.rows, floored(part.metric * size), floored(part.moments / size))
        for part, size in zip(parts, sizes, strict=True)
    ]
    average = sum((part.moments for part in parts), torch.zeros_like(parts[0].moments)) / len(parts)
    factor = torch.linalg.cholesky(average)
    needed = sum((p.rows.mT @ p.metric @ p.rows for p in parts), torch.zeros_like(average))
    vectors = torch.linalg.eigh(factor.mT @ needed @ factor)[1].flip(-1)[:, :rank]
    down = torch.linalg.solve_triangular(factor.mT, vectors, upper=True).mT
    if len(parts) == 2 and not torch.equal(parts[0].moments, parts[1].moments):
        share, basis = _shared_basis(parts[0].moments, parts[1].moments)
        for _ in range(rounds):
            down = _best_down(parts, _ups(parts, down), share, basis)
    # Latents of mean square 1, uncorrelated: nothing is far larger than the rest in a cache of few bits.
    spread = torch.linalg.cholesky(floored(down @ average @ down.mT, _TINY))
    down = torch.linalg.solve_triangular(spread, down, upper=False)
    return down, _ups(parts, down)


def _ups(parts: list[Part], down: Tensor) -> list[Tensor]:
    """Each part's best decoder of given latents, whatever its metric."""
    ups = []
    for part in parts:
        seen = down @ part.moments
        ups.append(torch.linalg.solve(floored(seen @ down.mT, _TINY), seen @ part.rows.mT).mT)
    return ups


def _best_down(parts: list[Part], ups: list[Tensor], share: Tensor, basis: Tensor) -> Tensor:
    """The best latents for given decoders: ``A₁ down S₁ + A₂ down S₂ = C``, in the bases where all are diagonal."""
    first, second = (up.mT @ part.metric @ up for part, up in zip(parts, ups, strict=True))
    target = sum(
        (up.mT @ part.metric @ part.rows @ part.moments for part, up in zip(parts, ups, strict=True)),
        torch.zeros_like(parts[0].rows[:1]),
    )
    scale = float((first + second).diagonal().mean())
    own_share, own_basis = _shared_basis(floored(first / scale, _TINY), floored(second / scale, _TINY))
    weight = own_share[:, None] * share + (1 - own_share)[:, None] * (1 - share)
    return own_basis @ ((own_basis.mT @ (target / scale) @ basis) / weight.clamp_min(_TINY)) @ basis.mT


def _shared_basis(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """X with ``Xᵀ (A + B) X = 1`` and ``Xᵀ A X`` diagonal, and that diagonal."""
    factor = torch.linalg.cholesky(first + second)
    half = torch.linalg.solve_triangular(factor, first, upper=False)
    both = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    share, vectors = torch.linalg.eigh((both + both.mT) / 2)
    return share.clamp(0, 1), torch.linalg.solve_triangular(factor.mT, vectors, upper=True)


def floored(matrix: Tensor, floor: float = _FLOOR) -> Tensor:
    """A positive semidefinite matrix kept away from singular."""
    ridge = floor * matrix.diagonal().mean().clamp_min(torch.finfo(matrix.dtype).tiny / _TINY)
    return (matrix + matrix.mT) / 2 + ridge * torch.eye(len(matrix), dtype=matrix.dtype)
