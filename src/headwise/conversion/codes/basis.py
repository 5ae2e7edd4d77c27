"""The basis that a layer's cache is coded in.

The basis is free: an invertible map of the latent is absorbed by the projections around it, and so is a complex
matrix for each rotary frequency. It is chosen such that channels are uncorrelated and an error of any of them costs
the same (the Karhunen–Loève basis in the metric of the layer's own output); bits then go where the variance is.

Shapes: T tokens of a window, E hidden, W cached values: R + P of MLA, a latent and a
rotary key, or K · (D + V) of MHA, GQA and MQA, keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from headwise.conversion.solvers.device import CPU, moved
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import OUTLIER
from headwise.models.specs import GroupedSpec, LatentSpec
from headwise.runtime.quantization import SINKS, TransformCode


class _Tap:
    """In the place of a code: keeps the cached values of a window, and lets a gradient reach them."""

    def __init__(self) -> None:
        self.values = torch.empty(0)

    def rounded(self, values: Tensor) -> Tensor:
        self.values = values.detach().requires_grad_()
        return self.values


@dataclass(frozen=True)
class ChannelStatistics:
    """What the code of a layer is designed by.

    Attributes:
        values: float32 ``[n, W]``, cached values of tokens behind the sinks, before rotation.
        metric: float64 ``[W, W]``, the mean outer product of the derivative of the output's cost by them.
        importance: float32 ``[n]``, the cost of an error of each token over the mean: the squared length of its
            derivative, whitened by the metric. That of the tokens that attention rests on is far above the mean.
    """

    values: Tensor
    metric: Tensor
    importance: Tensor


def channel_statistics(
    layer: Layer, windows: Iterable[tuple[Tensor, Rotation | None]], root: Tensor, *, seed: int = 0
) -> ChannelStatistics:
    """Collect a layer's cached values, and the metric of errors in them, on some windows.

    The metric is that of the layer's own output: one backward pass from a random direction of the root of its
    sensitivity gives the derivative by every cached value, and the mean outer product of those is the expectation.

    Args:
        layer: MLA, or MHA, GQA or MQA; float32.
        windows: the inputs ``[T, E]`` of each, and its rotary tables.
        root: ``[E, E]``, the root of the sensitivity.
        seed: of the random directions.

    Returns:
        The statistics; gradients whose square is above `OUTLIER` medians count as so many in the metric.

    Raises:
        torch.linalg.LinAlgError: values are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    values, gradients = [], []
    for inputs, rotation in windows:
        tap = _Tap()
        with torch.enable_grad():
            output = replace(layer, code=cast(TransformCode, tap)).output(inputs, rotation, torch.arange(len(inputs)))
            drawn = torch.randn(len(inputs), root.shape[1], generator=generator, device=CPU)
            direction = moved(drawn) @ root.mT
            (gradient,) = torch.autograd.grad((output * direction).sum(), tap.values)
        values.append(tap.values.detach()[SINKS:])
        gradients.append(gradient[SINKS:])
    all_gradients = torch.cat(gradients)
    size = all_gradients.square().sum(-1)
    limit = OUTLIER * size.median()
    limited = all_gradients * (limit / size.clamp_min(limit).clamp_min(torch.finfo(size.dtype).tiny)).sqrt()[:, None]
    metric = (limited.mT @ limited).double() / len(limited)
    ridge = (1e-6 * metric.trace() / len(metric) + NOTHING) * torch.eye(len(metric), dtype=metric.dtype)
    whitened = torch.linalg.solve_triangular(
        torch.linalg.cholesky(metric + ridge).float(), all_gradients.mT, upper=False
    )
    importance = whitened.square().mean(0)
    mean = importance.mean()
    # Where nothing depends on the layer's output, all tokens are alike.
    importance = torch.ones_like(importance) if mean == 0 else importance / mean
    return ChannelStatistics(torch.cat(values), metric, importance)


