"""Groups of heads are equally large, lose no more than neighbours, and no exchange of two heads improves them."""

from __future__ import annotations

from itertools import combinations
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.conversion.solvers.merging import Group, group_heads


@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 10**6))
def test_groups_cannot_be_improved_by_an_exchange(groups: int, size: int, pairs_tell: bool, seed: int) -> None:
    heads = groups * size
    apart = torch.rand(heads, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def lost(group: Group) -> float:
        assert list(group) == sorted(set(group))
        if pairs_tell:
            return sum(float(apart[a, b]) for a, b in combinations(group, 2))
        return Random(f"{seed} {group}").random()

    chosen = group_heads(lost, heads, groups)
    assert sorted(head for group in chosen for head in group) == list(range(heads))
    assert {len(group) for group in chosen} == {size}
    assert chosen == group_heads(lost, heads, groups)
    neighbours = [tuple(range(at, at + size)) for at in range(0, heads, size)]
    assert sum(map(lost, chosen)) <= sum(map(lost, neighbours)) + 1e-9
    for one, other in combinations(chosen, 2):
        for a in one:
            for b in other:
                exchanged = [tuple(sorted({*one, b} - {a})), tuple(sorted({*other, a} - {b}))]
                assert sum(map(lost, exchanged)) >= lost(one) + lost(other) - 1e-6


def test_heads_that_lose_the_same_stay_in_order() -> None:
    assert group_heads(lambda group: len(group) + 0.1, 6, 3) == [(0, 1), (2, 3), (4, 5)]
    assert group_heads(lambda group: 0.0, 8, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_like_heads_find_each_other() -> None:
    kinds = [0, 1, 2, 2, 1, 0, 1, 2, 0]
    chosen = group_heads(lambda group: len({kinds[head] for head in group}) - 1.0, 9, 3)
    assert chosen == [(0, 5, 8), (1, 4, 6), (2, 3, 7)]
