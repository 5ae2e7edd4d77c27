"""The program that `test_heads` runs on several ranks; it prints one line at its end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import headwise
from headwise.costs.formulas import layer as layer_cost
from headwise.errors import ArgumentError
from headwise.models.specs import RopeSpec
from headwise.runtime.attention.base import AttentionLayer
from headwise.runtime.parallel import ContextShare, cut_tensor, rank_spec, share_context, share_heads
from tests.closeness import assert_close

ROPE = RopeSpec(dim=8)
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
EXPERTS = {"kv_dim": 6, "num_experts": 3, "top_k": 2, "head_dim": 8}

LAYERS: dict[str, Callable[[], AttentionLayer]] = {
    "mha": lambda: headwise.MultiHeadAttention(32, 4, head_dim=8, rope=ROPE, bias=True),
    "gqa": lambda: headwise.GroupedQueryAttention(32, 8, 2, head_dim=8, rope=ROPE, bias=True),
    "gqa of eight": lambda: headwise.GroupedQueryAttention(32, 8, 8, head_dim=8),
    "mqa": lambda: headwise.MultiQueryAttention(32, 4, head_dim=8, bias="qkv"),
    "window": lambda: headwise.GroupedQueryAttention(32, 4, 2, head_dim=8, sliding_window=5),
    "norms of heads": lambda: headwise.GroupedQueryAttention(32, 4, 2, head_dim=8, qk_norm="head"),
    "norms of all heads": lambda: headwise.GroupedQueryAttention(32, 8, 2, head_dim=8, qk_norm="full", rope=ROPE),
    "mla": lambda: headwise.MultiHeadLatentAttention(32, 4, **MLA, bias=True),
    "mla, absorbed": lambda: headwise.MultiHeadLatentAttention(32, 4, **MLA, impl="absorbed", bias=True),
    "mla, query latent": lambda: headwise.MultiHeadLatentAttention(32, 8, **MLA, q_lora_rank=10, impl="expanded"),
    "mla, norms of heads": lambda: behind_norms("head"),
    "mla, norms of all heads": lambda: behind_norms("full"),
    "latent space": lambda: headwise.LatentSpaceAttention(32, 4, latent_dim=16, bias=True),
    "experts": lambda: headwise.ExpertLatentAttention(32, 4, latent_kv_heads=2, **EXPERTS, bias=True),
    "experts, one latent": lambda: headwise.ExpertLatentAttention(32, 8, latent_kv_heads=1, **EXPERTS, rope=ROPE),
    "experts, sequence": lambda: headwise.ExpertLatentAttention(
        32, 4, latent_kv_heads=4, conditioning="sequence", **EXPERTS
    ),
}


def behind_norms(kind: str) -> AttentionLayer:
    sizes = {**MLA, "qk_nope_head_dim": 4, "v_head_dim": 8}
    return headwise.MultiHeadLatentAttention(
        32, 4, **sizes, latent_norm=False, qk_norm=kind, num_kv_heads=2, head_dim=8
    )


def check(name: str, make: Callable[[], AttentionLayer]) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(sum(map(ord, name)))
    whole = make().double()
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer = share_heads(copy.deepcopy(whole))
    states, target = torch.randn(2, 2, 9, 32, dtype=torch.float64)
    causal = getattr(whole.spec, "conditioning", "token") == "token"

    gradients = []
    outputs = []
    for one in (whole, layer):
        inputs = states.clone().requires_grad_()
        out = one(inputs, is_causal=causal)
        (out * target).sum().backward()
        outputs.append(out.detach())
        gradients.append(inputs.grad)
    assert_close(outputs[1], outputs[0], 1e-10)
    assert_close(gradients[1], gradients[0], 1e-10)
    check_weights(whole, layer, ranks, rank)

    mask = torch.rand(2, whole.spec.num_heads, 9, 9) > 0.3
    if causal and whole.spec.sliding_window is None:
        one, other = (x(states, attention_mask=mask, is_causal=True, return_weights=True) for x in (whole, layer))
        assert_close(other[0], one[0], 1e-10)
        assert_close(other[1], one[1], 1e-10)
    if causal:
        check_decoding(whole, layer, states)
        if whole.spec.sliding_window is None and not (hasattr(whole, "gate_proj") and whole.rope is not None):
            check_context(whole, states)


def check_weights(whole: AttentionLayer, layer: AttentionLayer, ranks: int, rank: int) -> None:
    """Every weight's derivative is the part of the whole one's that the rank holds."""
    split = whole.head_split()
    own = dict(layer.named_parameters())
    for name, parameter in whole.named_parameters():
        if name not in own:
            assert name.endswith("bias"), name
            assert rank > 0
            continue
        owner, _, kind = name.rpartition(".")
        cut = split.cuts.get(name) or split.cuts.get(owner)
        expected = parameter.grad
        assert expected is not None
        if cut is not None and not (kind == "bias" and cut.dim > 0):
            expected = cut_tensor(expected, cut, ranks, rank)
        grad = own[name].grad
        assert grad is not None, name
        # The derivative of a key's bias is rounding alone: it adds the same to all scores of a query.
        scale = whole.get_parameter(f"{owner}.weight").grad if kind == "bias" else parameter.grad
        assert_close(grad, expected, 1e-9, largest_of=scale)


@torch.no_grad()
def check_decoding(whole: AttentionLayer, layer: AttentionLayer, states: Tensor) -> None:
    caches = [one.new_cache(2, 16, dtype=torch.float64) for one in (whole, layer)]
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
        one, other = (
            x(states[:, start:end], is_causal=True, cache=cache)
            for x, cache in zip((whole, layer), caches, strict=True)
        )
        assert_close(other, one, 1e-10)
    held = sum(buffer.shape[1] * buffer.shape[3] for buffer in caches[1].buffers)
    assert held == layer_cost.cache_values(rank_spec(whole.spec, dist.get_world_size()))


REFUSED: dict[str, dict[str, Any]] = {
    "is_causal": {"is_causal": False},
    "return_weights": {"return_weights": True},
    "attention_mask": {"attention_mask": torch.ones(2, 5, dtype=torch.bool)},
}
"""Calls that a shared context refuses, by the field that is named."""


@torch.no_grad()
def check_context(whole: AttentionLayer, states: Tensor) -> None:
    """Ranks that share the tokens of a context; blocks of 2, so that some ranks have none of the first ones."""
    layer, padding = share_context(copy.deepcopy(whole)), torch.ones(2, 9, dtype=torch.bool)
    padding[1, :2] = False
    for mask in (None, padding):
        cache = whole.new_cache(2, 16, dtype=torch.float64)
        shared = ContextShare(whole.new_cache(2, 16, dtype=torch.float64), block=2)
        for field, call in REFUSED.items():  # before anything is cached
            with pytest.raises(ArgumentError, match=field):
                layer(states[:, :3], **{"is_causal": True, "cache": shared, **call})
            assert shared.length == shared.held.length == 0
        for start, end in ((0, 1), (1, 4), (4, 5), (5, 6), (6, 9)):
            seen = None if mask is None else mask[:, :end]
            one = whole(states[:, start:end], is_causal=True, cache=cache, attention_mask=seen)
            other = layer(states[:, start:end], is_causal=True, cache=shared, attention_mask=seen)
            is_real = torch.ones(2, end - start, dtype=torch.bool) if mask is None else mask[:, start:end]
            assert_close(other[is_real], one[is_real], 1e-9)
        assert shared.length == cache.length == 9
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, shared.held.length)
        assert sum(counts) == 9
        assert max(counts) - min(counts) <= 2
    assert_close(layer(states, is_causal=True), whole(states, is_causal=True), 1e-9)  # without a shared context


def refuses(make: Callable[[], Any], field: str, share: Callable[[Any], Any] = share_heads) -> None:
    with pytest.raises(ArgumentError) as caught:
        share(make())
    assert caught.value.field == field


@torch.no_grad()
def groups() -> None:
    """Half of the ranks share heads, and the halves share a context: fewer key–value heads than ranks of a half."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks < 4:
        return
    half = ranks // 2
    pairs = [dist.new_group([*range(start, start + half)]) for start in (0, half)]
    across = [dist.new_group([at, at + half]) for at in range(half)]
    torch.manual_seed(0)
    whole = headwise.GroupedQueryAttention(32, 4, 1, head_dim=8, rope=ROPE).double()
    layer = share_context(share_heads(copy.deepcopy(whole), pairs[rank // half]))
    states = torch.randn(1, 9, 32, dtype=torch.float64)
    cache = whole.new_cache(1, 16, dtype=torch.float64)
    shared = ContextShare(layer.new_cache(1, 16, dtype=torch.float64), across[rank % half], block=2)
    for start, end in ((0, 5), (5, 6), (6, 9)):
        one = whole(states[:, start:end], is_causal=True, cache=cache)
        assert_close(layer(states[:, start:end], is_causal=True, cache=shared), one, 1e-9)
    full = ContextShare(layer.new_cache(1, 2, dtype=torch.float64), across[rank % half], block=2)
    with pytest.raises(ArgumentError, match="must be at most 2, the max_length of each rank's cache"):
        layer(states[:, :5], is_causal=True, cache=full)  # on all ranks, though one alone has too many
    full.reset()
    assert full.length == 0


def coded() -> headwise.MultiHeadAttention:
    """A layer that has a code, as loaded models' layers have."""
    layer = headwise.MultiHeadAttention(32, 4, head_dim=8)
    layer.code = object()
    return layer


def main() -> None:
    dist.init_process_group("gloo")
    for name, make in LAYERS.items():
        try:
            check(name, make)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    refuses(lambda: headwise.MultiHeadAttention(30, 5, head_dim=6), "ranks")
    refuses(lambda: headwise.GroupedQueryAttention(30, 12, 3, head_dim=6), "ranks")
    refuses(lambda: headwise.LatentSpaceAttention(30, 5, latent_dim=10), "ranks")
    refuses(lambda: headwise.MultiHeadAttention(32, 4, head_dim=8, output_projection=False), "output_projection")
    groups()
    refuses(LAYERS["window"], "sliding_window", share_context)
    refuses(LAYERS["experts, one latent"], "rope", share_context)
    for share in (share_heads, share_context):
        refuses(coded, "code", share)
    if dist.get_rank() == 0:
        print("every mechanism agrees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
