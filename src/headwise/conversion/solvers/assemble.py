"""Assemble the tensors of an MLA layer from a solution's parts: names, order of rows, biases and scale.

Shapes: H query heads, K key heads, D head dim, V value dim, E hidden, E' = E or E + 1 (a column for the biases),
P rotary dims, R latent rank. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.models.specs import GroupedSpec, LatentSpec


class LatentParts(NamedTuple):
    """A solution for one MLA layer.

    Attributes:
        q_nope: ``[H·D, E']``, each head's query of the keys' content.
        q_rope: ``[H, P, E']``, each head's query of the shared rotary key.
        k_rope: ``[P, E']``, the shared rotary key.
        down: ``[R, E']``, the projection to the latent.
        key_up: ``[K·D, R]``, the decoder of each key head's content.
        value_up: ``[K·V, R]``, the decoder of each value head.
    """

    q_nope: Tensor
    q_rope: Tensor
    k_rope: Tensor
    down: Tensor
    key_up: Tensor
    value_up: Tensor


def projections(state: Mapping[str, Tensor], target: LatentSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The query, key and value projections ``[rows, E']``; biases are a last column, for a constant input of 1."""
    q, k, v = (with_bias(state, name, is_biased(target)) for name in ("q_proj", "k_proj", "v_proj"))
    return q, k, v


def assemble(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    parts: LatentParts,
) -> dict[str, Tensor]:
    """The tensors of an MLA layer by its own names, float64.

    Args:
        state: the source layer's tensors, for its output projection.
        source: the source layer's spec.
        target: the MLA layer's spec.
        parts: the solution.
    """
    H, K, D = source.num_heads, source.num_kv_heads, source.head_dim
    queries, decoders = [parts.q_rope], [parts.value_up.view(K, source.value_dim, -1)]  # [H, P, E'], [K, V, R]
    if nope := target.qk_nope_head_dim:  # rotated dims come first; they are no content where all keep their rotation
        queries.insert(0, torch.unflatten(parts.q_nope, 0, (H, D))[:, D - nope :])  # [H, nope, E']
        decoders.insert(0, parts.key_up.view(K, D, -1)[:, D - nope :])  # [K, nope, R]
    # The new heads are wider, so their softmax scale is smaller; the queries make up for it.
    rescale = (target.qk_head_dim / D) ** 0.5 * (
        1.0 if source.softmax_scale is None else source.softmax_scale * D**0.5
    )
    biased = is_biased(target)
    out = {
        **split_bias("q_proj", torch.cat(queries, dim=1).flatten(0, 1) * rescale, biased),
        **split_bias("kv_a_proj_with_mqa", torch.cat((parts.down, parts.k_rope)), biased),
        "kv_b_proj.weight": torch.cat(decoders, dim=1).repeat_interleave(H // K, dim=0).flatten(0, 1),
        "o_proj.weight": state["o_proj.weight"].double(),
    }
    if "o_proj.bias" in state:
        out["o_proj.bias"] = state["o_proj.bias"].double()
    return out


def is_biased(target: LatentSpec) -> bool:
    """Whether an MLA layer's queries and latent have biases."""
    return "kv_a_proj_with_mqa" in target.bias


def with_bias(state: Mapping[str, Tensor], name: str, biased: bool) -> Tensor:
    """A projection ``[rows, E']``, float64; if ``biased``, its last column is its bias or 0, for an input of 1."""
    weight = state[f"{name}.weight"].double()
    if not biased:
        return weight
    bias = state.get(f"{name}.bias")
    column = torch.zeros(weight.shape[0], 1, dtype=torch.float64) if bias is None else bias.double()[:, None]
    return torch.cat((weight, column), dim=1)


def split_bias(name: str, weight: Tensor, biased: bool) -> dict[str, Tensor]:
    """A projection's weight and bias by name: the inverse of `with_bias`."""
    if not biased:
        return {f"{name}.weight": weight}
    return {f"{name}.weight": weight[:, :-1], f"{name}.bias": weight[:, -1]}
