"""SVD-LLM V2 (Wang et al. 2025, arXiv:2503.12340) on the key and value projections.

Each projection is truncated by two SVDs, of the inputs' second moments and of ``W U S^{1/2}``. The compression ratio
of each is in proportion to 1 / log L among the projections of one kind, where L is the norm of the error that an
equal ratio would make on the calibration text. The paper compresses weights, so its ratio counts parameters; here it
counts the cache. Keys are rotated after they are rebuilt. Nothing is updated after the truncation, as in the paper's
V2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from benchmarks.rivals.low_rank import LowRank, Projection, ranks_bytes, whitened
from benchmarks.rivals.simulation import BF16, Design, Study
from torch import Tensor


def designs(study: Study, fraction: float) -> list[Design]:
    """The method's cache of a fraction of the bytes."""
    roots = [_root(study.moments(index)) for index in range(study.layers)]
    projections, ranks = [], []
    for name in ("k_proj", "v_proj"):
        weights = study.weights(name)
        spectra = [torch.linalg.svdvals(weight @ root) for weight, root in zip(weights, roots, strict=True)]
        kind = allocated(spectra, round(fraction * study.full / BF16 / 2))
        ranks += kind
        projections.append(
            [Projection([whitened(*of)]) for of in zip(weights, roots, kind, strict=True)],
        )
    design = [LowRank(*pair) for pair in zip(*projections, strict=True)]
    return [Design(design, ranks_bytes(ranks), {"ranks": [min(ranks), max(ranks)]})]


def allocated(spectra: Sequence[Tensor], total: int) -> list[int]:
    """Ranks of the projections of one kind, with the given sum.

    Args:
        spectra: the singular values of each projection, weighted by its inputs.
        total: the sum of ranks.
    """
    full = len(spectra[0])
    ratio = 1 - total / (full * len(spectra))
    even = round(total / len(spectra))
    losses = [float(values[even:].square().sum().sqrt()) for values in spectra]
    if ratio <= 0 or min(losses) <= math.e:  # a loss that small would turn the logarithm's order round
        return _whole([total / len(spectra)] * len(spectra), total, full)
    inverse = [1 / math.log(loss) for loss in losses]
    removed = [len(spectra) * ratio * value / sum(inverse) for value in inverse]
    return _whole([full * (1 - part) for part in removed], total, full)


def _whole(ranks: Sequence[float], total: int, most: int) -> list[int]:
    """Whole ranks from 1 to ``most`` with the given sum, near the given ones."""
    whole = [min(max(int(rank), 1), most) for rank in ranks]
    order = sorted(range(len(ranks)), key=lambda at: whole[at] - ranks[at])
    while (left := min(total, most * len(ranks)) - sum(whole)) != 0:
        step = 1 if left > 0 else -1
        for at in order if left > 0 else reversed(order):
            if 1 <= whole[at] + step <= most and left != 0:
                whole[at] += step
                left -= step
    return whole


def _root(moments: Tensor) -> Tensor:
    """``U S^{1/2}`` of second moments ``U S Uᵀ``, without directions of no energy."""
    values, vectors = torch.linalg.eigh(moments)
    return vectors * values.clamp_min(1e-12 * values[-1]).sqrt()
