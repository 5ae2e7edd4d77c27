"""The basis of a code: the layer computes what it did, and errors of channels of like cost are weighed alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwise.conversion.codes import ChannelStatistics, channel_statistics, decorrelated
from headwise.conversion.solvers.layer import Layer, rotation_tables
from headwise.models.families.base import canonical_shapes
from headwise.models.specs import GroupedSpec
from headwise.models.specs.base import RopeSpec

E, T = 32, 48


def layer_and_statistics(**changes: Any) -> tuple[Layer, ChannelStatistics, torch.Tensor]:
    """A random layer, a few channels of whose keys are far larger than the others, and what was measured of it."""
    sizes = {"hidden_size": E, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "rope": RopeSpec(dim=8)}
    spec = GroupedSpec(**{**sizes, **changes})
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) / 4 for name, shape in canonical_shapes(spec).items()}
    for name, rows in (("k", 3), ("k", 4), ("q", 3)):
        part = f"{name}_norm.weight" if spec.qk_norm else f"{name}_proj.weight"
        state[part][rows] *= 30
    layer = Layer(spec, state)
    inputs = torch.randn(T, E, generator=generator)
    statistics = channel_statistics(layer, [(inputs, rotation_tables(spec, torch.arange(T)))], torch.eye(E))
    return layer, statistics, inputs


@pytest.mark.parametrize("norm", [None, "head", "full"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_change_of_basis_changes_no_output(norm: str | None, interleaved: bool) -> None:
    layer, statistics, inputs = layer_and_statistics(
        qk_norm=norm, rope=RopeSpec(dim=8, interleaved=interleaved), bias=() if norm else ("q_proj", "k_proj")
    )
    rotation = rotation_tables(layer.spec, torch.arange(T))  # type: ignore[arg-type]
    turned, _ = decorrelated(layer, statistics)
    expected = layer.output(inputs, rotation)
    assert torch.allclose(turned.float().output(inputs, rotation), expected, rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(turned.state[name], layer.state[name].double()) for name in layer.state)


@pytest.mark.parametrize("norm", [None, "full", "head"])
def test_an_error_costs_the_same_in_every_pair_and_value(norm: str | None) -> None:
    layer, statistics, _ = layer_and_statistics(qk_norm=norm, num_kv_heads=1 if norm == "head" else 2)
    spec = layer.spec
    assert isinstance(spec, GroupedSpec)
    _, basis = decorrelated(layer, statistics)
    back = torch.linalg.inv(basis)

    def by_pair(metric: torch.Tensor) -> torch.Tensor:
        """The costs of keys' channels, those of a rotary pair as their mean, and of values'."""
        costs = metric.diagonal()
        keys = costs[: spec.num_kv_heads * 12].view(-1, 12)
        pairs = torch.unflatten(keys[:, :8], 1, (2, 4)).mean(1)
        return torch.cat((pairs.flatten(), keys[:, 8:].flatten(), costs[spec.num_kv_heads * 12 :]))

    before, after = by_pair(statistics.metric), by_pair(back.mT @ statistics.metric @ back)
    assert float(before.max() / before.min()) > 20
    assert float(after.max() / after.min()) < 1.01
