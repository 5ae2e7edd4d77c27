"""A change of a layer's queries and keys that leaves their products as they are, but for a shift of the keys' bias.

A rotary pair of a key is a complex number, and so is that of a query; a score is a sum of their products, one of them
conjugated. So keys may be multiplied by a complex number for each pair, and the head's queries divided by its
conjugate. Here that number is a power of two times 1, i, −1 or −i: no weight is rounded by it, whatever type stores
it. Where the type has digits to spare, it is a power of 2^¼. What a shift of the bias does is told in
`headwise.conversion.preparation.shift`; it is not exact.

Shapes: H query heads, K key–value heads, D head dim, P rotated dims, G groups of channels: P/2 pairs, and each other
channel by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.models.specs import GroupedSpec


@dataclass(frozen=True, eq=False)
class Change:
    """Powers of two, and quarter turns, of the keys of a layer; its queries get the opposite powers.

    Attributes:
        exponents: the base-2 exponents, float64 ``[K, G]``; keys are multiplied by 2 to these, queries by 2 to their
            negatives.
        turns: the number of quarter turns, int64 ``[K, G]`` from 0 to 3; each makes (−b, a) of a pair (a, b) of keys
            and queries. A channel by itself has 0 or 2, by which it is negated.
        cut: the number of powers of two by which a factor is smaller or larger than wanted, at most, because it would
            leave the range of the weights' type; 0 where all fit.
        shift: the numbers that are added to the bias of keys before all that, ``[K, D]``; None where it stays as it
            is.
    """

    exponents: Tensor
    turns: Tensor
    cut: int = 0
    shift: Tensor | None = None

    @classmethod
    def none(cls, layer: GroupedSpec) -> Change:
        """The change that leaves a layer as it is."""
        size = layer.num_kv_heads, len(channels(layer))
        return cls(torch.zeros(size, dtype=torch.double), torch.zeros(size, dtype=torch.long))

    def applied(self, states: Tensor, layer: GroupedSpec, side: str) -> Tensor:
        """Queries or keys ``[K, N, D]`` as they are after the change, but for the shift.

        Args:
            states: the states of each key–value head, ``[K, N, D]``; its queries are those of all its query heads
                together. Keys are shifted before they are rotated.
            layer: the layer's spec.
            side: ``q`` or ``k``.
        """
        one_head = replace(layer, num_heads=layer.num_kv_heads)  # the rows of one query head of each group
        order, signs, factors = row_plan(self, one_head, side)
        taken = states.gather(-1, order[:, None].expand_as(states))
        return taken * (signs * factors).to(states.dtype)[:, None]


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
    """The number of groups that are pairs, which are the first ones."""
    return 0 if layer.rope is None else layer.rope.dim // 2


def row_plan(change: Change, layer: GroupedSpec, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """The effect of a change on the rows of a projection: which row is taken for each, its sign and its factor.

    Args:
        change: the change of the layer.
        layer: the layer's spec.
        side: ``q`` or ``k``.

    Returns:
        The channels and signs, int64, and positive factors, float64, each ``[heads, D]``.
    """
    groups = channels(layer)
    heads = layer.num_heads if side == "q" else layer.num_kv_heads
    order = torch.arange(layer.head_dim).expand(layer.num_kv_heads, -1).clone()
    first, second = groups.T
    swapped = change.turns % 2 == 1
    signs, factors = torch.ones_like(order), torch.ones_like(order, dtype=torch.double)
    for own, other, negative in ((first, second, (1, 2)), (second, first, (2, 3))):
        order[:, own] = torch.where(swapped, other, own)
        signs[:, own] = torch.where(torch.isin(change.turns, torch.tensor(negative)), -1, 1)
        factors[:, own] = powers(change.exponents if side == "k" else -change.exponents)
    repeats = heads // layer.num_kv_heads
    order, signs, factors = (part.repeat_interleave(repeats, 0) for part in (order, signs, factors))
    return order, signs, factors


def by_head(changes: Sequence[Change], losses: Tensor, layer: GroupedSpec) -> Change:
    """The change that takes for each key–value head the one of several changes that loses least there.

    Args:
        changes: several changes of one layer.
        losses: the logarithms of what each change loses at each head, ``[changes, K]``; nothing is worse than NaN.
            Heads with a norm of their own weights get one change together, by the mean.
        layer: the layer's spec.
    """
    if layer.qk_norm == "head":
        losses = losses.mean(-1, keepdim=True).expand_as(losses)
    chosen = losses.nan_to_num(torch.inf, torch.inf).argmin(0)
    heads, taken = torch.arange(len(chosen)), [changes[number] for number in chosen.tolist()]
    exponents, turns = (
        torch.stack([getattr(change, name) for change in changes])[chosen, heads] for name in ("exponents", "turns")
    )
    shift = None
    if any(change.shift is not None for change in taken):
        rows = [None if change.shift is None else change.shift[head] for head, change in enumerate(taken)]
        none = torch.zeros_like(next(row for row in rows if row is not None))
        shift = torch.stack([none if row is None else row for row in rows])
    return Change(exponents, turns, max(change.cut for change in taken), shift)


def powers(exponents: Tensor) -> Tensor:
    """The powers of two with these exponents, in float64; exact where exponents are integers.

    Args:
        exponents: the exponents, of any shape.
    """
    exponents = exponents.double()
    whole = exponents.floor()
    return torch.ldexp((exponents - whole).exp2(), whole.long())


def changed(state: Mapping[str, Tensor], change: Change, layer: GroupedSpec) -> dict[str, Tensor]:
    """A layer's attention with its queries and keys changed: weights and biases, or the weights of their norms.

    Args:
        state: the tensors of the attention under headwise's names, ``q_proj.weight`` ``[H·D, E]`` and so on.
        change: the change of the layer.
        layer: the layer's spec.
    """
    new = dict(state)
    if change.shift is not None:
        bias = state["k_proj.bias"]
        state = {**state, "k_proj.bias": (bias.float() + change.shift.flatten()).to(bias.dtype)}
    for side in ("q", "k"):
        order, signs, factors = row_plan(change, layer, side)
        names = [f"{side}_norm.weight"] if layer.qk_norm else [f"{side}_proj.weight", f"{side}_proj.bias"]
        if layer.qk_norm == "head":
            order, signs, factors = order[:1], signs[:1], factors[:1]
        D = layer.head_dim
        rows = (order + torch.arange(len(order))[:, None] * D).flatten()
        for name in names:
            if name in state:
                tensor = state[name][rows]
                shape = (-1,) + (1,) * (tensor.ndim - 1)
                new[name] = (tensor * (signs * factors).flatten().reshape(shape)).to(tensor.dtype)
    return new
