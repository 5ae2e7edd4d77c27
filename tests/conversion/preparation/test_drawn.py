"""Queries and keys are drawn as often as errors of their products move the output of a layer's attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.conversion.preparation.one_layer import drawn
from headwise.conversion.preparation.samples import Projected
from headwise.models.specs import GroupedSpec, RopeSpec

B, W, H, K, D, E = 2, 48, 4, 2, 16, 32


def layer_of(window: int | None) -> tuple[Projected, dict[str, Tensor]]:
    torch.manual_seed(0)
    spec = GroupedSpec(
        hidden_size=E, num_heads=H, num_kv_heads=K, head_dim=D, rope=RopeSpec(dim=D, theta=1e4), sliding_window=window
    )
    queries, keys, values = (torch.randn(heads, B, W, D) for heads in (H, K, K))
    return Projected(spec, 2 * queries, keys, values, torch.arange(W), None), {"o_proj.weight": torch.randn(E, H * D)}


def output_of(keys: Tensor, states: Projected, state: dict[str, Tensor], head: int, batch: int) -> Tensor:
    """What the query heads of a key–value head add to the layer's output, ``[S, H/K, E]``, from rotated keys."""
    asked = torch.arange(W // 16, W, 4)
    queries = torch.unflatten(states.rotated("q", states.positions)[:, batch, asked], 0, (K, -1))[head]
    apart = asked[:, None] - torch.arange(W)
    hidden = (apart < 0) | (apart >= (states.layer.sliding_window or W))
    weights = (queries @ keys.T * states.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    out = weights @ states.values[head, batch]
    weight = torch.unflatten(state["o_proj.weight"], -1, (K, H // K, D))[:, head]
    return torch.einsum("gsv,egv->sge", out, weight)


@pytest.mark.parametrize("window", [None, 12])
def test_keys_are_drawn_as_their_errors_move_the_output(window: int | None) -> None:
    """Each key is moved by itself, in random directions, and the output is computed again."""
    states, state = layer_of(window)
    _, keys = drawn(states, state)
    rotated = states.rotated("k", states.positions)
    for head in range(K):
        moved = torch.zeros(B, W)
        for batch in range(B):
            own = rotated[head, batch]
            exact = output_of(own, states, state, head, batch)
            for number in range(W):
                for _ in range(24):
                    other = own.clone()
                    other[number] += 0.01 * torch.randn(D)
                    moved[batch, number] += (output_of(other, states, state, head, batch) - exact).square().sum()
        share = (moved / moved.sum()).flatten()
        every = rotated[head].flatten(0, 1)
        counts = (keys[head][:, None] == every).all(-1).float().mean(0)
        assert float(counts.sum()) == pytest.approx(1)
        assert float((counts - share).abs().sum()) < 0.35
        assert float((1 / len(share) - share).abs().sum()) > 0.6


def test_a_query_that_attends_to_one_key_alone_is_drawn_no_more() -> None:
    """An error of a score moves no weights where one key has all of them."""
    states, state = layer_of(None)
    states.queries[:, 0] *= 100
    queries, _ = drawn(states, state)
    rotated = torch.unflatten(states.rotated("q", states.positions), 0, (K, -1))
    for head in range(K):
        sharp = rotated[head][:, 0].flatten(0, 1)
        assert float((queries[head][:, None] == sharp).all(-1).any(-1).float().mean()) < 0.2
