"""torch.compile takes each layer whole: one graph, the same numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.models.specs import RopeSpec
from headwise.runtime.attention import (
    AttentionLayer,
    ExpertLatentAttention,
    GroupedQueryAttention,
    LatentSpaceAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    SelfAttention,
)
from tests.closeness import assert_close

ROPE = RopeSpec(dim=8)
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS: dict[str, Any] = {"latent_kv_heads": 2, "kv_dim": 16, "num_experts": 3}
LAYERS: dict[str, Callable[[], AttentionLayer]] = {
    "gqa": lambda: GroupedQueryAttention(32, 4, 2, rope=ROPE, qk_norm="head", bias="qkv"),
    "mha": lambda: MultiHeadAttention(32, 4),
    "mqa": lambda: MultiQueryAttention(32, 4, rope=ROPE),
    "mla expanded": lambda: MultiHeadLatentAttention(32, 4, **LATENT, impl="expanded"),
    "mla absorbed": lambda: MultiHeadLatentAttention(32, 4, **LATENT, impl="absorbed", q_lora_rank=12, bias=True),
    "single head": lambda: SelfAttention(32, 16, 8, rope=ROPE, output_projection=True),
    "latent space": lambda: LatentSpaceAttention(32, 2, rope=ROPE, bias=True),
    "experts expanded": lambda: ExpertLatentAttention(32, 4, **EXPERTS, rope=ROPE, impl="expanded"),
    "experts absorbed": lambda: ExpertLatentAttention(32, 4, **EXPERTS, bias=True, impl="absorbed"),
    "experts auto": lambda: ExpertLatentAttention(32, 4, **EXPERTS, rope=RopeSpec(dim=4)),
    "mla auto": lambda: MultiHeadLatentAttention(32, 4, **LATENT),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def hidden(tokens: int, seed: int) -> Tensor:
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_every_layer_is_one_graph(name: str) -> None:
    """A padded pass, then a prefill and decode steps with a cache; the second of those compiles no more."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x, mask = hidden(40, seed=1), torch.ones(2, 40, dtype=torch.bool)
    mask[1, :7] = False
    call: dict[str, Any] = {"attention_mask": mask, "is_causal": True}
    assert_close(compiled(x, **call), layer(x, **call), 1e-5)
    assert len(graphs) == 1
    ours, theirs = layer.new_cache(2, 50), layer.new_cache(2, 50)
    for tokens in (40, 1, 1, 1, 1, 1):
        x = hidden(tokens, seed=tokens)
        assert_close(compiled(x, is_causal=True, cache=ours), layer(x, is_causal=True, cache=theirs), 1e-5)
        assert ours.length == theirs.length
    for compiled_view, view in zip(ours.views(), theirs.views(), strict=True):
        assert_close(compiled_view, view, 1e-5)
    assert len(graphs) == 3


WINDOWED: dict[str, Callable[[], AttentionLayer]] = {
    "gqa": lambda: GroupedQueryAttention(32, 4, 2, rope=ROPE, sliding_window=5),
    "experts": lambda: ExpertLatentAttention(32, 4, **EXPERTS, rope=ROPE, impl="absorbed", sliding_window=5),
}


@pytest.mark.parametrize("name", WINDOWED)
@torch.no_grad()
def test_a_forgetting_cache_is_taken_whole_too(name: str) -> None:
    """Steps past the window, all of one shape, compile no more."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    layer = WINDOWED[name]().eval()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    ours, theirs, compiled_so_far = layer.new_cache(2, 50), layer.new_cache(2, 50), []
    for tokens in (3, *(1,) * 8):
        x = hidden(tokens, seed=tokens)
        assert_close(compiled(x, is_causal=True, cache=ours), layer(x, is_causal=True, cache=theirs), 1e-5)
        compiled_so_far.append(len(graphs))
    assert compiled_so_far[-1] == compiled_so_far[-4]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
@pytest.mark.parametrize("name", ["gqa", "mla absorbed", "experts absorbed"])
@torch.no_grad()
def test_generated_code_decodes_the_same(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    ours, theirs = layer.new_cache(2, 8), layer.new_cache(2, 8)
    for cache in (ours, theirs):
        layer(hidden(7, seed=1), is_causal=True, cache=cache)
    x = hidden(1, seed=2)
    out = torch.compile(layer, fullgraph=True)(x, is_causal=True, cache=ours)
    assert_close(out, layer(x, is_causal=True, cache=theirs), 1e-5)
    for compiled_view, view in zip(ours.views(), theirs.views(), strict=True):
        assert_close(compiled_view, view, 1e-5)
