"""Divide key–value heads into equal groups, each to be merged into one head, such that little is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

Group = tuple[int, ...]

_LEAST_GAIN = 1e-9
"""The least gain that counts, as a share of the whole loss: rounding must not change the order of the heads."""


def group_heads(loss: Callable[[Group], float], heads: int, groups: int) -> list[Group]:
    """Divide heads into equal groups that no exchange of two heads improves.

    The search begins with groups of neighbours, or with the groups whose pairs of heads lose least in sum, which is
    far quicker to compute, where those lose less. It is deterministic, and the result never loses more than
    neighbours.

    Args:
        loss: the loss of merging some heads, which it gets in rising order.
        heads: the number of heads.
        groups: the number of groups; divides ``heads``.

    Returns:
        The groups, in the order of their first heads.
    """
    size = heads // groups
    neighbours: list[Group] = [tuple(range(start, start + size)) for start in range(0, heads, size)]
    if groups in (1, heads):
        return neighbours
    cached_loss = cache(loss)

    def total(partition: list[Group]) -> float:
        return sum(cached_loss(group) for group in partition)

    def pairwise(group: Group) -> float:
        return sum(cached_loss(pair) for pair in combinations(group, 2))

    by_pairs = _exchange(pairwise, _grow(pairwise, heads, size))
    threshold = total(neighbours) * (1 - _LEAST_GAIN)
    return sorted(_exchange(cached_loss, by_pairs if total(by_pairs) < threshold else neighbours))


def _grow(loss: Callable[[Group], float], heads: int, size: int) -> list[Group]:
    """Begin each group with the two remaining heads that lose least, and add the cheapest head until it is full."""
    remaining, groups = set(range(heads)), list[Group]()
    while remaining:
        group: Group = min(combinations(sorted(remaining), 2), key=loss)
        while len(group) < size:
            extended = [tuple(sorted((*group, head))) for head in sorted(remaining.difference(group))]
            group = min(extended, key=loss)
        remaining.difference_update(group)
        groups.append(group)
    return groups


def _exchange(loss: Callable[[Group], float], groups: list[Group]) -> list[Group]:
    """Exchange heads between two groups for as long as an exchange lowers the loss."""
    groups = list(groups)
    least_gain = _LEAST_GAIN * sum(loss(group) for group in groups)
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(groups)), 2):
            for first in groups[a]:
                for second in groups[b]:
                    if first not in groups[a] or second not in groups[b]:
                        continue  # already exchanged
                    new_a = tuple(sorted({*groups[a], second} - {first}))
                    new_b = tuple(sorted({*groups[b], first} - {second}))
                    if loss(new_a) + loss(new_b) < loss(groups[a]) + loss(groups[b]) - least_gain:
                        groups[a], groups[b] = new_a, new_b
                        improved = True
    return groups
