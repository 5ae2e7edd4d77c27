"""Latent-space attention, against its equations."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import ArgumentError, SpecError
from headwise.runtime.attention import LatentSpaceAttention, MultiHeadAttention, build
from headwise.runtime.kernels import Backend
from tests.backends import EXACT
from tests.by_hand import attend_by_rows, may_attend, project, rotate_by_hand
from tests.closeness import assert_close
from tests.runtime.attention.layers import PAIRS, ROPE, hidden, randomized

SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow latent": {"latent_dim": 4},
    "whole queries": {"latent_dim": 16},
    "biased": {"latent_dim": 12, "bias": True},
    "wide heads, rotated": {"latent_dim": 20, "head_dim": 9, "rope": ROPE, "bias": "qkv"},
    "pairs": {"latent_dim": 24, "head_dim": 6, "rope": PAIRS, "softmax_scale": 0.7, "bias": ["v_out_proj"]},
}


def make(sizes: str, seed: int = 0, **more: Any) -> LatentSpaceAttention:
    return randomized(LatentSpaceAttention(16, 4, **SIZES[sizes], **more), seed)


def by_hand(layer: LatentSpaceAttention, x: Tensor, source: Tensor, kept: Tensor) -> Tensor:
    """Head h has dims h·R/H … of the latents, and the first R/H of its own D dims of the query."""
    spec = layer.spec
    width, D = spec.latent_dim // spec.num_heads, spec.head_dim

    def turned(part: Tensor) -> Tensor:
        if layer.rope is None:
            return part
        at, angles = torch.arange(part.shape[1]), layer.rope.frequencies
        return torch.stack([rotate_by_hand(row, at, angles, interleaved=layer.rope.spec.interleaved) for row in part])

    query, key, value = project(layer.q_proj, x), project(layer.k_proj, source), project(layer.v_proj, source)
    heads = range(spec.num_heads)
    mixed = attend_by_rows(
        torch.stack([turned(query[..., h * D : h * D + width]) for h in heads], 1),
        torch.stack([turned(key[..., h * width : (h + 1) * width]) for h in heads], 1),
        torch.stack([value[..., h * width : (h + 1) * width] for h in heads], 1),
        kept,
        width**-0.5 if spec.softmax_scale is None else spec.softmax_scale,
    )
    return project(layer.o_proj, project(layer.v_out_proj, torch.cat(list(mixed.unbind(1)), dim=-1)))


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_it_is_its_equations(backend: Backend, sizes: str) -> None:
    layer, x = make(sizes, 1, backend=backend), hidden(2, 6)
    padding = torch.tensor([[True] * 6, [False, False, True, True, True, False]])
    for is_causal, mask in itertools.product([False, True], [None, padding]):
        allowed = may_attend(mask, is_causal, (2, 4, 6, 6))
        out = layer(x, attention_mask=mask, is_causal=is_causal)
        assert_close(out, by_hand(layer, x, x, allowed), 1e-12)


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_cross_attention_is_its_equations(sizes: str) -> None:
    layer, x, source = make(sizes, 2), hidden(2, 3), hidden(2, 5, seed=3)
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    allowed = may_attend(mask, False, (2, 4, 3, 5))
    assert_close(layer(x, key_value_states=source, attention_mask=mask), by_hand(layer, x, source, allowed), 1e-12)


@torch.no_grad()
def test_the_queries_other_dims_are_dropped() -> None:
    layer, x = make("biased", 3), hidden(2, 5)
    before = layer(x)
    dropped = torch.arange(16) % 4 == 3  # a latent head is 3 of 4 wide
    layer.q_proj.weight[dropped] = torch.nan
    assert torch.equal(layer(x), before)
    layer.q_proj.weight[0] += 1
    assert not torch.equal(layer(x), before)


@torch.no_grad()
def test_a_latent_as_wide_as_the_queries_is_multi_head_attention_with_one_more_projection() -> None:
    layer, x = make("whole queries", 4), hidden(2, 5)
    multi = MultiHeadAttention(16, 4).double()
    state = {name: value for name, value in layer.state_dict().items() if not name.startswith("v_out")}
    state["o_proj.weight"] = layer.o_proj.weight @ layer.v_out_proj.weight
    multi.load_state_dict(state)
    assert_close(layer(x, is_causal=True), multi(x, is_causal=True), 1e-12)


@torch.no_grad()
def test_the_guides_latent_of_half_the_width() -> None:
    layer = LatentSpaceAttention(512, 8)
    assert layer.spec == LatentSpaceAttention(512, 8, 256).spec
    assert sum(parameter.numel() for parameter in layer.parameters()) == 917504
    assert (layer.spec.mechanism, layer.spec.label) == ("latent_space", "latent-space 256")
    out, weights = layer(torch.zeros(2, 10, 512), return_weights=True)
    assert (out.shape, weights.shape) == ((2, 10, 512), (2, 8, 10, 10))
    assert [tuple(buffer.shape) for buffer in layer.new_cache(2, 10).buffers] == [(2, 8, 10, 32)] * 2


@pytest.mark.parametrize("sizes", SIZES)
def test_build_makes_it_again(sizes: str) -> None:
    spec = make(sizes).spec
    assert build(spec).spec == spec


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((16, 4, 6), {}, SpecError, "latent_dim = 6: must be a multiple of num_heads = 4"),
        ((16, 4, 20), {}, SpecError, "latent_dim = 20: must be at most num_heads · head_dim = 16: queries are cut"),
        ((16, 4, 0), {}, SpecError, "latent_dim = 0: must be a whole number of at least 1"),
        ((16, 3), {}, SpecError, "num_heads = 3: must divide hidden_size = 16, or give head_dim"),
        ((16, 4, 8), {"head_dim": 0}, SpecError, "head_dim = 0: must be a whole number of at least 1"),
        ((16, 4, 8), {"rope": ROPE}, SpecError, "rope dim = 4: must be at most latent_dim / H = 2"),
        ((16, 4), {"bias": "hf"}, SpecError, "bias = 'hf': must be True, False, one of ['qkv'] or projection names"),
        ((16, 4), {"bias": ["k"]}, SpecError, "bias = 'k': must name one of ['q_proj', 'k_proj', 'v_proj', 'v_out_"),
        ((16, 4), {"dropout": 1.0}, ArgumentError, "dropout = 1.0: must be at least 0 and below 1"),
        ((16, 4), {"backend": "fa2"}, ArgumentError, "backend = 'fa2': must be one of auto, reference, sdpa, packed"),
    ],
)
def test_what_cannot_be_made(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        LatentSpaceAttention(*args, **kwargs)
