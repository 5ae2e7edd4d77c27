"""A change of a layer's queries and keys that leaves their products as they are, and the one that loses least.

A rotary pair of a key is a complex number, and so is that of a query; a score is a sum of their products, one of them
conjugated. So keys may be multiplied by a complex number for each pair, and the head's queries divided by its
conjugate. Here that number is a power of two times 1, i, −1 or −i: no weight is rounded by it, whatever type stores
it. Where the type has digits to spare, it is a power of 2^¼. A change may shift the keys' bias as well, which is not
exact; what that does is told in `headwise.conversion.preparation.one_layer`.

A block of keys is rounded to codes that lie a step apart, so that each channel is off by a random part of it. What
scores lose is the mean square of the step times that of the queries' channels in the block, summed over blocks. Where
steps follow from the mean square of a rotated head, the best factor of a pair has the fourth power Q/K, of the mean
squares of its queries and keys. Real steps follow from the largest number of a block, so the sum itself is minimised:
first over any factors by gradient descent, then over those that weights can have and quarter turns, one pair after
another. Which turns are found depends on those at the start, so that the search starts several times.

Numbers that have an exponent each, as 8-bit floats, lose nothing by their size but where they are too large or too
small for their format. Then pairs are moved one after the other from no change on, and only those that gain by it.

Shapes: H query heads, K key–value heads, T keys, N queries, D head dim, P rotated dims, G groups of channels (P/2
pairs, and each other channel by itself), b blocks, U key–value heads of all starts of a search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.models.specs import GroupedSpec
from headwise.runtime.kernels.native.calls import can_encode, moved_steps
from headwise.runtime.quantization.formats import EngineFormat


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


STEPS = 100
KEYS = 256
"""The number of keys of a head whose blocks' steps are computed. Of queries only second moments count, of all."""

OFFSETS = (0.0, 0.25, 0.5, 0.75)
"""The numbers that are added to the base-2 logarithms of factors before they are rounded: all factors of a head may
be multiplied by one number, which changes no rounding of the cache, and leads to other powers of two."""

_RATE = 0.07
_SWEEPS = 4
_SWEEPS_FROM_NONE = 16
_GAIN = -1e-3
"""A change of one pair is made where it changes the logarithm of the loss by less than this."""


def fit(
    queries: Tensor,
    keys: Tensor,
    layer: GroupedSpec,
    formats: Sequence[EngineFormat],
    *,
    turns: bool = True,
    grain: int = 1,
    starts: int = len(OFFSETS),
) -> Change:
    """Find the change of a layer under which formats lose least.

    For example ``fit(queries, keys, layer, [parse_format("llama.cpp:q4_0")]).exponents``.

    Args:
        queries: the queries of a key–value head's query heads together, float32 ``[K, N, D]``.
        keys: the keys, ``[K, T, D]``.
        layer: the layer's spec; one with a norm of each query and key head gets one change for all heads, and no
            layer with norms gets turns.
        formats: the formats of the cache, at least one; of several, the product of their losses is minimised.
        turns: whether pairs may be turned, and channels negated.
        grain: the number of factors from one power of two to the next that weights can be multiplied by.
        starts: the number of starts of the search, where channels share steps; the first ones have no turns, and the
            others random ones.
    """
    problem = Problem(queries, keys, layer, formats, turns=turns, grain=grain)
    size = problem.heads, len(problem.groups)
    no_turns = torch.zeros(size, dtype=torch.long)
    if not problem.shares_steps:
        return problem.rounded(torch.zeros(1, *size), no_turns[None], _SWEEPS_FROM_NONE)[0]
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([OFFSETS[start % len(OFFSETS)] for start in range(starts)]) / grain
    begun = [no_turns if start < len(OFFSETS) else problem.random_turns(generator) for start in range(starts)]
    found = problem.rounded(problem.descended() + offsets[:, None, None], torch.stack(begun))
    return by_head(found, torch.stack([problem.after(change) for change in found]), layer)


def where_it_helps(
    change: Change, queries: Tensor, keys: Tensor, layer: GroupedSpec, formats: Sequence[EngineFormat]
) -> Change:
    """The change at the heads in which formats lose less by it, and no change at the others.

    Args:
        change: a change that fits in the range of the weights.
        queries: the queries of all samples, ``[K, N, D]``; see `fit`.
        keys: the keys of all samples, ``[K, T, D]``.
        layer: the layer's spec.
        formats: the formats of the cache; see `fit`.
    """
    problem = Problem(queries, keys, layer, formats)
    gain = problem.after(Change.none(layer)) - problem.after(change)
    if layer.qk_norm == "head":
        gain = gain.mean().expand_as(gain)
    helps = (gain > 0)[:, None]
    return replace(change, exponents=change.exponents * helps, turns=change.turns * helps)


