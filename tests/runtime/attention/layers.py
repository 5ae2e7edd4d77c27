"""Small random float64 layers of every mechanism, 16 wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwise.models.specs import RopeSpec
from headwise.runtime.attention import (
    AttentionLayer,
    ExpertLatentAttention,
    GroupedQueryAttention,
    LatentSpaceAttention,
    MultiHeadLatentAttention,
    SelfAttention,
)

Layer = TypeVar("Layer", bound=AttentionLayer)
ROPE = RopeSpec(dim=4, theta=100.0)
PAIRS = RopeSpec(dim=4, theta=100.0, interleaved=True)
WHOLE = RopeSpec(dim=6, theta=100.0)
EXPERTS: dict[str, Any] = {"head_dim": 6, "latent_kv_heads": 2, "kv_dim": 5, "num_experts": 3}


def randomized(layer: Layer, seed: int = 0) -> Layer:
    """Make every parameter random, weights of about 1/sqrt(16) and vectors of about 1, in float64 and eval mode."""
    layer.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            spread = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + spread if parameter.dim() == 1 else spread if parameter.dim() == 2 else 2 * spread)
    return layer


def hidden(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def experts(**changes: Any) -> ExpertLatentAttention:
    return ExpertLatentAttention(16, 4, **{**EXPERTS, **changes})


def mla(**changes: Any) -> MultiHeadLatentAttention:
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return MultiHeadLatentAttention(16, 3, **{**sizes, **changes})


NEW_LAYERS: dict[str, Callable[..., AttentionLayer]] = {
    "single head": lambda **more: SelfAttention(16, 6, 3, **more),
    "single head, projected": lambda **more: SelfAttention(
        16, 4, bias=True, rope=ROPE, qk_norm="head", output_projection=True, **more
    ),
    "latent space": lambda **more: LatentSpaceAttention(16, 4, **more),
    "latent space, rotated": lambda **more: LatentSpaceAttention(
        16, 2, 10, head_dim=7, bias=True, rope=PAIRS, softmax_scale=0.7, **more
    ),
    "experts expanded": lambda **more: experts(impl="expanded", **more),
    "experts expanded, rotated": lambda **more: experts(impl="expanded", bias=True, rope=ROPE, **more),
    "experts absorbed": lambda **more: experts(impl="absorbed", bias=True, **more),
    "experts absorbed, partly rotated": lambda **more: experts(impl="absorbed", rope=PAIRS, **more),
    "experts absorbed, all rotated": lambda **more: experts(impl="absorbed", rope=WHOLE, softmax_scale=0.7, **more),
}
LAYERS: dict[str, Callable[..., AttentionLayer]] = {
    **NEW_LAYERS,
    "grouped": lambda **more: GroupedQueryAttention(16, 4, 2, rope=ROPE, **more),
    "mla expanded": lambda **more: mla(impl="expanded", **more),
    "mla absorbed": lambda **more: mla(impl="absorbed", bias=True, **more),
    "mla behind norms": lambda **more: mla(qk_norm="head", num_kv_heads=1, head_dim=4, **more),
}


def output_bias(layer: AttentionLayer) -> Tensor:
    """The output of a token that attends to nothing."""
    spec: Any = layer.spec
    projection: Any = getattr(layer, "o_proj", None)
    if projection is None:
        return torch.zeros(spec.num_heads * spec.value_dim, dtype=torch.float64)
    out = torch.zeros(16, dtype=torch.float64) if projection.bias is None else projection.bias
    up: Any = getattr(layer, "v_out_proj", None)
    return out if up is None or up.bias is None else out + projection.weight @ up.bias


def gradients_are_right(layer: AttentionLayer, x: Tensor, **call: Any) -> bool:
    """Compare gradients of the input and every parameter with finite differences."""
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        by_name = dict(zip(names, parameters, strict=True))
        out = torch.func.functional_call(layer, by_name, (x,), call)
        assert isinstance(out, Tensor)
        return out

    return torch.autograd.gradcheck(run, (x.requires_grad_(), *values), fast_mode=True)
