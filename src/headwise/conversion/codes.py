"""The code of a converted layer's cache: its basis, and the scales, bits and bytes of its channels.

The basis is free: an invertible map of the latent is absorbed by the projections around it, and so is a complex
matrix for each rotary frequency. It is chosen such that channels are uncorrelated and an error of any of them costs
the same (the Karhunen–Loève basis in the metric of the layer's own output); bits then go where the variance is. A
layer spends a whole number of bytes, and what is left of its share goes to the next layer.

Shapes: n tokens, T tokens of a window, E hidden, W cached values: R + P of MLA, a latent and a rotary key, or K · (D
+ V) of MHA, GQA and MQA, keys and values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from headwise.base.threads import map_in_threads
from headwise.conversion.solvers.device import CPU, to_device
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.layer import Layer, Rotation, grouped_spec, latent_spec, mixed_values
from headwise.conversion.solvers.refit import OUTLIER
from headwise.models.specs import GroupedSpec, LatentSpec
from headwise.runtime.kernels.native.abi import CHANNELS
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import blocks, code_shape
from headwise.runtime.quantization.trellis import encode


class _Tap:
    """A stand-in for a code: it keeps the cached values of a window, and lets a gradient reach them."""

    def __init__(self) -> None:
        self.values = torch.empty(0)

    def rounded(self, values: Tensor, is_first: Tensor) -> Tensor:
        self.values = values.detach().requires_grad_()
        return self.values


@dataclass(frozen=True)
class ChannelStatistics:
    """The measurements that the code of a layer is designed by.

    Attributes:
        values: the cached values of all but first tokens, before rotation, float32 ``[n, W]``.
        first: the cached values of tokens that each begin a text, float32 ``[m, W]``.
        usual_first: the value about which those of first tokens lie, float32 ``[W]``.
        metric: the mean outer product of the derivative of the output's cost by these values, float64 ``[W, W]``.
        importance: the cost of an error of each token over the mean, float32 ``[n]``: the squared length of its
            derivative, whitened by the metric. That of the tokens that attention rests on is far above the mean.
    """

    values: Tensor
    first: Tensor
    usual_first: Tensor
    metric: Tensor
    importance: Tensor


def channel_statistics(
    layer: Layer,
    windows: Iterable[tuple[Tensor, Rotation | None]],
    factor: Tensor,
    alone: Tensor | None = None,
    *,
    begin_alike: bool = False,
) -> ChannelStatistics:
    """Collect a layer's cached values, and the metric of errors in them, on some windows.

    The metric is that of the layer's own output: one backward pass from a random direction of the factor of its
    sensitivity gives the derivative by every cached value, and the mean outer product of those is the expectation.

    Args:
        layer: the layer, float32: MLA, MHA, GQA or MQA.
        windows: the inputs ``[T, E]`` of the layer on each window, and the window's rotary tables.
        factor: a factor L of the layer's sensitivity L Lᵀ, ``[E, E]``.
        alone: the inputs ``[m, E]`` of the layer at tokens that each begin a text, besides those of the windows;
            None for none.
        begin_alike: whether all windows begin with one token, which the tokenizer puts before any text.

    Returns:
        The statistics of the cached values; gradients whose square is above `OUTLIER` medians count as so many in the
        metric.

    Raises:
        torch.linalg.LinAlgError: cached values are not finite.
    """
    generator = torch.Generator().manual_seed(0)
    values: list[Tensor] = []
    first: list[Tensor] = []
    gradients: list[Tensor] = []
    rotation = None
    to_mixed = factor.mT @ layer.state["o_proj.weight"]  # [E, H·V]

    def drawn() -> Iterator[tuple[Tensor, Rotation | None, Tensor]]:
        """Each window, its rotary tables and random numbers ``[T, E]``, which are drawn in this thread, in order."""
        nonlocal rotation
        for inputs, rotation in windows:
            yield inputs, rotation, torch.randn(len(inputs), factor.shape[1], generator=generator, device=CPU)

    def measured(window: tuple[Tensor, Rotation | None, Tensor]) -> tuple[Tensor, Tensor]:
        """The cached values of a window, and their derivative, both ``[T, W]``."""
        inputs, rotation, direction = window
        tap, rows = _Tap(), torch.arange(len(inputs))
        with torch.enable_grad():
            heads = replace(layer, code=cast(TransformCode, tap)).heads(inputs, rows, rotation)
            mixed = mixed_values(heads, layer.spec, rows)  # [T, H·V]
            (gradient,) = torch.autograd.grad(mixed, tap.values, to_device(direction) @ to_mixed)
        return tap.values.detach(), gradient

    for states, gradient in map_in_threads(measured, drawn()):
        values.append(states[1:])
        first.append(states[:1])
        gradients.append(gradient[1:])
    if alone is not None:
        tap = _Tap()
        replace(layer, code=cast(TransformCode, tap)).heads(alone, torch.arange(1), rotation)
        first.append(tap.values.detach())
    all_first, all_gradients = torch.cat(first), torch.cat(gradients)
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
    # Where nothing depends on the layer's output, all tokens count equally.
    importance = torch.ones_like(importance) if mean == 0 else importance / mean
    usual_first = (first[0] if begin_alike else all_first).mean(0)
    return ChannelStatistics(torch.cat(values), all_first, usual_first, metric, importance)


def decorrelated(layer: Layer, statistics: ChannelStatistics) -> tuple[Layer, Tensor]:
    """The layer in the basis for its code, and the map of cached values to that basis, ``[W, W]``; both float64.

    Args:
        layer: the layer with its tensors in any dtype.
        statistics: the statistics that `channel_statistics` collected of the layer.
    """
    centred = (statistics.values - statistics.values.mean(0)).double()
    covariance = centred.mT @ centred / len(centred)
    state = {name: tensor.double() for name, tensor in layer.state.items()}
    if isinstance(layer.spec, LatentSpec):
        return _decorrelated_latent(replace(layer, state=state), covariance, statistics.metric)
    return _decorrelated_heads(replace(layer, state=state), covariance, statistics.metric)


def _decorrelated_latent(layer: Layer, covariance: Tensor, metric: Tensor) -> tuple[Layer, Tensor]:
    """`decorrelated` for MLA: any map of the latent, and a complex one of the rotary pairs of each frequency."""
    spec, state = latent_spec(layer.spec), dict(layer.state)
    R, P, N, H = spec.kv_lora_rank, spec.qk_rope_head_dim, spec.qk_nope_head_dim, spec.num_heads
    forward, inverse = _uncorrelated(covariance[:R, :R], metric[:R, :R])
    basis = torch.zeros(R + P, R + P, dtype=torch.float64)
    basis[:R, :R] = forward
    # The decoder undoes the map of the latent, which the projection to it makes at the end.
    state["kv_b_proj.weight"] = state["kv_b_proj.weight"] @ inverse
    channels = layer.channels
    if P:
        pairs, order = _rotary_basis(covariance[R:, R:], metric[R:, R:], layer.channels)
        basis[R:, R:] = _as_real(pairs)
        channels = [layer.channels[index] for index in order]
        # Queries undo the map of the rotary pairs: scores stay as they are.
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
    spec, state = grouped_spec(layer.spec), dict(layer.state)
    H, K, D, V = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    unit, maps, changed = 1.0, [], []
    if spec.qk_norm is None:
        for head in range(K):
            at = slice(head * D, (head + 1) * D)
            maps.append(_key_basis(spec, covariance[at, at], metric[at, at]))
        back = torch.stack([torch.linalg.inv(forward).mT for forward in maps]).repeat_interleave(H // K, 0)
        changed = [("q_proj", back), ("k_proj", torch.stack(maps))]
    else:
        factors, unit = _key_factors(spec, metric.diagonal()[: K * D].view(K, D))
        maps += [torch.diag(own) for own in factors]
        of_queries = 1 / factors.repeat_interleave(H // K, 0)
        for name, own in (("q_norm.weight", of_queries), ("k_norm.weight", factors)):
            state[name] = state[name] * (own[0] if spec.qk_norm == "head" else own.flatten())
    value_back = []
    for head in range(K):
        at = slice(K * D + head * V, K * D + (head + 1) * V)
        forward, inverse = _uncorrelated(covariance[at, at], metric[at, at])
        maps.append(forward / unit)
        value_back.append(inverse * unit)
    output = torch.stack(value_back).repeat_interleave(H // K, 0)
    for name, heads in (*changed, ("v_proj", torch.stack(maps[K:]))):
        for part in (f"{name}.weight", f"{name}.bias"):
            if part in state:
                rows = heads @ torch.unflatten(state[part].reshape(len(state[part]), -1), 0, (len(heads), -1))
                state[part] = rows.flatten(0, 1).view_as(state[part])
    projection = torch.unflatten(state["o_proj.weight"], 1, (H, V)).transpose(0, 1)  # [H, E, V]
    state["o_proj.weight"] = (projection @ output).transpose(0, 1).flatten(1)
    return replace(layer, state=state), torch.block_diag(*maps)  # type: ignore[no-untyped-call]


def _key_factors(spec: GroupedSpec, costs: Tensor) -> tuple[Tensor, float]:
    """The factors of keys behind a norm, whose weights take them, such that an error costs about the same in each.

    Nothing but a factor passes a norm. The dims of a rotary pair share one, and so do all heads where the norm does.

    Args:
        spec: the layer.
        costs: the cost of an error of each channel, ``[K, D]``.

    Returns:
        The factors ``[K, D]``, of geometric mean 1, and what they are short of the root of the costs.
    """
    rotated = 0 if spec.rope is None else spec.rope.dim
    costs = costs.clone()
    if rotated:
        assert spec.rope is not None
        order = (rotated // 2, 2) if spec.rope.interleaved else (2, rotated // 2)
        pairs = torch.unflatten(costs[:, :rotated], 1, order)
        costs[:, :rotated] = pairs.mean(order.index(2) + 1, keepdim=True).expand_as(pairs).flatten(1)
    if spec.qk_norm == "head":
        costs = costs.mean(0, keepdim=True).expand_as(costs)
    most = float(costs.max())
    roots = costs.clamp_min(1e-6 * most).sqrt() if most > NOTHING else torch.ones_like(costs)
    unit = float(roots.log().mean().exp())
    return roots / unit, unit


def _key_basis(spec: GroupedSpec, covariance: Tensor, metric: Tensor) -> Tensor:
    """The map of one head's keys ``[D, D]``: dims stay in their pairs, which rotate."""
    D = spec.head_dim
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
        covariance: the covariance of the channels, ``[n, n]``, real or complex.
        metric: the cost of an error of the channels, ``[n, n]``.
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
    # An error of a pair costs what its two parts do together: each of them half of it.
    cov, met = _as_complex(covariance), _as_complex(metric) / 2
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


WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""The numbers of bits of a channel. None may be dropped: the rank is the better place to save."""

EXPECTED_RATIOS = tuple(0.8 * 1.12**k for k in range(16))
"""Scales whose errors are estimated, as multiples of a channel's standard deviation. Some channels are near 0 for
most tokens and far from it for a few."""

RATIOS = (0.6, 0.8, 1.0, 1.25, 1.6, 2.4)
"""Scales whose errors are measured, as multiples of those of least expected error."""

FLATTENED = 0.85
"""The power of a channel's variance by which bits are shared out: the metric says too little of weak channels."""

_LEAST = 1e-20
"""The least standard deviation of a channel: one that never varies, such as behind a norm with a weight of 0, has a
scale too."""

SAMPLE = 1024
"""The number of tokens that scales are fitted to."""


@dataclass(frozen=True)
class ScaleTable:
    """The scale of every channel that is expected to suit it best at each number of bits, and the error it leaves.

    Attributes:
        offset: the offset of each channel, ``[W]``.
        scales: the scale of least expected error of each channel at each number of bits, ``[9, W]``; the row is the
            number of bits.
        errors: the mean squared errors that are expected at these scales, ``[9, W]``, in the channel's own unit.
        variance: the variance of each channel, ``[W]``.
        sample: the values that scales are fitted to, ``[n, W]``.
        weights: the weights of the errors of the sample's tokens, ``[n]``, of sum 1.
    """

    offset: Tensor
    scales: Tensor
    errors: Tensor
    variance: Tensor
    sample: Tensor
    weights: Tensor