def losses_after(
    change: Change, queries: Tensor, keys: Tensor, layer: GroupedSpec, formats: Sequence[EngineFormat]
) -> Tensor:
    """The logarithm of the product of what scores lose by each format after a change, ``[K]``; see `fit`."""
    return Problem(queries, keys, layer, formats).after(change)


class Problem:
    """The loss of a layer under a change of its queries and keys; see `fit` for the arguments."""

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        layer: GroupedSpec,
        formats: Sequence[EngineFormat],
        *,
        turns: bool = True,
        grain: int = 1,
    ) -> None:
        D = keys.shape[-1]
        self.moments = queries.transpose(1, 2) @ queries / queries.shape[1]  # [K, D, D]
        self.shares_steps = any(code.keys.block(D) > 1 for code in formats)
        self.stride = max(1, keys.shape[1] // KEYS) if self.shares_steps else 1
        self.all_keys, self.keys = keys, keys[:, :: self.stride].clone()
        self.layer, self.groups, self.grain = layer, channels(layer), grain
        # The weights of a norm belong to channels, which it does not exchange.
        pairs = 0 if layer.qk_norm else num_pairs(layer)
        self.turns = torch.full((len(self.groups), 4), turns and self.shares_steps)
        self.turns[:, 0] = True
        self.turns[pairs:, 1::2] = False
        self.heads = 1 if layer.qk_norm == "head" else len(keys)
        self.formats = list(formats)
        # What a format sees of a head is a linear map of it, [D, D]; the mean square of a block of queries is the sum
        # of their second moments, each times a number of the map's, [b, D, D].
        self.maps = [code.keys.turned(torch.eye(D)) for code in formats]
        self.blocks = [
            torch.einsum("dbi,ebi->bde", *2 * [torch.unflatten(seen, -1, (-1, code.keys.block(D)))])
            for code, seen in zip(formats, self.maps, strict=True)
        ]

    def after(self, change: Change) -> Tensor:
        """The logarithm of the product of what scores lose by each format after a change, of all keys, ``[K]``."""
        own = torch.eye(self.keys.shape[-1]).expand(len(self.keys), -1, -1)
        to_queries, to_keys = (change.applied(own, self.layer, side) for side in "qk")
        moments = to_queries.mT @ self.moments @ to_queries
        losses = self.each(moments, [self.all_keys @ (to_keys @ matrix) for matrix in self.maps])
        return torch.stack([loss.log() for loss in losses]).sum(0)

    def each(self, moments: Tensor, seen: Sequence[Tensor]) -> list[Tensor]:
        """The loss of each format, ``[…, K]``.

        Args:
            moments: the second moments of queries, ``[…, K, D, D]``.
            seen: the keys as each format sees them, ``[…, K, T, D]``.
        """
        return self._each(seen, [torch.einsum("...de,bde->...b", moments, blocks) for blocks in self.blocks])

    def _each(self, seen: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The loss of each format, from the mean squares of blocks of queries ``[…, K, b]``; see `each`."""
        each = zip(self.formats, seen, weights, strict=True)
        return [code.keys.loss(keys, weighed) for code, keys, weighed in each]

    def _log_product(self, losses: Sequence[Tensor]) -> Tensor:
        """The logarithm of the product of the formats' losses, of any starts ``[…, U]``: ``[…, starts, heads]``."""
        total = torch.unflatten(torch.stack([loss.log() for loss in losses]).sum(0), -1, (-1, len(self.keys)))
        return total.mean(-1, keepdim=True) if self.heads == 1 else total

    def wide(self, of_groups: Tensor) -> Tensor:
        """Numbers of groups ``[heads, G]``, repeated for each channel: ``[heads, D]``."""
        wide = torch.ones(len(of_groups), self.keys.shape[-1])
        for column in (0, 1):
            wide = wide.index_copy(-1, self.groups[:, column], of_groups)
        return wide

    def by_group(self, of_channels: Tensor) -> Tensor:
        """Sums of channels' numbers ``[K, D]`` over each group, ``[K, G]``."""
        first, second = self.groups.T
        return of_channels[:, first] + torch.where(first == second, 0.0, of_channels[:, second])

    def scaled(self, factors: Tensor, keys: Tensor | None = None) -> tuple[Tensor, list[Tensor], Tensor]:
        """Second moments of queries, keys as the formats see them, and keys, all times factors of groups.

        Args:
            factors: the factors of the groups, ``[heads, G]``.
            keys: the keys ``[K, T, D]``, in place of the problem's own.
        """
        wide = self.wide(factors)
        keys = (self.keys if keys is None else keys) * wide[:, None]
        return self.moments / (wide[:, :, None] * wide[:, None]), [keys @ seen for seen in self.maps], keys

    def descended(self) -> Tensor:
        """The base-2 logarithms of the best factors, ``[heads, G]``, from the fourth roots of Q/K on."""
        by_group = [
            self.by_group(part) for part in (self.moments.diagonal(dim1=-2, dim2=-1), self.keys.square().mean(1))
        ]
        if self.heads == 1:
            by_group = [part.mean(0, keepdim=True) for part in by_group]
        Q, K = (part.clamp_min(1e-12 * float(part.max()) + 1e-30) for part in by_group)
        best = (Q / K).log2() / 4
        # A factor that all groups share changes no score: the search starts without it.
        best = best - best.mean(-1, keepdim=True)
        least = torch.full((self.heads,), torch.inf)
        logarithms = best.clone().requires_grad_()
        optimizer = torch.optim.Adam([logarithms], lr=_RATE)
        with torch.enable_grad():
            for _ in range(STEPS):
                moments, seen, _ = self.scaled(logarithms.exp2())
                losses = self._log_product(self.each(moments, seen))[0]
                improved = losses.detach() < least
                least = torch.where(improved, losses.detach(), least)
                best = torch.where(improved[:, None], logarithms.detach(), best)
                optimizer.zero_grad()
                losses.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return best

    def rounded(self, logarithms: Tensor, turns: Tensor, sweeps: int = _SWEEPS) -> list[Change]:
        """The best change near each of several factors and turns: one group after another, until none helps.

        All moves of a group are tried at once, from all starts: each adds multiples of the group's rows of a format's
        map to what the format sees of a key.

        Args:
            logarithms: the base-2 logarithms of factors of each start, ``[starts, heads, G]``.
            turns: quarter turns of each start, ``[starts, heads, G]``.
            sweeps: the most times that all groups are moved.
        """
        step, turns = 1 / self.grain, turns.clone()
        exponents = (logarithms.double() / step).round() * step
        begun = [self._change(*one) for one in zip(exponents, turns, strict=True)]
        # The heads of all starts stand side by side: U of them.
        keys = torch.cat([one.applied(self.keys, self.layer, "k") for one in begun])  # [U, T, D]
        moments = torch.cat(
            [one.applied(one.applied(self.moments, self.layer, "q").mT, self.layer, "q").mT for one in begun]
        )
        seen = [(keys @ matrix).mT.contiguous() for matrix in self.maps]  # [U, D, T]
        keys = keys.mT.contiguous()
        weights = [torch.einsum("ude,bde->ub", moments, blocks) for blocks in self.blocks]
        least = self._log_product(self._each([each.mT for each in seen], weights))  # [starts, heads]
        # Every move but the one that changes nothing: ``least`` stands for it.
        tried = [(move, turn) for turn in range(4) for move in (0.0, step, -step)][1:]
        pairs = [[first] if first == second else [first, second] for first, second in self.groups.tolist()]
        groups = [
            (pair, _Moves.of([one for one in tried if may[one[1]]], len(pair)))
            for pair, may in zip(pairs, self.turns.tolist(), strict=True)
        ]
        for _ in range(sweeps):
            before = least
            for group, (pair, moves) in enumerate(groups):
                weighed = [
                    moves.weights(moments, blocks, own, pair)
                    for blocks, own in zip(self.blocks, weights, strict=True)
                ]
                losses, number = self._log_product(self._after(seen, keys, weighed, moves, pair)).min(0)
                improved = losses < least + _GAIN  # [starts, heads]
                if not bool(improved.any()):
                    continue
                least = torch.where(improved, losses, least)
                exponents[..., group] += moves.exponents[number] * improved
                turns[..., group] += moves.turns[number] * improved
                every = len(turns), len(self.keys)
                units = improved.expand(every).flatten().nonzero()[:, 0]  # the heads that change
                made = number.expand(every).flatten()[units]
                at = units[:, None], torch.tensor(pair)
                added = moves.steps[made] @ keys[at]
                keys[at] += added
                for own, matrix in zip(seen, self.maps, strict=True):
                    own.index_add_(0, units, matrix[pair].T @ added)
                moved = moments[units]
                moved[:, pair] = moves.queries[made] @ moved[:, pair]
                moved[..., pair] = moved[..., pair] @ moves.queries[made].mT
                moments[units] = moved
                for own, blocks in zip(weights, self.blocks, strict=True):
                    own[units] = torch.einsum("ude,bde->ub", moved, blocks)
            if not bool((least < before + _GAIN).any()):
                break
        return [self._change(*one) for one in zip(exponents, turns % 4, strict=True)]

    def _after(
        self, seen: Sequence[Tensor], keys: Tensor, weights: Sequence[Tensor], moves: _Moves, pair: list[int]
    ) -> list[Tensor]:
        """The loss of each format after each of several moves of a group, ``[moves, U]``.

        Args:
            seen: the keys as each format sees them before the moves, ``[U, D, T]``.
            keys: the keys themselves, ``[U, D, T]``.
            weights: the mean squares of each format's blocks of queries after each move, ``[moves, U, b]``.
            moves: the moves.
            pair: the channels of the group.
        """
        losses = []
        for code, own, matrix, weighed in zip(self.formats, seen, self.maps, weights, strict=True):
            rows = matrix[pair]
            if code.keys.spread is not None and can_encode():
                how: dict[str, Any] = {"block": code.keys.block(len(matrix)), "spread": code.keys.spread}
                squares = moved_steps(own, keys[:, pair], moves.steps, rows, **how)
                losses.append((squares * weighed).sum(-1))
            else:  # one move at a time: all of them would leave the processor's caches
                turned, old = own.mT.contiguous(), keys[:, pair].mT.contiguous()
                after = (turned + old @ (step.T @ rows) for step in moves.steps)
                losses.append(torch.stack([code.keys.loss(*each) for each in zip(after, weighed, strict=True)]))
        return losses

    def random_turns(self, generator: torch.Generator) -> Tensor:
        """Turns that groups may have, ``[heads, G]``."""
        return torch.multinomial(self.turns.float(), self.heads, True, generator=generator).T

    def _change(self, exponents: Tensor, turns: Tensor) -> Change:
        """The change of all heads, from exponents and turns ``[heads, G]`` of those that change by themselves."""
        every = len(self.keys), -1
        return Change(exponents.expand(every).clone(), turns.expand(every).clone())


@dataclass(frozen=True, eq=False)
class _Moves:
    """Moves of one group's channels: each multiplies keys by a power of two, and turns them by so many quarters.

    Attributes:
        exponents: the exponents of the powers of two, ``[moves]``.
        turns: the quarters, int64 ``[moves]``.
        steps: the matrices by which each move multiplies the group's channels of keys, less 1, ``[moves, 2, 2]``;
            of a group of one channel ``[moves, 1, 1]``.
        queries: those of queries, not less 1.
    """

    exponents: Tensor
    turns: Tensor
    steps: Tensor
    queries: Tensor

    @classmethod
    def of(cls, moves: Sequence[tuple[float, int]], size: int) -> _Moves:
        """Moves of a group of one or two channels, from exponents and quarters."""
        exponents, turns = map(torch.tensor, zip(*moves, strict=True))
        quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        turned = torch.stack([torch.linalg.matrix_power(quarter, turn)[:size, :size] for _, turn in moves])
        factors = exponents.exp2()[:, None, None]
        return cls(exponents, turns, turned * factors - torch.eye(size), turned / factors)

    def weights(self, moments: Tensor, blocks: Tensor, before: Tensor, pair: list[int]) -> Tensor:
        """The mean squares of blocks of queries after each move, ``[moves, U, b]``.

        A block's is the sum of the products of two matrices, of which a move changes some rows and columns of one.

        Args:
            moments: the second moments of queries before the moves, ``[U, D, D]``.
            blocks: the matrix of each block, ``[b, D, D]``; see `Problem`.
            before: the mean squares before the moves, ``[U, b]``.
            pair: the channels of the group.
        """
        within, blocks_within = moments[:, pair][..., pair], blocks[:, pair][..., pair]
        products = torch.einsum("uce,bde->ubcd", moments[:, pair], blocks[:, pair])
        inner = torch.einsum("uce,bde->ubcd", within, blocks_within)
        outer = products - inner  # with the channels of other groups
        rest = before - (2 * outer + inner).diagonal(dim1=-2, dim2=-1).sum(-1)
        moved = self.queries[:, None] @ within @ self.queries[:, None].mT  # [moves, U, 1 or 2, 1 or 2]
        crossed = torch.einsum("mdc,ubcd->mub", self.queries, outer)
        return rest + 2 * crossed + torch.einsum("mucd,bcd->mub", moved, blocks_within)
