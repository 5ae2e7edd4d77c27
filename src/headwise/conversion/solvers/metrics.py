"""The cost of an error of a layer's keys, through the scores, and of its values, through the output.

Shapes: H query heads, K key heads, D key dims, V value dim, E hidden, E' = E or E + 1 (a column for the biases).
Everything is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import Part, weighted
from headwise.models.specs import GroupedSpec

KEY_WEIGHT = 0.5
"""The share of the predicted cost of an error of the keys that counts: softmax forgives some. A spread of the cache
over layers tries other shares."""

KEY_BALANCE = 4.0
"""The weight of all key energy relative to all value energy, without statistics."""


def score_weight(weight: Tensor, source: GroupedSpec) -> Tensor:
    """The cost of a squared error of ``q·k`` in each head, ``[H]``, from that of the scaled score, ``weight``."""
    scale = source.head_dim**-0.5 if source.softmax_scale is None else source.softmax_scale
    return weight.clamp_min(0) * scale**2


def value_metric(w_o: Tensor, sensitivity: Tensor | None, source: GroupedSpec) -> Tensor:
    """The cost of an error of the values through the output: ``Σ_heads W_oᵀ G W_o``, ``[K, V, V]``."""
    heads = torch.unflatten(w_o.double(), 1, (source.num_kv_heads, source.group_size, source.value_dim))
    costs = heads if sensitivity is None else torch.einsum("ef,fkgv->ekgv", sensitivity, heads)
    return torch.einsum("ekgv,ekgw->kvw", heads, costs)  # of [E, K, H/K, V] both


def key_metric(queries: Tensor, moments: Tensor, weight: Tensor, source: GroupedSpec) -> Tensor:
    """The cost of an error of each key head through the scores: ``Σ_h w_h E[q qᵀ]`` of its queries, ``[K, D, D]``.

    Args:
        queries: ``[H, D, E']``.
        moments: ``[E', E']``, the second moments of the inputs.
        weight: ``[H]``, `Statistics.head_weight`.
        source: the layer's spec.
    """
    weights = score_weight(weight, source)  # [H]
    grams = torch.stack([w * (rows @ moments @ rows.mT) for w, rows in zip(weights, queries, strict=True)])
    # [H, D, D] → [K, D, D]
    return torch.unflatten(grams, 0, (source.num_kv_heads, -1)).sum(1)


def energy(rows: Tensor, moments: Tensor) -> Tensor:
    """The energy ``E|w·x|²`` of each real or complex row w ``[..., E']``, for inputs x of these second moments."""
    if rows.is_complex():
        return energy(rows.real, moments) + energy(rows.imag, moments)
    return ((rows @ moments) * rows).sum(-1)


def cost_without(part: Part) -> float:
    """The cost of leaving a part out."""
    return float((weighted(part.metric, part.rows @ part.moments) * part.rows).sum())


def centred(moments: Tensor) -> Tensor:
    """Second moments ``[E', E']`` without the inputs' mean, which shifts all scores alike: softmax ignores it."""
    constant = moments[:, -1:]
    return moments - constant @ constant.mT / moments[-1, -1].clamp_min(torch.finfo(moments.dtype).tiny)
