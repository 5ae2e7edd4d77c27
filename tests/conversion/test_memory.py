"""The memory that the solution of one wide layer takes, without the layer and its statistics."""

from __future__ import annotations

import torch

from headwise.conversion import LayerTarget, convert_to_latent
from headwise.conversion.solvers.statistics import Statistics
from headwise.measure.profiling.check import peak_bytes
from headwise.models.specs import GroupedSpec, RopeSpec, as_latent

WIDTH = 256


def test_a_wide_layer_is_solved_in_the_room_of_a_few_matrices() -> None:
    """At 7B a matrix of E² is 134 MB, and a conversion has to fit in 3 GB."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def gram() -> torch.Tensor:
        inputs = torch.cat((normal(2 * WIDTH, WIDTH), torch.ones(2 * WIDTH, 1, dtype=torch.float64)), dim=1)
        return inputs.mT @ inputs / len(inputs)

    heads = 16
    source = GroupedSpec(
        hidden_size=WIDTH,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=WIDTH // heads,
        rope=RopeSpec(dim=WIDTH // heads),
    )
    state = {f"{name}_proj.weight": normal(WIDTH, WIDTH).bfloat16() for name in "qkvo"}
    distances = torch.rand(heads, 64, generator=generator, dtype=torch.float64)
    weight = torch.rand(heads, generator=generator, dtype=torch.float64)
    statistics = Statistics(gram(), gram(), weight, distances / distances.sum(-1, keepdim=True), weight[0])
    sensitivity = gram()[:WIDTH, :WIDTH].contiguous()

    def solve() -> object:
        target = LayerTarget(as_latent(source, WIDTH - 8, 8))
        return convert_to_latent(state, source, target, statistics=statistics, sensitivity=sensitivity)

    assert peak_bytes(lambda: torch.zeros(WIDTH, WIDTH, dtype=torch.float64)) == WIDTH**2 * 8
    assert peak_bytes(solve) <= 11.5 * WIDTH**2 * 8
