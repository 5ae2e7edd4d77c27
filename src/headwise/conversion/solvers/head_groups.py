"""Which key–value heads come to share one: equal groups, chosen so that merging them loses least."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

Group = tuple[int, ...]

_LEAST_GAIN = 1e-9
"""Of the whole loss: what rounding could gain is no reason to leave the heads' own order."""


def group_heads(lost: Callable[[Group], float], heads: int, groups: int) -> list[Group]:
    """A partition into equal groups that no exchange of two heads improves.

    It begins with neighbours, or where those lose more with the groups that are best by the sum of what their pairs
    lose, which is far sooner known; it is never worse than neighbours. There is no chance in it.

    Args:
        lost: what merging some heads loses, given in rising order.
        heads: how many there are.
        groups: how many to make; divides ``heads``.

    Returns:
        The groups, by their first heads.
    """
    size = heads // groups
    neighbours: list[Group] = [tuple(range(at, at + size)) for at in range(0, heads, size)]
    if groups in (1, heads):
        return neighbours
    known = cache(lost)

    def total(partition: list[Group]) -> float:
        return sum(known(group) for group in partition)

    def pairwise(group: Group) -> float:
        return sum(known(pair) for pair in combinations(group, 2))

    paired = _exchange(pairwise, _grow(pairwise, heads, size))
    enough = total(neighbours) * (1 - _LEAST_GAIN)
    return sorted(_exchange(known, paired if total(paired) < enough else neighbours))


def _grow(lost: Callable[[Group], float], heads: int, size: int) -> list[Group]:
    """Begin each group with the two heads left that merge best, and add the one that costs least until it is full."""
    left, groups = set(range(heads)), list[Group]()
    while left:
        group: Group = min(combinations(sorted(left), 2), key=lost)
        while len(group) < size:
            wider = [tuple(sorted((*group, head))) for head in sorted(left.difference(group))]
            group = min(wider, key=lost)
        left.difference_update(group)
        groups.append(group)
    return groups


def _exchange(lost: Callable[[Group], float], groups: list[Group]) -> list[Group]:
    """Exchange pairs of heads while that gains anything."""
    groups = list(groups)
    least = _LEAST_GAIN * sum(lost(group) for group in groups)
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(groups)), 2):
            for first in groups[a]:
                for second in groups[b]:
                    if first not in groups[a] or second not in groups[b]:
                        continue  # exchanged already
                    one = tuple(sorted({*groups[a], second} - {first}))
                    other = tuple(sorted({*groups[b], first} - {second}))
                    if lost(one) + lost(other) < lost(groups[a]) + lost(groups[b]) - least:
                        groups[a], groups[b] = one, other
                        improved = True
    return groups
