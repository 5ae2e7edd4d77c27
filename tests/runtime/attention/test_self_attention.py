"""One head alone, against its equations."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import cost
from headwise.errors import SpecError
from headwise.models.specs import GroupedSpec
from headwise.runtime.attention import SelfAttention, build
from headwise.runtime.kernels import Backend
from tests.backends import EXACT
from tests.by_hand import attend_by_rows, may_attend, project, rms_by_hand, rotate_by_hand
from tests.closeness import assert_close
from tests.runtime.attention.layers import PAIRS, ROPE, hidden, randomized

SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow values": {"head_dim": 6, "v_head_dim": 3},
    "wide values, biased": {"head_dim": 5, "v_head_dim": 9, "bias": True},
    "rotated": {"head_dim": 7, "rope": ROPE, "bias": "qkv"},
    "projected": {"head_dim": 6, "v_head_dim": 3, "output_projection": True, "bias": True},
    "normed": {"qk_norm": "head", "rope": PAIRS, "softmax_scale": 0.7, "output_projection": True},
}


def make(sizes: str, seed: int = 0, **more: Any) -> SelfAttention:
    return randomized(SelfAttention(16, **SIZES[sizes], **more), seed)


def by_hand(layer: SelfAttention, x: Tensor, source: Tensor, kept: Tensor) -> Tensor:
    """``softmax(q kᵀ / sqrt(d_k)) v``."""

    def compared(linear: torch.nn.Linear, norm: Any, states: Tensor) -> Tensor:
        out = project(linear, states)
        if norm is not None:
            out = rms_by_hand(out, norm.weight, norm.eps)
        if layer.rope is not None:
            at, angles = torch.arange(states.shape[1]), layer.rope.frequencies
            out = torch.stack(
                [rotate_by_hand(row, at, angles, interleaved=layer.rope.spec.interleaved) for row in out]
            )
        return out[:, None]

    query, key = compared(layer.q_proj, layer.q_norm, x), compared(layer.k_proj, layer.k_norm, source)
    mixed = attend_by_rows(query, key, project(layer.v_proj, source)[:, None], kept, layer.spec.softmax_scale)[:, 0]
    return mixed if layer.o_proj is None else project(layer.o_proj, mixed)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_it_is_its_equations(backend: Backend, sizes: str) -> None:
    layer, x = make(sizes, 1, backend=backend), hidden(2, 6)
    padding = torch.tensor([[True] * 6, [False, False, True, True, True, False]])
    for is_causal, mask in itertools.product([False, True], [None, padding]):
        allowed = may_attend(mask, is_causal, (2, 1, 6, 6))
        out = layer(x, attention_mask=mask, is_causal=is_causal)
        assert_close(out, by_hand(layer, x, x, allowed), 1e-12)


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_cross_attention_is_its_equations(sizes: str) -> None:
    layer, x, source = make(sizes, 2), hidden(2, 3), hidden(2, 5, seed=3)
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    allowed = may_attend(mask, False, (2, 1, 3, 5))
    assert_close(layer(x, key_value_states=source, attention_mask=mask), by_hand(layer, x, source, allowed), 1e-12)


@torch.no_grad()
def test_without_an_output_projection_the_values_are_the_output() -> None:
    layer, x = make("narrow values"), hidden(2, 4)
    assert [name for name, _ in layer.named_parameters()] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert layer(x).shape == (2, 4, 3)
    only_itself = torch.eye(4).bool()[None, None]
    assert_close(layer(x, attention_mask=only_itself), project(layer.v_proj, x), 1e-12)
    assert make("projected")(x).shape == (2, 4, 16)


def test_widths_default_to_the_hidden_size() -> None:
    spec = SelfAttention(16).spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim) == (1, 1, 16, 16)
    spec = SelfAttention(16, 5).spec
    assert (spec.head_dim, spec.value_dim, spec.output_projection, spec.mechanism) == (5, 5, False, "single_head")
    assert cost.parameters(SelfAttention(16, 5, 3).spec) == 16 * (5 + 5 + 3)


@pytest.mark.parametrize("sizes", SIZES)
def test_build_makes_it_again(sizes: str) -> None:
    spec = make(sizes).spec
    assert build(spec).spec == spec
    assert GroupedSpec.from_dict(spec.to_dict()) == spec


def test_a_bias_of_a_projection_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        SpecError, match=re.escape("bias = 'o_proj': must name one of ['q_proj', 'k_proj', 'v_proj']")
    ):
        SelfAttention(16, bias=["o_proj"])
    assert SelfAttention(16, bias=True).spec.bias == ("q_proj", "k_proj", "v_proj")
