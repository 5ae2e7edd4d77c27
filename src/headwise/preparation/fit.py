"""The change of a layer's queries and keys under which a format of the cache loses least.

A block of keys is rounded to codes that lie a step apart, so that each channel is off by a random part of it. What
scores lose is the mean square of the step times that of the queries' channels in the block, summed over blocks. Where
steps follow from the mean square of a rotated head, the best factor of a pair has the fourth power Q/K, of the mean
squares of its queries and keys. Real steps follow from the largest number of a block, so the sum itself is minimised:
first over any factors by gradient descent, then over powers of two and quarter turns, one pair after the other.

Shapes: K key–value heads, T keys, N queries, D head dim, G groups of channels, b blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.preparation.change import Change, channels, num_pairs
from headwise.quantization.formats import EngineFormat
from headwise.quantization.ggml import BLOCK
from headwise.specs import GroupedSpec

STEPS = 100
_RATE = 0.05
_SWEEPS = 4
_GAIN = -1e-3
"""A change of one pair is made where it changes the logarithm of the loss by less than this."""


def fit(queries: Tensor, keys: Tensor, layer: GroupedSpec, formats: Sequence[EngineFormat]) -> Change:
    """Find the change of a layer under which formats lose least.

    For example ``fit(queries, keys, layer, [parse_format("llama.cpp:q4_0")]).exponents``.

    Args:
        queries: ``[K, N, D]`` in float32, all queries of a key–value head together.
        keys: ``[K, T, D]``.
        layer: its spec; one with a norm of each query and key head gets one change for all heads, without turns.
        formats: at least one whose keys have blocks; of several, the product of their losses is minimised.
    """
    problem = _Problem(queries, keys, layer, formats)
    exponents, turns = problem.rounded(problem.descended())
    return Change(exponents.expand(len(keys), -1).clone(), turns.expand(len(keys), -1).clone())


def score_loss(queries: Tensor, keys: Tensor, code: EngineFormat) -> Tensor:
    """What scores lose by rounding keys, ``[K]``, but for a factor that depends on the format alone.

    Args:
        queries: ``[K, N, D]``.
        keys: ``[K, T, D]``.
        code: the format.
    """
    return _loss(code.keys.turned(queries), code.keys.turned(keys), code)


def _loss(queries: Tensor, keys: Tensor, code: EngineFormat) -> Tensor:
    steps = code.keys.type.steps(keys).square().mean(-2)  # [K, b]
    weights = torch.unflatten(queries.square().mean(-2), -1, (-1, BLOCK)).sum(-1)  # [K, b]
    return (steps * weights).sum(-1)


class _Problem:
    """The loss of a layer as a function of factors for each head and group."""

    def __init__(self, queries: Tensor, keys: Tensor, layer: GroupedSpec, formats: Sequence[EngineFormat]) -> None:
        self.formats = [code for code in formats if code.keys.type.has_blocks]
        self.queries, self.keys = queries, keys
        self.groups = channels(layer)
        self.pairs = 0 if layer.qk_norm else num_pairs(layer)
        self.heads = 1 if layer.qk_norm == "head" else len(keys)

    def of(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The logarithm of the loss ``[heads]``, of queries and keys as they are."""
        return self._seen([[code.keys.turned(queries), code.keys.turned(keys)] for code in self.formats])

    def wide(self, factors: Tensor) -> Tensor:
        """Factors of groups ``[heads, G]`` as those of channels, ``[heads, 1, D]``."""
        out = torch.ones(*factors.shape[:-1], self.keys.shape[-1])
        for column in (0, 1):
            out = out.index_copy(-1, self.groups[:, column], factors)
        return out[:, None]

    def descended(self) -> Tensor:
        """The base-2 logarithms of the best factors, ``[heads, G]``, from those of the fourth root of Q/K."""
        mean_squares = [self._by_group(states.square().mean(1)) for states in (self.queries, self.keys)]
        if self.heads == 1:
            mean_squares = [part.mean(0, keepdim=True) for part in mean_squares]
        Q, K = (part.clamp_min(1e-12 * float(part.max()) + 1e-30) for part in mean_squares)
        best = (Q / K).log2() / 4
        best = best - best.mean(-1, keepdim=True)
        least = self.of(self.queries / self.wide(best.exp2()), self.keys * self.wide(best.exp2()))
        logarithms = best.clone().requires_grad_()
        optimizer = torch.optim.Adam([logarithms], lr=_RATE / 0.693)
        with torch.enable_grad():
            for _ in range(STEPS):
                factors = self.wide(logarithms.exp2())
                losses = self.of(self.queries / factors, self.keys * factors)
                improved = losses.detach() < least
                least = torch.where(improved, losses.detach(), least)
                best = torch.where(improved[:, None], logarithms.detach(), best)
                optimizer.zero_grad()
                losses.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return best

    def rounded(self, logarithms: Tensor) -> tuple[Tensor, Tensor]:
        """The best exponents and turns near factors, ``[heads, G]`` each: one group after another, until none helps.

        All moves of a group are tried at once. What a format sees of a head is a linear map of it, so a move adds
        two rows of the map's matrix, each times a channel's change.
        """
        exponents, turns = logarithms.round().long(), torch.zeros_like(logarithms, dtype=torch.bool)
        factors = self.wide(exponents.double().exp2().float())
        sides = [self.queries / factors, self.keys * factors]
        maps = [code.keys.turned(torch.eye(sides[0].shape[-1])) for code in self.formats]
        seen = [[states @ matrix for states in sides] for matrix in maps]
        least = self._seen(seen)
        moves = [(move, turn) for turn in (False, True) for move in (0, 1, -1)]
        for _ in range(_SWEEPS):
            before = least
            for group, (first, second) in enumerate(self.groups.tolist()):
                allowed = moves[1:] if group < self.pairs else moves[1:3]
                tried = [
                    torch.stack([_moved(states[..., [first, second]], sign * move, turn) for move, turn in allowed])
                    for states, sign in zip(sides, (-1, 1), strict=True)
                ]  # [moves, K, samples, 2]
                by = [new - states[..., [first, second]] for new, states in zip(tried, sides, strict=True)]
                if first == second:
                    by = [change[..., :1] for change in by]
                rows = [first] if first == second else [first, second]
                after = [
                    [states + change @ matrix[rows] for states, change in zip(own, by, strict=True)]
                    for own, matrix in zip(seen, maps, strict=True)
                ]
                losses, number = self._seen(after).min(0)  # [heads]
                improved = losses < least + _GAIN
                least = torch.where(improved, losses, least)
                which = number.expand(len(self.keys)), torch.arange(len(self.keys))
                kept = improved.expand(len(self.keys))[:, None, None]
                for states, new in zip(sides, tried, strict=True):
                    pair = states[..., [first, second]]
                    states[..., [first, second]] = torch.where(kept, new[which], pair)
                seen = [
                    [torch.where(kept, new[which], states) for states, new in zip(own, others, strict=True)]
                    for own, others in zip(seen, after, strict=True)
                ]
                exponents[:, group] += torch.tensor([move for move, _ in allowed])[number] * improved
                turns[:, group] ^= torch.tensor([turn for _, turn in allowed])[number] & improved
            if not bool((least < before + _GAIN).any()):
                break
        return exponents, turns

    def _seen(self, seen: list[list[Tensor]]) -> Tensor:
        """The logarithm of the loss ``[…, heads]`` of queries and keys as the formats see them."""
        losses = [_loss(queries, keys, code) for (queries, keys), code in zip(seen, self.formats, strict=True)]
        total = torch.stack(losses).log().sum(0)
        return total.mean(-1, keepdim=True) if self.heads == 1 else total

    def _by_group(self, channels_: Tensor) -> Tensor:
        """Sums of the two channels of each group, ``[K, G]``."""
        first, second = self.groups.T
        return channels_[:, first] + torch.where(first == second, 0.0, channels_[:, second])


def _moved(pair: Tensor, move: int, turn: bool) -> Tensor:
    """The two channels of a group ``[…, 2]`` times a power of two, and turned by a quarter."""
    a, b = (pair * 2.0**move).unbind(-1)
    return torch.stack((-b, a) if turn else (a, b), -1)