def fit_scales(values: Tensor, parts: tuple[int, ...], importance: Tensor, *, tokens: int = SAMPLE) -> ScaleTable:
    """Fit the scales of all channels, each number of bits by itself.

    Args:
        values: the cached values in the basis of the code, ``[n, W]``.
        parts: the parts of the cached values that have a gain each; see `TransformCode`.
        importance: the weights of the tokens' errors, ``[n]``.
        tokens: the number of tokens that scales are fitted to.
    """
    offset = values.mean(0)
    deviation = (values - offset).square().mean(0).sqrt().clamp_min(_LEAST)
    return _fitted(offset.float(), deviation.float(), *_sample(values, importance, tokens), parts)


def fit_first_scales(first: Tensor, usual: Tensor, others: ScaleTable, parts: tuple[int, ...]) -> ScaleTable:
    """Fit the scales of tokens that begin a text; see `fit_scales`.

    Args:
        first: the values of some, ``[m, W]``.
        usual: the value about which they lie, ``[W]``.
        others: the scales of all other tokens.
        parts: the parts of the cached values that have a gain each.
    """
    # Few tokens say little of how far others may lie: one alone says no more than all other tokens do.
    spread = (first - usual).square().mean(0) + others.variance / len(first) ** 2
    weights = torch.full((len(first),), 1 / len(first))
    return _fitted(usual.float(), spread.sqrt().clamp_min(_LEAST).float(), first.float(), weights, parts)


