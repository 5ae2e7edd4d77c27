"""Design the static code of an MLA layer's cache: the basis its values are coded in, and bits for each channel.

The basis is free: an invertible map of the latent is absorbed by the projections around it, and so is a complex
matrix for each rotary frequency. It is chosen such that channels are uncorrelated and an error of any of them costs
the same (the Karhunen–Loève basis in the metric of the layer's own output); bits then go where the variance is.

Shapes: T tokens of a window, R latent rank, P rotary dims, W = R + P cached values, E hidden.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import OUTLIER
from headwise.quantization import SINKS, TransformCode
from headwise.quantization.transform_code import BLOCK, blocks
from headwise.specs import GroupedSpec, LatentSpec

WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""The numbers of bits of a channel. None may be dropped: the rank is the better place to save."""

RATIOS = (0.9, 1.0, 1.12, 1.3)
"""Scales that are tried, as multiples of a channel's standard deviation."""

FLATTENED = 0.85
"""The power of a channel's variance by which bits are shared out: the metric says too little of weak channels."""

SAMPLE = 1024
"""The number of tokens that scales are fitted to."""


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
    """

    values: Tensor
    metric: Tensor


def channel_statistics(
    layer: Layer, windows: Iterable[Tensor], rotation: Rotation | None, root: Tensor, *, seed: int = 0
) -> ChannelStatistics:
    """Collect a layer's cached values, and the metric of errors in them, on some windows.

    The metric is that of the layer's own output: one backward pass from a random direction of the root of its
    sensitivity gives the derivative by every cached value, and the mean outer product of those is the expectation.

    Args:
        layer: an MLA layer, float32.
        windows: the inputs ``[T, E]`` of each.
        rotation: the rotary tables of a window.
        root: ``[E, E]``, the root of the sensitivity.
        seed: of the random directions.
    """
    generator = torch.Generator().manual_seed(seed)
    values, gradients = [], []
    for inputs in windows:
        tap = _Tap()
        with torch.enable_grad():
            output = replace(layer, code=cast(TransformCode, tap)).output(inputs, rotation, torch.arange(len(inputs)))
            direction = torch.randn(len(inputs), root.shape[1], generator=generator) @ root.mT
            (gradient,) = torch.autograd.grad((output * direction).sum(), tap.values)
        values.append(tap.values.detach()[SINKS:])
        gradients.append(gradient[SINKS:])
    all_gradients = torch.cat(gradients)
    size = all_gradients.square().sum(-1)
    limit = OUTLIER * size.median()
    all_gradients *= (limit / size.clamp_min(limit)).sqrt()[:, None]
    metric = (all_gradients.mT @ all_gradients).double() / len(all_gradients)
    return ChannelStatistics(torch.cat(values), metric)


def decorrelated(layer: Layer, statistics: ChannelStatistics) -> tuple[Layer, Tensor]:
    """The layer in the basis for its code, and the ``[W, W]`` map of cached values to that basis.

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
        for name in ("q_proj.weight", "q_proj.bias"):
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
    """The map to channels, most important first, that are uncorrelated and cost the same, and its inverse.

    Args:
        covariance: ``[n, n]``, real or complex.
        metric: ``[n, n]``.
    """
    values, vectors = torch.linalg.eigh(metric)
    root = values.clamp_min(1e-6 * float(values[-1].clamp_min(1e-300))).sqrt()
    forward = (vectors * root) @ vectors.mH
    backward = (vectors / root) @ vectors.mH
    _, directions = torch.linalg.eigh(forward @ covariance @ forward)
    directions = directions.flip(1)
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
    order = list(range(pairs)) if keeps_order else torch.argsort(re + im, descending=True).tolist()
    return whole[order], order


def _as_complex(matrix: Tensor) -> Tensor:
    """The Hermitian matrix ``[n, n]`` of complex pairs, of a real one ``[2n, 2n]``: real parts first."""
    n = len(matrix) // 2
    a, b, c, d = matrix[:n, :n], matrix[:n, n:], matrix[n:, :n], matrix[n:, n:]
    return torch.complex(a + d, c - b)


def _as_real(matrix: Tensor) -> Tensor:
    """A complex map ``[n, n]`` as a real one ``[2n, 2n]`` of real parts and imaginary parts."""
    return torch.cat((torch.cat((matrix.real, -matrix.imag), 1), torch.cat((matrix.imag, matrix.real), 1)), 0)


