"""`count_layer`: closed forms, headwise's counter and the others on one call of one layer."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from headwise import cost, count_layer
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec

SPEC = GroupedSpec(hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize(("new", "total"), [(5, None), (1, 9)])
def test_the_counter_agrees_with_the_closed_forms(new: int, total: int | None) -> None:
    counts = count_layer(SPEC, new, total)
    assert (counts.label, counts.new_tokens, counts.total_tokens) == (SPEC.label, new, total or new)
    assert counts.parameters == cost.parameters(SPEC)
    assert counts.formula_flops == counts.counted_flops == cost.forward_flops(SPEC, new, total, causal=False)
    assert [peer.name for peer in counts.peers] == ["thop", "fvcore", "torchinfo", "calflops", "torch"]


def test_the_flops_of_a_peer_are_among_its_json_values() -> None:
    counts = count_layer(SPEC, 3)
    assert counts.to_dict()["peers"] == [{**asdict(peer), "flops": peer.flops} for peer in counts.peers]


def test_an_impossible_call_is_refused() -> None:
    with pytest.raises(ArgumentError, match="new_tokens = 3: must be from 1 to total_tokens = 2"):
        count_layer(SPEC, 3, 2)
