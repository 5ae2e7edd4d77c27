"""A change of a layer's queries and keys that leaves their products as they are, but for a shift of the keys' bias.

A rotary pair of a key is a complex number, and so is that of a query; a score is a sum of their products, one of them
conjugated. So keys may be multiplied by a complex number for each pair, and the head's queries divided by its
conjugate. Here that number is a power of two times 1 or i: no weight is rounded by it, whatever type stores it.
What a shift of the bias does is told in `headwise.preparation.shift`; it is not exact.

Shapes: H query heads, K key–value heads, D head dim, P rotated dims, G groups of channels: P/2 pairs, and each other
channel by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.specs import GroupedSpec


@dataclass(frozen=True, eq=False)
class Change:
    """Powers of two, and quarter turns, of the keys of a layer; its queries get the opposite powers.

    Attributes:
        exponents: int64 ``[K, G]``; keys are multiplied by 2 to these, queries by 2 to their negatives.
        turns: bool ``[K, G]``; whether a pair (a, b) of keys and queries becomes (−b, a).
        cut: by how many powers of two a factor is smaller or larger than wanted, at most, because the weights' type
            has no room for it; 0 where all fit.
        shift: ``[K, D]``, what is added to the bias of keys before all that; None where it stays as it is.
    """

    exponents: Tensor
    turns: Tensor
    cut: int = 0
    shift: Tensor | None = None

    @classmethod
    def none(cls, layer: GroupedSpec) -> Change:
        """The change that leaves a layer as it is."""
        size = layer.num_kv_heads, len(channels(layer))
        return cls(torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.bool))

    def applied(self, states: Tensor, layer: GroupedSpec, side: str) -> Tensor:
        """Queries or keys ``[K, N, D]`` as they are after the change, but for the shift.

        Args:
            states: of each key–value head; queries of all its heads together. Keys are shifted before they are
                rotated.
            layer: the layer's spec.
            side: ``q`` or ``k``.
        """
        one_head = replace(layer, num_heads=layer.num_kv_heads)  # the rows of one query head of each group
        order, signs, exponents = row_plan(self, one_head, side)
        taken = states.gather(-1, order[:, None].expand_as(states))
        return taken * torch.ldexp(signs.to(states.dtype), exponents)[:, None]


def channels(layer: GroupedSpec) -> Tensor:
    """The two channels of each group, int64 ``[G, 2]``; a channel without a partner stands twice."""
    D = layer.head_dim
    P = 0 if layer.rope is None else layer.rope.dim
    first = torch.arange(P // 2)
    if layer.rope is not None and layer.rope.interleaved:
        pairs = torch.stack((2 * first, 2 * first + 1), -1)
    else:
        pairs = torch.stack((first, first + P // 2), -1)
    alone = torch.arange(P, D)
    return torch.cat((pairs, torch.stack((alone, alone), -1)))


def num_pairs(layer: GroupedSpec) -> int:
    """The groups that are pairs, which are the first ones."""
    return 0 if layer.rope is None else layer.rope.dim // 2


def row_plan(change: Change, layer: GroupedSpec, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """What a change does to the rows of a projection: which row is taken for each, its sign and its exponent.

    Args:
        change: of the layer.
        layer: its spec.
        side: ``q`` or ``k``.

    Returns:
        int64 tensors ``[heads, D]``: channels, signs and exponents.
    """
    groups = channels(layer)
    heads = layer.num_heads if side == "q" else layer.num_kv_heads
    order = torch.arange(layer.head_dim).expand(layer.num_kv_heads, -1).clone()
    signs, exponents = torch.ones_like(order), torch.zeros_like(order)
    for column in (0, 1):
        exponents[:, groups[:, column]] = change.exponents
    pairs = groups[: num_pairs(layer)]
    turned = change.turns[:, : len(pairs)]
    order[:, pairs[:, 0]] = torch.where(turned, pairs[:, 1], pairs[:, 0])
    order[:, pairs[:, 1]] = torch.where(turned, pairs[:, 0], pairs[:, 1])
    signs[:, pairs[:, 0]] = torch.where(turned, -1, 1)
    if side == "q":
        exponents = -exponents
    repeats = heads // layer.num_kv_heads
    order, signs, exponents = (part.repeat_interleave(repeats, 0) for part in (order, signs, exponents))
    return order, signs, exponents


def changed(state: Mapping[str, Tensor], change: Change, layer: GroupedSpec) -> dict[str, Tensor]:
    """A layer's attention with its queries and keys changed: weights and biases, or the weights of their norms.

    Args:
        state: the attention under headwise's names, ``q_proj.weight`` ``[H·D, E]`` and so on.
        change: of the layer.
        layer: its spec.
    """
    new = dict(state)
    if change.shift is not None:
        bias = state["k_proj.bias"]
        state = {**state, "k_proj.bias": (bias.float() + change.shift.flatten()).to(bias.dtype)}
    for side in ("q", "k"):
        order, signs, exponents = row_plan(change, layer, side)
        names = [f"{side}_norm.weight"] if layer.qk_norm else [f"{side}_proj.weight", f"{side}_proj.bias"]
        if layer.qk_norm == "head":
            order, signs, exponents = order[:1], signs[:1], exponents[:1]
        D = layer.head_dim
        rows = (order + torch.arange(len(order))[:, None] * D).flatten()
        for name in names:
            if name in state:
                tensor = state[name][rows]
                shape = (-1,) + (1,) * (tensor.ndim - 1)
                factor = torch.ldexp(signs.flatten().to(tensor.dtype), exponents.flatten()).reshape(shape)
                new[name] = tensor * factor.to(tensor.dtype)
    return new
