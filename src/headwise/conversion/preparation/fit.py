"""The change of a layer's queries and keys under which a format of the cache loses least.

A block of keys is rounded to codes that lie a step apart, so that each channel is off by a random part of it. What
scores lose is the mean square of the step times that of the queries' channels in the block, summed over blocks. Where
steps follow from the mean square of a rotated head, the best factor of a pair has the fourth power Q/K, of the mean
squares of its queries and keys. Real steps follow from the largest number of a block, so the sum itself is minimised:
first over any factors by gradient descent, then over those that weights can have and quarter turns, one pair after
another. Which turns are found depends on those at the start, so that the search starts several times.

Numbers that have an exponent each, as 8-bit floats, lose nothing by their size but where they are too large or too
small for their format. Then pairs are moved one after the other from no change on, and only those that gain by it.

Shapes: K key–value heads, T keys, N queries, D head dim, G groups of channels, b blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.conversion.preparation.change import Change, by_head, channels, num_pairs
from headwise.models.specs import GroupedSpec
from headwise.runtime.quantization.formats import EngineFormat

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
        return problem.rounded(torch.zeros(size), no_turns, _SWEEPS_FROM_NONE)
    logarithms, generator = problem.descended(), torch.Generator().manual_seed(0)
    found = []
    for start in range(starts):
        begun = no_turns if start < len(OFFSETS) else problem.random_turns(generator)
        found.append(problem.rounded(logarithms + OFFSETS[start % len(OFFSETS)] / grain, begun))
    losses = torch.stack([losses_after(change, queries, keys, layer, formats) for change in found])
    return by_head(found, losses, layer)


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
    before = torch.stack([score_loss(queries, keys, code).log() for code in formats]).sum(0)
    gain = before - losses_after(change, queries, keys, layer, formats)
    if layer.qk_norm == "head":
        gain = gain.mean().expand_as(gain)
    helps = (gain > 0)[:, None]
    return replace(change, exponents=change.exponents * helps, turns=change.turns * helps)


def losses_after(
    change: Change, queries: Tensor, keys: Tensor, layer: GroupedSpec, formats: Sequence[EngineFormat]
) -> Tensor:
    """The logarithm of the product of what scores lose by each format after a change, ``[K]``; see `fit`."""
    queries, keys = change.applied(queries, layer, "q"), change.applied(keys, layer, "k")
    return torch.stack([score_loss(queries, keys, code).log() for code in formats]).sum(0)


def score_loss(queries: Tensor, keys: Tensor, code: EngineFormat) -> Tensor:
    """The loss of scores by rounding keys, ``[K]``, but for a factor that depends on the format alone.

    Args:
        queries: the queries, ``[K, N, D]``.
        keys: the keys, ``[K, T, D]``.
        code: the format of the cache.
    """
    block = code.keys.block(queries.shape[-1])
    weights = torch.unflatten(code.keys.turned(queries).square().mean(-2), -1, (-1, block)).sum(-1)  # [K, b]
    return code.keys.loss(code.keys.turned(keys), weights)


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
        self.keys = keys[:, :: self.stride].clone()
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

    def each(self, moments: Tensor, seen: Sequence[Tensor]) -> list[Tensor]:
        """The loss of each format, ``[…, K]``.

        Args:
            moments: the second moments of queries, ``[…, K, D, D]``.
            seen: the keys as each format sees them, ``[…, K, T, D]``.
        """
        return [
            code.keys.loss(keys, torch.einsum("...de,bde->...b", moments, blocks))
            for code, keys, blocks in zip(self.formats, seen, self.blocks, strict=True)
        ]

    def _losses(self, moments: Tensor, seen: Sequence[Tensor]) -> Tensor:
        """The logarithm of the product of the losses, ``[…, heads]``; see `each`."""
        total = torch.stack([loss.log() for loss in self.each(moments, seen)]).sum(0)
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
                losses = self._losses(moments, seen)
                improved = losses.detach() < least
                least = torch.where(improved, losses.detach(), least)
                best = torch.where(improved[:, None], logarithms.detach(), best)
                optimizer.zero_grad()
                losses.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return best

    def rounded(self, logarithms: Tensor, turns: Tensor, sweeps: int = _SWEEPS) -> Change:
        """The best change near factors and turns: one group after another, until none helps.

        All moves of a group are tried at once: its two channels of all keys get other values, which adds two rows of
        each format's map.
        """
        step, turns = 1 / self.grain, turns.clone()
        exponents = (logarithms.double() / step).round() * step
        begun = self._change(exponents, turns)
        keys = begun.applied(self.keys, self.layer, "k")
        moments = begun.applied(begun.applied(self.moments, self.layer, "q").mT, self.layer, "q").mT
        seen = [keys @ matrix for matrix in self.maps]
        least = self._losses(moments, seen)
        every = torch.arange(len(keys))
        # The first move changes nothing; ``least`` stands for it.
        moves = [(move, turn) for turn in range(4) for move in (0.0, step, -step)]
        for _ in range(sweeps):
            before = least
            for group, (first, second) in enumerate(self.groups.tolist()):
                pair = [first] if first == second else [first, second]
                allowed = [(move, turn) for move, turn in moves[1:] if self.turns[group, turn]]
                old = keys[..., pair]
                new = torch.stack([_moved(old, move, turn) for move, turn in allowed])  # [moves, K, T, 2]
                rows = torch.stack([_moved_rows(moments, pair, -move, turn) for move, turn in allowed])
                after = [own + (new - old) @ matrix[pair] for own, matrix in zip(seen, self.maps, strict=True)]
                losses, number = self._losses(rows, after).min(0)  # [heads]
                improved = losses < least + _GAIN
                least = torch.where(improved, losses, least)
                kept, which = improved.expand(len(keys)), number.expand(len(keys))
                keys[..., pair] = torch.where(kept[:, None, None], new[which, every], old)
                moments = torch.where(kept[:, None, None], rows[which, every], moments)
                seen = [
                    torch.where(kept[:, None, None], others[which, every], own)
                    for own, others in zip(seen, after, strict=True)
                ]
                exponents[:, group] += torch.tensor([move for move, _ in allowed])[number] * improved
                turns[:, group] += torch.tensor([turn for _, turn in allowed])[number] * improved
            if not bool((least < before + _GAIN).any()):
                break
        return self._change(exponents, turns % 4)

    def random_turns(self, generator: torch.Generator) -> Tensor:
        """Turns that groups may have, ``[heads, G]``."""
        return torch.multinomial(self.turns.float(), self.heads, True, generator=generator).T

    def _change(self, exponents: Tensor, turns: Tensor) -> Change:
        """The change of all heads, from exponents and turns ``[heads, G]`` of those that change by themselves."""
        every = len(self.keys), -1
        return Change(exponents.expand(every).clone(), turns.expand(every).clone())


def _moved(pair: Tensor, move: float, turn: int) -> Tensor:
    """The one or two channels of a group, ``[…, 2]``, times a power of two, and turned by so many quarters."""
    scaled = pair * ((-1) ** (turn // 2) * 2.0**move)
    return torch.stack((-scaled[..., 1], scaled[..., 0]), -1) if turn % 2 else scaled


def _moved_rows(moments: Tensor, pair: list[int], move: float, turn: int) -> Tensor:
    """Second moments ``[K, D, D]`` after the same move of one group's channels."""
    moved = moments.clone()
    moved[..., pair] = _moved(moved[..., pair], move, turn)
    moved[:, pair] = _moved(moved[:, pair].mT, move, turn).mT
    return moved
