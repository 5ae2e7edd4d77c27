"""The closed forms of headwise.cost, held to real layers: their parameters, cache bytes and counted FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from headwise import cost
from headwise.attention import (
    AttentionLayer,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
)
from headwise.specs import RopeSpec

DTYPES = ["float64", "float32", "float16", "bfloat16"]


@st.composite
def grouped(draw: st.DrawFn) -> GroupedQueryAttention:
    K, group, D = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 7))
    bias = draw(st.sampled_from([False, True, "qkv", ["k_proj"], ["q_proj", "o_proj"]]))
    rope = RopeSpec(dim=2) if D > 1 and draw(st.booleans()) else None
    return GroupedQueryAttention(
        draw(st.integers(1, 20)),
        K * group,
        K,
        head_dim=D,
        v_head_dim=draw(st.none() | st.integers(1, 7)),
        bias=bias,
        qk_norm=draw(st.sampled_from([None, "head", "full"])),
        rope=rope,
        backend="reference",
    )


@st.composite
def latent(draw: st.DrawFn) -> MultiHeadLatentAttention:
    q_lora_rank = draw(st.none() | st.integers(1, 9))
    names = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    names += ["q_proj"] if q_lora_rank is None else ["q_a_proj", "q_b_proj"]
    return MultiHeadLatentAttention(
        draw(st.integers(1, 20)),
        draw(st.integers(1, 5)),
        kv_lora_rank=draw(st.integers(1, 12)),
        qk_nope_head_dim=draw(st.integers(0, 6)),
        qk_rope_head_dim=2 * draw(st.integers(1, 3)),
        v_head_dim=draw(st.integers(1, 7)),
        q_lora_rank=q_lora_rank,
        latent_norm=draw(st.booleans()),
        bias=draw(st.sampled_from([True, False, "hf", "qkv"]) | st.lists(st.sampled_from(names), unique=True)),
        impl=draw(st.sampled_from(["expanded", "absorbed"])),
        backend="reference",
    )


def counted_flops(layer: AttentionLayer, batch: int, new: int, total: int) -> int:
    """What torch counts of one call with ``total − new`` tokens in the cache; no arithmetic is done on meta."""
    layer = layer.to("meta")
    E = layer.spec.hidden_size
    cache = None
    if total > new:
        cache = layer.new_cache(batch, total)
        layer(torch.empty(batch, total - new, E, device="meta"), cache=cache)
    with FlopCounterMode(display=False) as counter:
        layer(torch.empty(batch, new, E, device="meta"), cache=cache)
    return counter.get_total_flops()


def assert_cost_matches(layer: AttentionLayer, batch: int, new: int, past: int, dtype: str, impl: str) -> None:
    spec = layer.spec
    assert cost.parameters(spec) == sum(parameter.numel() for parameter in layer.parameters())
    cache = layer.new_cache(batch, new + past, dtype=getattr(torch, dtype))
    assert cost.cache_bytes(spec, new + past, batch=batch, dtype=dtype) == cache.nbytes
    for total in (new, new + past):
        flops = cost.forward_flops(spec, new, total, batch=batch, causal=False, impl=impl)
        assert flops == counted_flops(layer, batch, new, total)


SHAPES: dict[str, Any] = {
    "batch": st.integers(1, 3),
    "new": st.integers(1, 6),
    "past": st.integers(1, 9),
    "dtype": st.sampled_from(DTYPES),
}


@settings(max_examples=60, deadline=None)
@given(layer=grouped(), **SHAPES)
def test_grouped_attention(layer: GroupedQueryAttention, batch: int, new: int, past: int, dtype: str) -> None:
    assert_cost_matches(layer, batch, new, past, dtype, "direct")


@settings(max_examples=60, deadline=None)
@given(layer=latent(), **SHAPES)
def test_latent_attention(layer: MultiHeadLatentAttention, batch: int, new: int, past: int, dtype: str) -> None:
    assert_cost_matches(layer, batch, new, past, dtype, layer.impl)


@settings(max_examples=40, deadline=None)
@given(layer=latent(), **SHAPES)
def test_auto_is_what_auto_costs(
    layer: MultiHeadLatentAttention, batch: int, new: int, past: int, dtype: str
) -> None:
    layer.impl = "auto"
    assert_cost_matches(layer, batch, new, past, dtype, "auto")


@pytest.mark.parametrize("changes", [{"qk_nope_head_dim": 0}, {"bias": ["kv_b_proj"]}])
def test_absorption_at_its_edges(changes: dict[str, Any]) -> None:
    """Without content dims the queries meet only the rotary key; a value bias is one more column of values."""
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, **changes}
    layer = MultiHeadLatentAttention(16, 3, **sizes, impl="absorbed", backend="reference")
    flops = cost.forward_flops(layer.spec, 2, 9, batch=2, causal=False, impl="absorbed")
    assert flops == counted_flops(layer, 2, 2, 9)


def guide_layers() -> dict[str, AttentionLayer]:
    """The four layers of the guides' exact figures: E = 256, h = 8, biases on every projection."""
    return {
        "mha": MultiHeadAttention(256, 8, bias=True),
        "mqa": MultiQueryAttention(256, 8, bias=True),
        "gqa": GroupedQueryAttention(256, 8, group_size=2, bias=True),
        "mla": MultiHeadLatentAttention(
            256,
            8,
            kv_lora_rank=64,
            q_lora_rank=64,
            qk_nope_head_dim=16,
            qk_rope_head_dim=26,
            v_head_dim=16,
            latent_norm=False,
            bias=True,
        ),
    }


@pytest.mark.parametrize(
    ("mechanism", "parameters", "thop"),
    [("mha", 263168, 2621440), ("mqa", 148032, 1474560), ("gqa", 197376, 1966080), ("mla", 111082, 1100800)],
)
def test_the_guides_exact_figures(mechanism: str, parameters: int, thop: int) -> None:
    layer = guide_layers()[mechanism]
    assert layer.spec.mechanism == mechanism
    assert sum(parameter.numel() for parameter in layer.parameters()) == parameters
    assert cost.parameters(layer.spec) == parameters
    assert cost.thop_count(layer.spec, 10) == thop
    # Counted from the modules too: one for each multiply-add of a linear layer.
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    assert 10 * sum(linear.weight.numel() for linear in linears) == thop
    assert layer(torch.zeros(2, 10, 256)).shape == (2, 10, 256)


@pytest.mark.parametrize(
    ("layer", "parameters"),
    [
        (MultiHeadAttention(512, 8), 1_048_576),
        (MultiQueryAttention(512, 8), 589_824),
        (GroupedQueryAttention(512, 8, 4), 786_432),
    ],
)
def test_the_guides_weights_only_figures(layer: AttentionLayer, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in layer.parameters()) == parameters
    assert cost.parameters(layer.spec) == parameters
