"""Scales and numbers of bits for the channels of a layer's cache, in the basis of its code.

Shapes: n tokens, W cached values.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.runtime.kernels.native.codes.sizes import CHANNELS
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import blocks
from headwise.runtime.quantization.trellis import encode

WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""The numbers of bits of a channel. None may be dropped: the rank is the better place to save."""

RATIOS = (0.85, 1.0, 1.15, 1.35, 1.6, 2.0, 2.7, 3.6)
"""Scales that are tried, as multiples of a channel's standard deviation. Some channels are near 0 for most tokens and
far from it for a few."""

FLATTENED = 0.85
"""The power of a channel's variance by which bits are shared out: the metric says too little of weak channels."""

ROUNDS = 3
"""The number of times that scales are fitted to gains, which depend on them."""

SAMPLE = 2048
"""The number of tokens that scales are fitted to."""


@dataclass(frozen=True)
class ScaleTable:
    """The best scale of every channel at each number of bits, and the error it leaves.

    Attributes:
        offset: ``[W]``.
        scales: ``[9, W]``, by number of bits.
        errors: ``[9, W]``, mean squared errors in the channel's own unit.
        variance: ``[W]``.
        sample: ``[n, W]``, the values that scales are fitted to.
        weights: ``[n]``, those of their errors, of sum 1.
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
        values: ``[n, W]``, cached values in the basis of the code.
        parts: see `TransformCode`.
        importance: ``[n]``, weights of their errors.
        tokens: the number of tokens that scales are fitted to.
    """
    offset = values.mean(0).float()
    deviation = (values - values.mean(0)).square().mean(0).sqrt().float().clamp_min(1e-20)
    sample, weights = _sample(values, importance, tokens)
    width = len(offset)
    scales, errors = torch.ones(9, width), torch.zeros(9, width)
    for bits in WIDTHS:
        code = TransformCode(offset, deviation, (bits,) * -(-width // CHANNELS), (width,), parts)
        scales[bits], errors[bits] = _best_scales(code, deviation, sample, weights)
    return ScaleTable(offset, scales, errors, deviation.square(), sample, weights)


def _sample(values: Tensor, importance: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Values ``[n, W]`` of about so many tokens, and their weights, of sum 1: the most important ones, and others.

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


def _best_scales(code: TransformCode, deviation: Tensor, sample: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The best scales ``[W]`` for the gains that a code gives tokens, and the errors they leave."""
    _, gains, starts = code.normalised(sample)
    normal = (sample - code.offset) / (deviation * gains)
    least = torch.full_like(deviation, torch.inf)
    scale = code.scale
    for ratio in RATIOS:
        levels, _ = encode(normal / ratio, deviation.square(), code.channel_bits, starts, gains, pack=False)
        error = weights @ ((levels * ratio - normal) * gains).square()
        scale = torch.where(error < least, deviation * ratio, scale)
        least = torch.minimum(error, least)
    return scale, least * deviation.square()


def allot(
    table: ScaleTable, sections: tuple[int, ...], parts: tuple[int, ...], token_bytes: int, *, rounds: int = ROUNDS
) -> TransformCode:
    """The code with so many bytes a token, or the next fewer, that lets in least error; at least a bit a channel.

    Args:
        table: of `fit_scales`.
        sections: see `TransformCode`.
        parts: see `TransformCode`.
        token_bytes: the bytes of a token, with one for its gains.
        rounds: the number of times that scales are fitted to gains.
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
    code = TransformCode(table.offset, scale, tuple(bits), sections, parts)
    for _ in range(rounds):
        centred = _centred(code, table)
        scale, _ = _best_scales(centred, table.variance.sqrt(), table.sample, table.weights)
        code = replace(code, scale=scale)
    return _centred(code, table)


def _centred(code: TransformCode, table: ScaleTable) -> TransformCode:
    """The code with its scales multiplied by a factor for each part, such that gains are 1 on average."""
    _, gains, _ = code.normalised(table.sample)
    means = [part.log().mean().exp().expand(part.shape[1]) for part in gains.split_with_sizes(code.parts, -1)]
    return replace(code, scale=code.scale * torch.cat(means))
