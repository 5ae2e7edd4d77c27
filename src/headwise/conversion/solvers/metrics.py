"""What an error of a layer's keys or values costs: through the scores, and through the output.

Shapes: H query heads, K key heads, D key dims, V value dim, E hidden, E' = E or E + 1 (a column for the biases).
Everything is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import Part, weighted
from headwise.specs import GroupedSpec

KEY_WEIGHT = 0.5
"""How much of the predicted cost of an error in the keys is counted: softmax forgives some. A spread tries others."""

KEY_BALANCE = 4.0
"""Without statistics: how much all key energy counts beside all value energy."""


def score_weight(weight: Tensor, source: GroupedSpec) -> Tensor:
    """What a squared error of ``q·k`` costs in each head, ``[H]``, w being what one of the scaled score does."""
    scale = source.head_dim**-0.5 if source.softmax_scale is None else source.softmax_scale
    return weight.clamp_min(0) * scale**2


def value_metric(w_o: Tensor, sensitivity: Tensor | None, source: GroupedSpec) -> Tensor:
    """What an error of the values costs through the output: ``Σ_heads W_oᵀ G W_o``, ``[K, V, V]``."""
    heads = torch.unflatten(w_o.double(), 1, (source.num_kv_heads, source.group_size, source.value_dim))
    seen = heads if sensitivity is None else torch.einsum("ef,fkgv->ekgv", sensitivity, heads)
    return torch.einsum("ekgv,ekgw->kvw", heads, seen)


def key_metric(queries: Tensor, moments: Tensor, weight: Tensor, source: GroupedSpec) -> Tensor:
    """What an error of each key head costs through the scores: ``Σ_h w_h E[q qᵀ]`` of its queries, ``[K, D, D]``.

    Args:
        queries: ``[H, D, E']``.
        moments: ``[E', E']``.
        weight: ``[H]``, as the statistics have it.
        source: the layer.
    """
    asked = score_weight(weight, source)
    found = torch.stack([count * (rows @ moments @ rows.mT) for count, rows in zip(asked, queries, strict=True)])
    return torch.unflatten(found, 0, (source.num_kv_heads, -1)).sum(1)


def energy(rows: Tensor, moments: Tensor) -> Tensor:
    """``E|w·x|²`` of real or complex rows ``[..., E']``."""
    if rows.is_complex():
        return energy(rows.real, moments) + energy(rows.imag, moments)
    return ((rows @ moments) * rows).sum(-1)


def cost_without(part: Part) -> float:
    """Of leaving a part out."""
    return float((weighted(part.metric, part.rows @ part.moments) * part.rows).sum())


def centred(moments: Tensor) -> Tensor:
    """Without what all tokens share, which softmax does not see: a constant input counts nothing."""
    constant = moments[:, -1:]
    return moments - constant @ constant.mT / moments[-1, -1].clamp_min(torch.finfo(moments.dtype).tiny)
