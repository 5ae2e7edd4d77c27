"""The basis of a latent that bears an engine's rounding: the same layer, and less lost."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from headwise.conversion.codes.basis import channel_statistics
from headwise.conversion.codes.even_rounding import even_basis, evened
from headwise.conversion.output.latent_norm import CONSTANT, without_biases
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.quantization import TransformCode
from headwise.quantization.ggml import GgmlCode
from headwise.specs import LatentSpec
from tests.closeness import assert_close

E, R, P, H, N, V, T = 48, 32, 32, 3, 16, 16, 200


def layer(seed: int, *, spoiled: bool = False) -> Layer:
    """A random MLA layer without a norm; spoiled, some channels of its latent are far larger than they matter."""
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


class Rounded:
    """Rounds cached values as a ggml type does, in the place of a code of headwise's own."""

    def __init__(self, kind: str) -> None:
        self.code = GgmlCode(kind)

    def rounded(self, values: Tensor) -> Tensor:
        return self.code.decode(self.code.encode(values), values.shape[-1], values.dtype)


def loss(own: Layer, at: tuple[Tensor, Rotation], kind: str) -> float:
    """What rounding adds to the square of the output's error."""
    coded = replace(own, code=cast(TransformCode, Rounded(kind)))
    return float((output(coded, at) - output(own, at)).square().mean())


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q4_0"])
@pytest.mark.parametrize("seed", range(2))
def test_rounding_by_blocks_loses_less(seed: int, kind: str) -> None:
    own, (known, other) = layer(seed, spoiled=True), (window(10 + seed), window(20 + seed))
    assert loss(evened_on(own, known), other, kind) < 0.3 * loss(own, other, kind)


def test_no_channel_is_lost_where_nothing_is_cached_or_asked_for() -> None:
    nothing = torch.zeros(R, R, dtype=torch.float64)
    for covariance, metric in (
        (nothing, nothing),
        (nothing, torch.eye(R).double()),
        (torch.eye(R).double(), nothing),
    ):
        forward, inverse = even_basis(covariance, metric)
        assert float((forward @ inverse - torch.eye(R)).abs().max()) < 1e-9


@pytest.mark.parametrize("seed", range(2))
def test_biases_and_the_mean_become_a_constant_that_spoils_no_block(seed: int) -> None:
    own, at = evened_on(layer(seed), window(seed)), window(30 + seed)
    inputs = at[0].clone()
    inputs[:, 0] = 1.0  # a constant among the inputs is one function of them that is 1
    constant, mean = torch.eye(E, dtype=torch.float64)[0], inputs.mean(0)
    free = without_biases(own, constant, mean, torch.ones(E), torch.float64)
    assert_close(output(free, (inputs, at[1])), output(own, (inputs, at[1])), 1e-5)
    latent = inputs @ free.state["kv_a_proj_with_mqa.weight"][: R + 1].mT
    cached = torch.nn.functional.rms_norm(latent, (R + 1,), free.state["kv_a_layernorm.weight"], 1e-6)
    assert_close(cached[:, -1], torch.full((T,), CONSTANT, dtype=torch.float64), 1e-5)
    assert float(cached[:, :-1].mean(0).abs().max()) < 1e-5
