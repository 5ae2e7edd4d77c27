"""Design the static code of an MLA layer's cache: the basis its values are coded in, and bits for each channel.

The basis is free: an invertible map of the latent is absorbed by the projections around it, and so is a complex
matrix for each rotary frequency. It is chosen such that channels are uncorrelated and an error of any of them costs
the same (the Karhunen–Loève basis in the metric of the layer's own output); bits then go where the variance is.

Shapes: T tokens of a window, R latent rank, P rotary dims, W = R + P cached values, E hidden.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import OUTLIER
from headwise.quantization import SINKS, TransformCode
from headwise.quantization.levels import levels, thresholds
from headwise.quantization.transform_code import blocks
from headwise.specs import LatentSpec

WIDTHS = (2, 3, 4, 5, 6, 8)
"""The numbers of bits of a channel. Fewer than 2 say only a sign: the rank is the better place to save."""

FLATTENED = 0.7
"""The power of a channel's variance by which bits are shared out: the metric says too little of weak channels."""

SAMPLE = 4096
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
            output = replace(layer, code=tap).output(inputs, rotation, torch.arange(len(inputs)))
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
        layer: an MLA layer with its tensors in any dtype.
        statistics: of the layer.
    """
    spec = layer.spec
    assert isinstance(spec, LatentSpec)
    R, P, N, H = spec.kv_lora_rank, spec.qk_rope_head_dim, spec.qk_nope_head_dim, spec.num_heads
    centred = (statistics.values - statistics.values.mean(0)).double()
    covariance = centred.mT @ centred / len(centred)
    metric = statistics.metric
    forward, inverse = _uncorrelated(covariance[:R, :R], metric[:R, :R])
    state = {name: tensor.double() for name, tensor in layer.state.items()}
    basis = torch.zeros(R + P, R + P, dtype=torch.float64)
    basis[:R, :R] = forward
    decoder = state["kv_b_proj.weight"] @ inverse
    channels = layer.channels
    if P:
        pairs, order = _rotary_basis(covariance[R:, R:], metric[R:, R:], layer.channels)
        basis[R:, R:] = _as_real(pairs)
        channels = [layer.channels[index] for index in order]
        query = torch.unflatten(state["q_proj.weight"], 0, (H, N + P)).clone()
        query[:, N:] = torch.linalg.inv(_as_real(pairs)).mT @ query[:, N:]
        state["q_proj.weight"] = query.flatten(0, 1)
        if "q_proj.bias" in state:
            bias = torch.unflatten(state["q_proj.bias"], 0, (H, N + P)).clone()
            bias[:, N:] = bias[:, N:] @ torch.linalg.inv(_as_real(pairs))
            state["q_proj.bias"] = bias.flatten()
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
        if name in state:
            state[name] = basis @ state[name]
    state["kv_b_proj.weight"] = decoder
    return replace(layer, state=state, channels=channels), basis


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


def _rotary_basis(covariance: Tensor, metric: Tensor, channels: Sequence[int]) -> tuple[Tensor, list[int]]:
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
    order = torch.argsort(re + im, descending=True).tolist()
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
        scales: by number of bits, ``[W]``.
        errors: by number of bits, ``[W]``: mean squared errors in the channel's own unit.
        variance: ``[W]``.
    """

    offset: Tensor
    scales: dict[int, Tensor]
    errors: dict[int, Tensor]
    variance: Tensor


def fit_scales(values: Tensor, parts: tuple[int, ...]) -> ScaleTable:
    """Fit the scales of all channels.

    Args:
        values: ``[n, W]``, cached values in the basis of the code.
        parts: see `TransformCode`.
    """
    sample = values[:: max(1, len(values) // SAMPLE)].float()
    offset = sample.mean(0)
    centred = sample - offset
    deviation = centred.square().mean(0).sqrt().clamp_min(1e-20)
    bare = TransformCode(offset, deviation, (2,), (len(offset),), parts)
    gains = _gain_of(bare, centred / deviation)  # [n, W]
    normal = centred / deviation / gains
    weight = gains.square()
    scales, errors = {}, {}
    for bits in WIDTHS:
        table, edges = levels(bits), thresholds(bits)
        best, best_ratio = torch.full_like(offset, torch.inf), torch.ones_like(offset)
        for ratio in torch.linspace(0.6, 1.6, 16).tolist():
            error = (table[torch.bucketize(normal / ratio, edges)] * ratio - normal).square().mul(weight).mean(0)
            is_better = error < best
            best, best_ratio = torch.where(is_better, error, best), torch.where(is_better, ratio, best_ratio)
        scales[bits], errors[bits] = best_ratio * deviation, best * deviation.square()
    return ScaleTable(offset, scales, errors, deviation.square())


def _gain_of(code: TransformCode, normal: Tensor) -> Tensor:
    from headwise.quantization.transform_code import _gain

    return code._spread(_gain(code.gains(normal)))


def allot(table: ScaleTable, sections: tuple[int, ...], parts: tuple[int, ...], token_bytes: int) -> TransformCode:
    """The code with so many bytes a token, or the next fewer, that lets in least error.

    Args:
        table: of `fit_scales`.
        sections: see `TransformCode`.
        parts: see `TransformCode`.
        token_bytes: the bytes of a token, with one for its gains.
    """
    spans = list(blocks(sections))
    costs = {
        bits: [float((error / table.variance * table.variance**FLATTENED)[a:b].sum()) for a, b in spans]
        for bits, error in table.errors.items()
    }
    bits = [WIDTHS[0]] * len(spans)
    budget = 8 * (token_bytes - 1) - sum(WIDTHS[0] * (b - a) for a, b in spans)
    heap: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        place = WIDTHS.index(bits[index]) + 1
        if place < len(WIDTHS):
            now, more = WIDTHS[place - 1], WIDTHS[place]
            price = (more - now) * (spans[index][1] - spans[index][0])
            heapq.heappush(heap, (-(costs[now][index] - costs[more][index]) / price, index))

    for index in range(len(spans)):
        offer(index)
    while heap:
        _, index = heapq.heappop(heap)
        more = WIDTHS[WIDTHS.index(bits[index]) + 1]
        price = (more - bits[index]) * (spans[index][1] - spans[index][0])
        if price <= budget:
            budget -= price
            bits[index] = more
            offer(index)
    by_channel = torch.cat([torch.full((b - a,), n) for n, (a, b) in zip(bits, spans, strict=True)])
    scale = torch.stack([table.scales[n] for n in WIDTHS])[torch.searchsorted(torch.tensor(WIDTHS), by_channel)]
    return TransformCode(
        table.offset, scale.gather(0, torch.arange(len(by_channel))[None])[0] if scale.dim() > 2 else
        torch.stack([table.scales[int(n)][i] for i, n in enumerate(by_channel)]), tuple(bits), sections, parts)


def design(
    layer: Layer,
    windows: Callable[[], Iterable[Tensor]],
    rotation: Rotation | None,
    root: Tensor,
    token_bytes: int,
) -> Layer:
    """The layer in the basis of its code, with the code."""
    spec = layer.spec
    assert isinstance(spec, LatentSpec)
    R, P = spec.kv_lora_rank, spec.qk_rope_head_dim
    statistics = channel_statistics(layer, windows(), rotation, root)
    turned, basis = decorrelated(layer, statistics)
    values = statistics.values.double() @ basis.mT
    sections = (R, P // 2, P // 2) if P else (R,)
    parts = (R, P) if P else (R,)
    table = fit_scales(values, parts)
    return replace(turned.float(), code=allot(table, sections, parts, token_bytes))