@dataclass(frozen=True)
class ScaleTable:
    """The best scale of every channel at each number of bits, and the error it leaves.

    Attributes:
        offset: ``[W]``.
        scales: ``[9, W]``, by number of bits.
        errors: ``[9, W]``, mean squared errors in the channel's own unit.
        variance: ``[W]``.
    """

    offset: Tensor
    scales: Tensor
    errors: Tensor
    variance: Tensor


def fit_scales(values: Tensor, parts: tuple[int, ...]) -> ScaleTable:
    """Fit the scales of all channels, each number of bits by itself.

    Args:
        values: ``[n, W]``, cached values in the basis of the code.
        parts: see `TransformCode`.
    """
    offset = values.mean(0).float()
    sample = values[:: max(1, len(values) // SAMPLE)].float()
    deviation = (values - values.mean(0)).square().mean(0).sqrt().float().clamp_min(1e-20)
    width = len(offset)
    scales, errors = torch.ones(9, width), torch.full((9, width), torch.inf)
    for bits in WIDTHS:
        for ratio in RATIOS:
            code = TransformCode(offset, deviation * ratio, (bits,) * -(-width // BLOCK), (width,), parts)
            error = (code.rounded(sample) - sample).square().mean(0)
            is_better = error < errors[bits]
            errors[bits] = torch.where(is_better, error, errors[bits])
            scales[bits] = torch.where(is_better, code.scale, scales[bits])
    return ScaleTable(offset, scales, errors, deviation.square())


def allot(table: ScaleTable, sections: tuple[int, ...], parts: tuple[int, ...], token_bytes: int) -> TransformCode:
    """The code with so many bytes a token, or the next fewer, that lets in least error.

    Args:
        table: of `fit_scales`.
        sections: see `TransformCode`.
        parts: see `TransformCode`.
        token_bytes: the bytes of a token, with one for its gains.
    """
    spans = list(blocks(sections))
    shares = table.errors * table.variance ** (FLATTENED - 1)
    costs = torch.stack([shares[:, a:b].sum(1) for a, b in spans], 1).tolist()  # [9][blocks]
    bits = [WIDTHS[0]] * len(spans)
    budget = 8 * (token_bytes - 1) - sum(WIDTHS[0] * (b - a) for a, b in spans)
    heap: list[tuple[float, int, int]] = []

    def offer(index: int) -> None:
        steps = [more for more in WIDTHS if more > bits[index]]
        if steps:
            width = spans[index][1] - spans[index][0]
            gains = [
                ((costs[bits[index]][index] - costs[more][index]) / (more - bits[index]), more) for more in steps
            ]
            gain, more = max(gains)
            heapq.heappush(heap, (-gain / width, index, more))

    for index in range(len(spans)):
        offer(index)
    while heap:
        _, index, more = heapq.heappop(heap)
        price = (more - bits[index]) * (spans[index][1] - spans[index][0])
        if price <= budget:
            budget -= price
            bits[index] = more
            offer(index)
    by_channel = torch.tensor([n for n, (a, b) in zip(bits, spans, strict=True) for _ in range(a, b)])
    scale = table.scales.gather(0, by_channel[None])[0]
    return TransformCode(table.offset, scale, tuple(bits), sections, parts)


@dataclass(frozen=True)
class Design:
    """A layer in the basis of its code, and all that codes of any size are made from.

    Attributes:
        layer: the layer, float32, without a code.
        table: the scales of its channels.
    """

    layer: Layer
    table: ScaleTable

    def coded(self, token_bytes: int) -> Layer:
        """The layer with a code of so many bytes a token, or the next fewer."""
        return replace(self.layer, code=allot(self.table, *_shape(self.layer.spec), token_bytes))


def design(layer: Layer, windows: Iterable[Tensor], rotation: Rotation | None, root: Tensor) -> Design:
    """Design the code of an MLA layer's cache.

    Args:
        layer: the layer, float32.
        windows: the inputs ``[T, E]`` of each window.
        rotation: the rotary tables of a window.
        root: ``[E, E]``, the root of the sensitivity.
    """
    statistics = channel_statistics(layer, windows, rotation, root)
    turned, basis = decorrelated(layer, statistics)
    values = statistics.values.double() @ basis.mT
    return Design(turned.float(), fit_scales(values, _shape(layer.spec)[1]))


def _shape(spec: GroupedSpec | LatentSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sections and parts of a layer's code; see `TransformCode`."""
    if isinstance(spec, LatentSpec):
        R, P = spec.kv_lora_rank, spec.qk_rope_head_dim
        return ((R, P // 2, P // 2), (R, P)) if P else ((R,), (R,))
    K, D, V = spec.num_kv_heads, spec.head_dim, spec.value_dim
    return (*(D,) * K, *(V,) * K), (K * D, K * V)
