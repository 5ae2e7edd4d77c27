"""The basis of a latent that bears an engine's rounding: the same layer, and less lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.conversion.codes.basis import channel_statistics
from headwise.conversion.codes.even_rounding import even_basis, evened
from headwise.conversion.output.latent_norm import constant_of_inputs, without_biases
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.statistics import Statistics
from headwise.quantization.ggml import GgmlCode
from headwise.specs import LatentSpec

E, R, P, H, N, V, T = 48, 31, 32, 3, 16, 16, 200


def layer(seed: int, *, spoiled: bool = False) -> Layer:
    """A random MLA layer without a norm; some channels of its latent are far larger than they matter where spoiled."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    sizes = torch.ones(R, dtype=torch.float64)
    if spoiled:
        sizes[::8] = 30.0
    spec = LatentSpec(
        hidden_size=E,
        is_causal=True,
        num_heads=H,
        kv_lora_rank=R,
        qk_nope_head_dim=N,
        qk_rope_head_dim=P,
        v_head_dim=V,
        latent_norm=False,
        bias=("q_proj", "kv_a_proj_with_mqa"),
    )
    down = drawn(R + P, E)
    down[:R] *= sizes[:, None]
    state = {
        "q_proj.weight": drawn(H * (N + P), E),
        "q_proj.bias": drawn(1, H * (N + P))[0],
        "kv_a_proj_with_mqa.weight": down,
        "kv_a_proj_with_mqa.bias": torch.cat((sizes, torch.ones(P, dtype=torch.float64))),
        "kv_b_proj.weight": drawn(H * (N + V), R) / sizes,
        "o_proj.weight": drawn(E, H * V),
    }
    return Layer(spec, state, list(range(P // 2)))


def window(seed: int) -> tuple[Tensor, Rotation]:
    inputs = torch.randn(T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inputs[:, 0] += 4.0  # a mean, of which a constant is made
    inputs = inputs / inputs.square().mean(-1, keepdim=True).sqrt()
    angles = torch.arange(T, dtype=torch.float64)[:, None] * 1e-2 ** (torch.arange(P // 2) / (P // 2))
    return inputs, Rotation(angles.cos()[None], angles.sin()[None])


def evened_on(own: Layer, *windows: tuple[Tensor, Rotation]) -> Layer:
    pairs = [(inputs.float(), Rotation(*(table.float() for table in tables))) for inputs, tables in windows]
    return evened(own, channel_statistics(own.float(), pairs, torch.eye(E)))


def output(own: Layer, at: tuple[Tensor, Rotation]) -> Tensor:
    return own.output(*at, torch.arange(T))


@pytest.mark.parametrize("seed", range(3))
def test_the_layer_computes_the_same(seed: int) -> None:
    own, (known, other) = layer(seed, spoiled=True), (window(10 + seed), window(20 + seed))
    turned = evened_on(own, known)
    for at in (known, other):
        assert float((output(turned, at) - output(own, at)).abs().max()) < 1e-9
    latent = known[0] @ turned.state["kv_a_proj_with_mqa.weight"][:R].mT
    assert float(latent.var(0).mean()) == pytest.approx(1.0, rel=0.1)  # the first four tokens count apart
