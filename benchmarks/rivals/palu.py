"""Palu (Chang et al. 2024, arXiv:2407.21118): latents of groups of heads, quantised after a Hadamard rotation.

As its authors' code has it: each group of heads has its own whitened SVD of W_k and of W_v (G-LRD); ranks follow the
Fisher information of the weights, in blocks of 32; a latent is quantised per token with a scale and an integer zero
point, no clipping; the Hadamard matrix is folded into both factors. The paper's group is of 4 heads; here it is all
key–value heads if the model has fewer. Nothing is trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from benchmarks.rivals.hadamard import hadamard
from benchmarks.rivals.low_rank import Factors, LowRank, Projection, whitened
from benchmarks.rivals.simulation import BF16, Design, Study
from torch import Tensor

GROUP = 4
"""Heads of a group, in the paper's main results."""
BLOCK = 32
"""Ranks are multiples of this."""
BITS = (16, 4, 3, 2)
NAMES = ("keys", "values")
STEPS = 400
"""Total ranks that are tried, to come near the bytes."""
SCALE_BYTES = 3
"""Of one latent of one token: a 16-bit scale, and an integer zero point in a byte."""


def designs(study: Study, fraction: float) -> list[Design]:
    """The method's caches of a fraction of the bytes, one for each number of bits that can have it."""
    by_bits = {bits: _ranks(study, bits, fraction * study.full) for bits in BITS}
    return [_design(study, ranks, bits) for bits, ranks in by_bits.items() if ranks is not None]


def _ranks(study: Study, bits: int, budget: float) -> list[list[int]] | None:
    """Ranks of all groups, keys and values of each layer in turn, of the total rank whose bytes are nearest to a
    budget; None if that is more than a tenth off."""
    fisher = [study.statistics[f"{index}.{name}.fisher"] for index in range(study.layers) for name in NAMES]
    K, D = study.model.config.num_key_value_heads, study.model.config.head_dim
    heads = GROUP if K % GROUP == 0 else K
    scores = [rows.view(K // heads, heads * D).mean(1).tolist() for rows in fisher]
    total = len(fisher) * K * D
    tried = [allocated(scores, total * step // STEPS, heads * D) for step in range(1, STEPS + 1)]
    best = min(tried, key=lambda ranks: abs(_bytes(ranks, bits) - budget))
    return best if abs(_bytes(best, bits) / budget - 1) < 0.1 else None


def allocated(scores: Sequence[Sequence[float]], total: int, width: int) -> list[list[int]]:
    """Ranks in proportion to scores, at most ``width`` each, in blocks of `BLOCK` and at least one block.

    Args:
        scores: of each group of each projection.
        total: the sum of ranks before they are rounded to blocks.
        width: the outputs of a group.
    """
    flat = [score for row in scores for score in row]
    wanted = [total * score / sum(flat) for score in flat]
    ranks = [min(width, math.floor(rank)) for rank in wanted]
    order = sorted(range(len(ranks)), key=lambda at: wanted[at] - ranks[at])
    left = total - sum(ranks)
    while left > 0:
        for at in order:
            if ranks[at] < width and left > 0:
                ranks[at] += 1
                left -= 1
    ranks = [min(max(1, round(rank / BLOCK)) * BLOCK, width) for rank in ranks]
    rows, at = [], 0
    for row in scores:
        rows.append(ranks[at : at + len(row)])
        at += len(row)
    return rows


def _bytes(ranks: Sequence[Sequence[int]], bits: int) -> float:
    groups = [rank for row in ranks for rank in row]
    if bits == 16:
        return BF16 * sum(groups)
    return sum(bits * rank / 8 + SCALE_BYTES for rank in groups)


def _design(study: Study, ranks: list[list[int]], bits: int) -> Design:
    layers = []
    for index, layer in enumerate(study.model.model.layers):
        root = torch.linalg.cholesky(damped(study.moments(index)))
        pair = [
            _projection(linear.weight, root, ranks[2 * index + at], bits)
            for at, linear in enumerate((layer.self_attn.k_proj, layer.self_attn.v_proj))
        ]
        layers.append(LowRank(*pair))
    settings = {"bits": bits, "mean_rank": sum(map(sum, ranks)) / len(ranks), "groups": len(ranks[0])}
    return Design(layers, _bytes(ranks, bits), settings)


def _projection(weight: Tensor, root: Tensor, ranks: Sequence[int], bits: int) -> Projection:
    rows = weight.detach().double().chunk(len(ranks))
    # The authors share the singular values equally between both factors.
    groups = [whitened(part, root, rank, share=0.5) for part, rank in zip(rows, ranks, strict=True)]
    if bits == 16:
        return Projection(groups)
    return Projection([mixed(group) for group in groups], partial(quantised, bits=bits))


def mixed(factors: Factors) -> Factors:
    """The same product with a Hadamard matrix between both factors."""
    matrix = hadamard(factors.rank).float()
    return Factors(matrix.mT @ factors.down, factors.up @ matrix)


def quantised(latent: Tensor, *, bits: int) -> Tensor:
    """A latent ``[…, r]`` from codes of so many bits, with a scale and an integer zero point for each token."""
    low, high = latent.amin(-1, keepdim=True), latent.amax(-1, keepdim=True)
    most = 2**bits - 1
    scale = ((high - low).clamp_min(1e-5) / most).half().float()
    zero = (-low / scale).round().clamp(0, most)
    return (((latent / scale).round() + zero).clamp(0, most) - zero) * scale


def damped(moments: Tensor) -> Tensor:
    """Second moments with just so much on the diagonal that they have a Cholesky factor."""
    smallest = torch.linalg.eigvalsh(moments)[0]
    if smallest <= 1e-12 * moments.diagonal().mean():
        moments = moments + (1e-3 - smallest.clamp_max(0)) * torch.eye(len(moments), dtype=moments.dtype)
    return moments
