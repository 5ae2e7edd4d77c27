"""The basis of MLA's cached values in which rounding by blocks of channels loses least.

Engines round a cached latent in blocks of channels, each with a step that its largest number sets. Any invertible map
of the latent is free, because the projections around it absorb it, and so is a positive factor for each rotary pair.

With noise that is even over all channels, an error of cached values costs ``tr(B C Bᵀ) tr(B⁻ᵀ M B⁻¹)`` but for a
factor, where C is their covariance and M the metric of the loss. ``BᵀB = C⁻¹ # M``, the geometric mean, makes that
least, up to an orthogonal map. That map spreads what is large over all channels, so that all blocks have equal steps.

Shapes: R latent rank, P rotary dims, H heads, N content dims of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.conversion.codes.basis import ChannelStatistics
from headwise.conversion.solvers.device import CPU, moved
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.layer import Layer
from headwise.specs import LatentSpec

_LEAST_VARIANCE = 1e-6
"""A ridge on the covariance, as a share of its mean: channels that are zero get no infinite scale."""

_LEAST_COST = 1e-2
"""A ridge on the metric, as a share of its mean, which few tokens say little of where it is small."""


def evened(layer: Layer, statistics: ChannelStatistics) -> Layer:
    """The MLA layer, float64, that computes the same, and whose cached values bear rounding by blocks best.

    The variance of its latent is 1 on average over channels.

    Args:
        layer: MLA without a norm on its latent and without norms of queries and keys, its tensors in any dtype.
        statistics: of the layer.
    """
    spec, state = layer.spec, {name: tensor.double() for name, tensor in layer.state.items()}
    assert isinstance(spec, LatentSpec)
    assert not spec.latent_norm
    assert spec.qk_norm is None
    R, P, N, H = spec.kv_lora_rank, spec.qk_rope_head_dim, spec.qk_nope_head_dim, spec.num_heads
    values, metric = statistics.values.double(), statistics.metric
    centred = values[:, :R] - values[:, :R].mean(0)
    forward, inverse = even_basis(centred.mT @ centred / len(centred), metric[:R, :R])
    basis = torch.eye(R + P, dtype=torch.float64)
    basis[:R, :R] = forward
    state["kv_b_proj.weight"] = state["kv_b_proj.weight"] @ inverse
    if P:
        factor = _rotary_factors(values[:, R:].square().mean(0), metric[R:, R:].diagonal())
        basis[R:, R:] = factor.diag()
        for name in ("q_proj.weight", "q_proj.bias"):
            if name in state:
                by_head = torch.unflatten(state[name].reshape(H * (N + P), -1), 0, (H, N + P)).clone()
                by_head[:, N:] /= factor[:, None]
                state[name] = by_head.flatten(0, 1).view_as(state[name])
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
        if name in state:
            state[name] = basis @ state[name]
    return replace(layer, state=state)


def even_basis(covariance: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """The map of a latent to the basis in which even noise costs least, and its inverse; float64, ``[R, R]`` each.

    For example ``forward, inverse = even_basis(covariance, metric)``.

    Args:
        covariance: ``[R, R]``, float64, of the latent.
        metric: ``[R, R]``, float64, the mean outer product of the derivative of the loss by it.
    """
    C, M = _with_ridge(covariance, _LEAST_VARIANCE), _with_ridge(metric, _LEAST_COST)
    root, back = _powers(C)
    inner, _ = _powers(root @ M @ root)
    forward, inverse = _powers(back @ inner @ back)  # the root of C⁻¹ # M
    R = len(C)
    generator = torch.Generator().manual_seed(0)
    drawn = moved(torch.randn(R, R, generator=generator, dtype=torch.float64, device=CPU))
    turn, _ = torch.linalg.qr(drawn)
    size = (forward @ C @ forward).trace().div(R).sqrt()
    return turn @ forward / size, inverse @ turn.mT * size


def _rotary_factors(squares: Tensor, costs: Tensor) -> Tensor:
    """The factor of each rotary channel ``[P]``: c⁴ of a pair is its cost over its mean square, 1 on average.

    Args:
        squares: ``[P]``, mean squares of the rotary key, real parts first.
        costs: ``[P]``, the diagonal of the metric.
    """
    squares, costs = (torch.unflatten(each, 0, (2, -1)).sum(0) for each in (squares, costs))  # [P/2]
    squares, costs = (each + _LEAST_COST * each.mean() + NOTHING for each in (squares, costs))
    factors = (costs / squares) ** 0.25
    factors = factors / factors.log().mean().exp()
    return torch.cat((factors, factors))


def _with_ridge(matrix: Tensor, share: float) -> Tensor:
    """A symmetric matrix away from singular."""
    return matrix + (share * matrix.trace() / len(matrix) + NOTHING) * torch.eye(len(matrix), dtype=matrix.dtype)


def _powers(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a positive definite matrix, and the inverse of that root."""
    values, vectors = torch.linalg.eigh(matrix)
    root = values.clamp_min(values[-1] * torch.finfo(values.dtype).eps).sqrt()
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT
