"""Rotary pairs and a constant that bear an engine's rounding: the same layer, and less lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.conversion.output.without_biases import with_even_pairs, without_biases
from headwise.conversion.solvers.layer import Layer, Rotation, attention_weights
from headwise.models.specs import LatentSpec
from headwise.runtime.quantization.ggml import GgmlCode
from headwise.serving.exports.latent_norm import CONSTANT_WEIGHT
from tests.closeness import assert_close

E, R, P, H, N, V, T = 48, 32, 32, 3, 16, 16, 200


def layer(seed: int, *, constant: float = 1.0) -> Layer:
    """A random MLA layer; the constant parts of two slow pairs of its rotary key are so large."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

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
    bias = drawn(1, R + P)[0]
    bias[[R + 14, R + P // 2 + 15]] += constant  # the real part of one, the imaginary part of the other
    state = {
        "q_proj.weight": drawn(H * (N + P), E),
        "q_proj.bias": drawn(1, H * (N + P))[0],
        "kv_a_proj_with_mqa.weight": drawn(R + P, E),
        "kv_a_proj_with_mqa.bias": bias,
        "kv_b_proj.weight": drawn(H * (N + V), R),
        "o_proj.weight": drawn(E, H * V),
    }
    return Layer(spec, state, list(range(P // 2)))


FREQUENCIES = 1e-4 ** (torch.arange(P // 2, dtype=torch.float64) / (P // 2))


def window(seed: int) -> tuple[Tensor, Rotation]:
    inputs = torch.randn(T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inputs[:, 0] = 1.0  # one function of the inputs is a constant
    angles = torch.arange(T, dtype=torch.float64)[:, None] * FREQUENCIES
    return inputs, Rotation(angles.cos()[None], angles.sin()[None])


def evened(own: Layer, at: tuple[Tensor, Rotation]) -> Layer:
    wide = torch.cat((at[0], at[0].new_ones(T, 1)), 1)
    return with_even_pairs(own, wide.mT @ wide / T, FREQUENCIES)


def log_weights(own: Layer, at: tuple[Tensor, Rotation], kind: str | None = None) -> Tensor:
    """The logarithms of the weights of attention, keys rounded as llama.cpp caches them: pairs side by side."""
    rows = torch.arange(T)
    heads = own.heads(at[0], rows, at[1])
    if kind is not None:
        code = GgmlCode(kind)
        pairs = torch.unflatten(heads.key[..., N:], -1, (2, -1)).transpose(-1, -2).flatten(-2)
        rounded = code.decode(code.encode(pairs), P, torch.float64)
        halves = torch.unflatten(rounded, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        heads = heads._replace(key=torch.cat((heads.key[..., :N], halves), -1))
    return attention_weights(heads, own.spec, rows).log()


def lost(own: Layer, at: tuple[Tensor, Rotation], kind: str) -> float:
    """The divergence of attention by rounding, nats a query."""
    exact = log_weights(own, at)
    return float((exact.exp() * (exact - log_weights(own, at, kind)).nan_to_num()).sum(-1).mean())


@pytest.mark.parametrize("seed", range(3))
def test_the_layer_computes_the_same(seed: int) -> None:
    own, known, other = layer(seed, constant=30.0), window(10 + seed), window(20 + seed)
    turned = evened(own, known)
    for at in (known, other):
        rows = torch.arange(T)
        assert_close(turned.output(*at, rows), own.output(*at, rows), 1e-9)
        shown = log_weights(own, at).isfinite()
        assert_close(log_weights(turned, at)[shown], log_weights(own, at)[shown], 1e-9)
    for name in ("kv_b_proj.weight", "o_proj.weight"):
        assert torch.equal(turned.state[name], own.state[name])
    assert torch.equal(turned.state["kv_a_proj_with_mqa.weight"][:R], own.state["kv_a_proj_with_mqa.weight"][:R])


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q4_0"])
@pytest.mark.parametrize("seed", range(2))
def test_rounding_loses_less_of_keys_with_a_constant_part(seed: int, kind: str) -> None:
    own, known, other = layer(seed, constant=30.0), window(10 + seed), window(20 + seed)
    assert lost(evened(own, known), other, kind) < 0.5 * lost(own, other, kind)


def test_a_pair_that_is_zero_stays_zero() -> None:
    own, at = layer(0), window(1)
    state = {name: tensor.clone() for name, tensor in own.state.items()}
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
        state[name][R:] = 0
    turned = evened(Layer(own.spec, state, own.channels), at)
    assert all(bool(tensor.isfinite().all()) for tensor in turned.state.values())


@pytest.mark.parametrize("seed", range(2))
def test_biases_become_a_constant_that_spoils_no_block(seed: int) -> None:
    own, at = layer(seed), window(30 + seed)
    free = without_biases(own, torch.eye(E, dtype=torch.float64)[0], torch.ones(E), torch.float64)
    rows = torch.arange(T)
    assert_close(free.output(*at, rows), own.output(*at, rows), 1e-5)
    latent = at[0] @ free.state["kv_a_proj_with_mqa.weight"][: R + 1].mT
    cached = torch.nn.functional.rms_norm(latent, (R + 1,), free.state["kv_a_layernorm.weight"], 1e-6)
    expected = CONSTANT_WEIGHT * (R + 1) ** 0.5
    assert_close(cached[:, -1], torch.full((T,), expected, dtype=torch.float64), 1e-5)
    assert expected < float(cached[:, :-1].abs().amax(-1).min())