def decorrelated(layer: Layer, statistics: ChannelStatistics) -> tuple[Layer, Tensor]:
    """The layer in the basis for its code, and the map of cached values to that basis, ``[W, W]``; both float64.

    Args:
        layer: the layer with its tensors in any dtype.
        statistics: of the layer.
    """
    centred = (statistics.values - statistics.values.mean(0)).double()
    covariance = centred.mT @ centred / len(centred)
    state = {name: tensor.double() for name, tensor in layer.state.items()}
    if isinstance(layer.spec, LatentSpec):
        return _decorrelated_latent(replace(layer, state=state), covariance, statistics.metric)
    return _decorrelated_heads(replace(layer, state=state), covariance, statistics.metric)


def _decorrelated_latent(layer: Layer, covariance: Tensor, metric: Tensor) -> tuple[Layer, Tensor]:
    """`decorrelated` for MLA: any map of the latent, and a complex one of the rotary pairs of each frequency."""
    spec, state = layer.spec, dict(layer.state)
    assert isinstance(spec, LatentSpec)
    R, P, N, H = spec.kv_lora_rank, spec.qk_rope_head_dim, spec.qk_nope_head_dim, spec.num_heads
    forward, inverse = _uncorrelated(covariance[:R, :R], metric[:R, :R])
    basis = torch.zeros(R + P, R + P, dtype=torch.float64)
    basis[:R, :R] = forward
    state["kv_b_proj.weight"] = state["kv_b_proj.weight"] @ inverse
    channels = layer.channels
    if P:
        pairs, order = _rotary_basis(covariance[R:, R:], metric[R:, R:], layer.channels)
        basis[R:, R:] = _as_real(pairs)
        channels = [layer.channels[index] for index in order]
        back = torch.linalg.inv(_as_real(pairs)).mT
        for name in ("q_proj.weight", "q_proj.bias") if spec.qk_norm is None else ("q_b_proj.weight",):
            if name in state:
                query = torch.unflatten(state[name].view(H * (N + P), -1), 0, (H, N + P)).clone()
                query[:, N:] = back @ query[:, N:]
                state[name] = query.flatten(0, 1).view_as(state[name])
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
        if name in state:
            state[name] = basis @ state[name]
    return replace(layer, state=state, channels=channels), basis