def _fitted(offset: Tensor, deviation: Tensor, sample: Tensor, weights: Tensor, parts: tuple[int, ...]) -> ScaleTable:
    width = len(offset)
    scales, errors = torch.ones(9, width), torch.zeros(9, width)
    for bits in WIDTHS:
        code = TransformCode(offset, deviation, (bits,) * -(-width // CHANNELS), (width,), parts)
        scales[bits], errors[bits] = _expected_scales(code, deviation, sample, weights)
    return ScaleTable(offset, scales, errors, deviation.square(), sample, weights)


def _sample(values: Tensor, importance: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Values ``[n, W]`` of about ``tokens`` tokens, the most important and others, and their weights, of sum 1.

    The others are every k-th one, so that there may be up to twice as many as asked for.
    """
    order = importance.argsort(descending=True)
    count = min(tokens, len(values))
    first, others = order[: count // 4], order[count // 4 :].sort().values
    others = others[:: max(1, len(others) // (count - len(first)))]
    weights = importance.float()
    rest = weights[others] * (weights.sum() - weights[first].sum()) / weights[others].sum()
    weights = torch.cat((weights[first], rest))
    return values[torch.cat((first, others))].float(), weights / weights.sum()


def _expected_scales(
    code: TransformCode, deviation: Tensor, sample: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The scales ``[W]`` of least expected error for the gains that a code gives tokens, and these errors.

    What is expected is what gains are chosen by: noise as of normal values, and the distance of those out of reach.
    Estimating a scale takes a hundredth of the time of encoding the sample with it.
    """
    _, gains, _ = code.normalised(sample)
    sizes = ((sample - code.offset) / (deviation * gains)).abs_()
    costs = weights[:, None] * gains.square_()
    total = costs.sum(0)
    least, scale = torch.full_like(deviation, torch.inf), deviation
    for ratio in EXPECTED_RATIOS:
        excess = (sizes - ratio * code.reach).relu_()
        error = ratio**2 * code.noise * total + excess.square_().mul_(costs).sum(0)
        scale = torch.where(error < least, ratio * deviation, scale)
        least = torch.minimum(error, least)
    return scale, least * deviation.square()


def _measured_scales(code: TransformCode, sample: Tensor, weights: Tensor) -> Tensor:
    """The best scales ``[W]`` near a code's own, for the gains that it gives tokens."""
    normal, gains, starts = code.normalised(sample)
    least, scale = torch.full_like(code.scale, torch.inf), code.scale
    for ratio in RATIOS:
        levels, _ = encode(normal / ratio, code.weights, code.channel_bits, starts, gains, pack=False)
        error = weights @ ((levels * ratio - normal) * gains).square()
        scale = torch.where(error < least, ratio * code.scale, scale)
        least = torch.minimum(error, least)
    return scale


def allot(table: ScaleTable, sections: tuple[int, ...], parts: tuple[int, ...], token_bytes: int) -> TransformCode:
    """The code with so many bytes a token, or the next fewer, that lets in least error; at least a bit a channel.

    Args:
        table: the table that `fit_scales` returned.
        sections: the sections of the cached values; see `TransformCode`.
        parts: the parts of the cached values; see `TransformCode`.
        token_bytes: the bytes of a token, of which one is for its gains.
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
    # Greedy: the block that gains most a bit is first, as long as the budget pays for it.
    while heap:
        _, index, more = heapq.heappop(heap)
        price = (more - bits[index]) * (spans[index][1] - spans[index][0])
        if price <= budget:
            budget -= price
            bits[index] = more
            offer(index)
    by_channel = torch.tensor([n for n, (a, b) in zip(bits, spans, strict=True) for _ in range(a, b)])
    scale = table.scales.gather(0, by_channel[None])[0]
    code = _centred(TransformCode(table.offset, scale, tuple(bits), sections, parts), table)
    code = replace(code, scale=_measured_scales(code, table.sample, table.weights))
    return _centred(code, table)


def _centred(code: TransformCode, table: ScaleTable) -> TransformCode:
    """The code with its scales multiplied by a factor for each part, such that gains are 1 on average."""
    _, gains, _ = code.normalised(table.sample)
    means = [part.log().mean().exp().expand(part.shape[1]) for part in gains.split_with_sizes(code.parts, -1)]
    return replace(code, scale=code.scale * torch.cat(means))


def whole_shares(wanted: Sequence[float], specs: Sequence[GroupedSpec | LatentSpec]) -> tuple[int, ...]:
    """Round the bytes a token of each layer's codes down; what is left over goes to the next layer.

    For example ``whole_shares([10.5, 10.5], specs)`` is ``(9, 11)`` for layers whose channels are in blocks of 16:
    another bit for a block takes two bytes, and the gains take one.

    Args:
        wanted: the wanted bytes a token of each layer.
        specs: the specs of the layers, all of which get codes.

    Returns:
        The bytes a token of each layer: one for the gains, and as many bits a value as ``wanted`` pays for, from one
        to eight.
    """
    counts: list[int] = []
    left = 0.0
    for bytes_, spec in zip(wanted, specs, strict=True):
        widths = [end - start for start, end in blocks(code_shape(spec)[0])]
        bits = math.gcd(*widths)
        step = bits // 8 if bits % 8 == 0 else 1
        left += bytes_
        counts.append(1 + min(math.floor((left - 1) / step) * step, sum(widths)))  # eight bits a value are the most
        left -= counts[-1]
    return tuple(counts)


@dataclass(frozen=True)
class Design:
    """A layer in the basis of its code, and all that codes of any size are made from.

    Attributes:
        layer: the layer, float32, without a code.
        table: the scales of its channels.
        first: those of tokens that begin a text.
    """

    layer: Layer
    table: ScaleTable
    first: ScaleTable

    def coded(self, token_bytes: int) -> Layer:
        """The layer with a code of so many bytes a token, or the next fewer; see `allot`."""
        shape = code_shape(self.layer.spec)
        code = allot(self.table, *shape, token_bytes)
        first = allot(self.first, *shape, code.token_bytes)
        return replace(self.layer, code=replace(code, first=first))


def design(
    layer: Layer,
    windows: Iterable[tuple[Tensor, Rotation | None]],
    factor: Tensor,
    alone: Tensor | None = None,
    *,
    begin_alike: bool = False,
    tokens: int = SAMPLE,
) -> Design:
    """Design the code of a layer's cache.

    Args:
        layer: the layer, float32.
        windows: the inputs ``[T, E]`` of each window, and its rotary tables.
        factor: a factor L of the layer's sensitivity L Lᵀ, ``[E, E]``.
        alone: the layer's inputs ``[m, E]`` at tokens that each begin a text; None for those of the windows alone.
        begin_alike: whether all windows begin with one token, which the tokenizer puts before any text.
        tokens: the number of tokens that scales are fitted to.
    """
    statistics = channel_statistics(layer, windows, factor, alone, begin_alike=begin_alike)
    turned, basis = decorrelated(layer, statistics)
    values, first, usual = (
        states.double() @ basis.mT for states in (statistics.values, statistics.first, statistics.usual_first)
    )
    parts = code_shape(layer.spec)[1]
    table = fit_scales(values, parts, statistics.importance, tokens=tokens)
    return Design(turned.float(), table, fit_first_scales(first, usual, table, parts))
