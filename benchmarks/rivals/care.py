"""CARE (Zhou et al. 2026, arXiv:2603.17946): covariance-aware factors, and ranks by energy under one budget.

As its authors' code has it for one-shot results: W_k and W_v apart, each by the SVD of ``√C Wᵀ``, where C is the
inputs' second moments with a tenth of their mean on the diagonal. CARE-U gives every layer one rank. CARE-E adds
ranks one at a time where the share of the layer's remaining energy, weighted by how many layers follow and by the
ranks it has, is largest, between half and twice the mean. Keys are rotated after they are rebuilt. Nothing is
trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from benchmarks.rivals.low_rank import LowRank, Projection, ranks_bytes, symmetric_root, whitened
from benchmarks.rivals.simulation import BF16, Design, Study
from torch import Tensor

DAMPING = 0.1


def designs(study: Study, fraction: float) -> list[Design]:
    """CARE-U and CARE-E of a fraction of the bytes."""
    rank = max(round(fraction * study.full / BF16 / 2 / study.layers), 1)
    roots = [_root(study.moments(index)) for index in range(study.layers)]
    kinds = [study.weights(name) for name in ("k_proj", "v_proj")]
    designs = []
    for way in ("CARE-U", "CARE-E"):
        ranks, projections = [], []
        for weights in kinds:
            kind = [rank] * study.layers
            if way == "CARE-E":
                pairs = zip(weights, roots, strict=True)
                kind = allocated([torch.linalg.svdvals(weight @ root) for weight, root in pairs], rank)
            ranks += kind
            of = zip(weights, roots, kind, strict=True)
            projections.append([Projection([whitened(*one)]) for one in of])
        design = [LowRank(*pair) for pair in zip(*projections, strict=True)]
        designs.append(Design(design, ranks_bytes(ranks), {"way": way, "ranks": [min(ranks), max(ranks)]}))
    return designs


def allocated(spectra: Sequence[Tensor], mean: int) -> list[int]:
    """Ranks of all layers with a given mean, from half to twice the mean.

    Args:
        spectra: the singular values of each layer's weighted projection.
        mean: the mean rank.
    """
    least, count = max(mean // 2, 1), len(spectra)
    energies = [values.square() for values in spectra]
    left = [[float(energy[at:].sum()) for at in range(len(energy))] for energy in energies]
    ranks = [least] * count

    def gain(layer: int) -> float:
        at = ranks[layer]
        if at >= min(2 * mean, len(energies[layer])):
            return -1.0
        horizon = math.sqrt((count - layer) / ((count + 1) / 2))
        share = float(energies[layer][at]) / max(left[layer][at], 1e-12 * left[layer][0])
        return share * horizon / math.sqrt(at / least)

    for _ in range(count * (mean - least)):
        best = max(range(count), key=gain)
        if gain(best) < 0:
            break
        ranks[best] += 1
    return ranks


def _root(moments: Tensor) -> Tensor:
    damping = DAMPING * moments.diagonal().mean()
    return symmetric_root(moments + damping * torch.eye(len(moments), dtype=moments.dtype))