def _decorrelated_heads(layer: Layer, covariance: Tensor, metric: Tensor) -> tuple[Layer, Tensor]:
    """`decorrelated` for MHA, GQA and MQA: any map of a head's values and unrotated keys, a complex number a pair."""
    spec, state = layer.spec, dict(layer.state)
    assert isinstance(spec, GroupedSpec)
    H, K, D, V = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    maps = []
    for head in range(K):
        at = slice(head * D, (head + 1) * D)
        maps.append(_key_basis(spec, covariance[at, at], metric[at, at]))
    key_back = torch.stack([torch.linalg.inv(forward).mT for forward in maps]).repeat_interleave(H // K, 0)
    value_back = []
    for head in range(K):
        at = slice(K * D + head * V, K * D + (head + 1) * V)
        forward, inverse = _uncorrelated(covariance[at, at], metric[at, at])
        maps.append(forward)
        value_back.append(inverse)
    keys, values = torch.stack(maps[:K]), torch.stack(maps[K:])
    output = torch.stack(value_back).repeat_interleave(H // K, 0)
    for name, heads in (("q_proj", key_back), ("k_proj", keys), ("v_proj", values)):
        for part in (f"{name}.weight", f"{name}.bias"):
            if part in state:
                rows = heads @ torch.unflatten(state[part].reshape(len(state[part]), -1), 0, (len(heads), -1))
                state[part] = rows.flatten(0, 1).view_as(state[part])
    projection = torch.unflatten(state["o_proj.weight"], 1, (H, V)).transpose(0, 1)  # [H, E, V]
    state["o_proj.weight"] = (projection @ output).transpose(0, 1).flatten(1)
    return replace(layer, state=state), torch.block_diag(*maps)  # type: ignore[no-untyped-call]


def _key_basis(spec: GroupedSpec, covariance: Tensor, metric: Tensor) -> Tensor:
    """The map of one head's keys ``[D, D]``: dims stay in their pairs, which rotate."""
    D = spec.head_dim
    if spec.qk_norm is not None:  # a norm stands between the projection and the key
        return torch.eye(D, dtype=torch.float64)
    rotated = 0 if spec.rope is None else spec.rope.dim
    basis = torch.eye(D, dtype=torch.float64)
    if rotated:
        assert spec.rope is not None
        pairs = rotated // 2
        at = torch.arange(rotated)
        if spec.rope.interleaved:
            at = torch.unflatten(at, 0, (pairs, 2)).mT.flatten()  # real parts first
        whole, _ = _rotary_basis(covariance[at][:, at], metric[at][:, at], range(pairs), keeps_order=True)
        basis[at[:, None], at] = _as_real(whole)
    if rotated < D:
        basis[rotated:, rotated:] = _uncorrelated(covariance[rotated:, rotated:], metric[rotated:, rotated:])[0]
    return basis


def _uncorrelated(covariance: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """The map to channels, least important first, that are uncorrelated and cost the same, and its inverse.

    Args:
        covariance: ``[n, n]``, real or complex.
        metric: ``[n, n]``.
    """
    # The path of a trellis code is the freer the more codes precede it: important channels come last.
    values, vectors = torch.linalg.eigh(metric)
    most = float(values[-1])
    # Where nothing depends on the channels, all cost the same.
    root = values.clamp_min(1e-6 * most).sqrt() if most > NOTHING else torch.ones_like(values)
    forward = (vectors * root) @ vectors.mH
    backward = (vectors / root) @ vectors.mH
    _, directions = torch.linalg.eigh(forward @ covariance @ forward)
    return directions.mH @ forward, backward @ directions


def _rotary_basis(
    covariance: Tensor, metric: Tensor, channels: Sequence[int], *, keeps_order: bool = False
) -> tuple[Tensor, list[int]]:
    """A complex map of rotary pairs ``[P/2, P/2]`` that mixes those of one frequency alone, and their new order.

    Returns:
        The map, whose rows are in the new order; and for each row the pair that it replaces, of the same frequency.
    """
    pairs = len(channels)
    whole = torch.zeros(pairs, pairs, dtype=torch.complex128)
    cov, met = _as_complex(covariance), _as_complex(metric)
    for channel in sorted(set(channels)):
        at = torch.tensor([index for index, own in enumerate(channels) if own == channel])
        forward, _ = _uncorrelated(cov[at][:, at], met[at][:, at])
        whole[at[:, None], at] = forward
    real = _as_real(whole)
    mapped = real @ covariance @ real.mT  # the phase of each pair is turned such that its real part varies most
    re, im = mapped.diagonal()[:pairs], mapped.diagonal()[pairs:]
    cross = mapped[:pairs, pairs:].diagonal()
    angle = 0.5 * torch.atan2(2 * cross, re - im)
    whole = torch.exp(-1j * angle)[:, None] * whole
    order = list(range(pairs)) if keeps_order else torch.argsort(re + im).tolist()
    return whole[order], order


def _as_complex(matrix: Tensor) -> Tensor:
    """The Hermitian matrix ``[n, n]`` of complex pairs, of a real one ``[2n, 2n]``: real parts first."""
    n = len(matrix) // 2
    a, b, c, d = matrix[:n, :n], matrix[:n, n:], matrix[n:, :n], matrix[n:, n:]
    return torch.complex(a + d, c - b)


def _as_real(matrix: Tensor) -> Tensor:
    """A complex map ``[n, n]`` as a real one ``[2n, 2n]`` of real parts and imaginary parts."""
    return torch.cat((torch.cat((matrix.real, -matrix.imag), 1), torch.cat((matrix.imag, matrix.real), 1)), 0)
