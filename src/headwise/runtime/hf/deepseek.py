"""headwise's attention in DeepSeek's modules, whose stock forward decodes every cached latent before it attends."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from torch import Tensor, nn

from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import LatentSpec, RopeSpec
from headwise.runtime.attention.rope import RotaryEmbedding
from headwise.runtime.hf.attention import HostedLatentAttention
from headwise.runtime.hf.linear import FewTokensLinear

FAMILIES = {"deepseek_v2": "DeepseekV2Attention", "deepseek_v3": "DeepseekV3Attention"}
"""transformers' attention class of each family."""

_PROJECTIONS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def take_over_attention(model: Any) -> None:
    """Make the attention modules of a ``deepseek_v2`` or ``deepseek_v3`` model attend to the cached latents directly.

    Outputs are the same up to rounding. Parameters, their names and hooks stay the same objects.

    Args:
        model: a loaded transformers model of one of these families.

    Raises:
        SpecError: there are no attention modules of the family's transformers class.
        ArgumentError: a module cannot be changed: its weights are not plain, its forward was replaced, or its masks
            are made for flash or flex attention. No module has been changed then.
    """
    if (implementation := model.config._attn_implementation) not in ("sdpa", "eager", "headwise"):
        rule = "does not pass masks as tensors; load the model with sdpa or eager"
        raise ArgumentError("attn_implementation", implementation, rule)
    stock = FAMILIES[model.config.model_type]
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == stock or isinstance(module, OptimizedLatentAttention)
    }
    if not modules:
        raise SpecError("model", type(model).__name__, f"has no {stock}")
    changed = {name: m for name, m in modules.items() if not isinstance(m, OptimizedLatentAttention)}
    for name, module in changed.items():  # checks all of them before the first is changed
        _check(name, module)
    for module in changed.values():
        _take_over(module)


class OptimizedLatentAttention(HostedLatentAttention):
    """DeepSeek's attention module after `take_over_attention`, which sets the class of existing modules."""

    def _rotation(self, tables: Any, states: Tensor, past: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tables, Tensor):  # V2: cos + i·sin
            return tables.real, tables.imag
        cos, sin = tables  # V3: every angle is stored twice, in the first half and in the second
        half = self.spec.qk_rope_head_dim // 2
        return cos[..., :half], sin[..., :half]


def _check(name: str, module: Any) -> None:
    """Refuse a module for which headwise's forward would give other results.

    Raises:
        ArgumentError: its forward was replaced, or ``kv_b_proj`` is no plain linear layer.
    """
    if "forward" in vars(module):  # such as accelerate's hooks, which call the forward that they replaced
        raise ArgumentError(name, type(module).__name__, "has a forward of its own, which optimize would not replace")
    # headwise calls the other projections, but multiplies with this one's weight itself. In a quantised layer, or one
    # with an adapter, the weight is not the whole projection.
    decoder = module.kv_b_proj
    rows = module.num_heads * (module.qk_nope_head_dim + module.v_head_dim)
    if type(decoder) not in (nn.Linear, FewTokensLinear) or tuple(decoder.weight.shape) != (
        rows,
        module.kv_lora_rank,
    ):
        raise ArgumentError(f"{name}.kv_b_proj", type(decoder).__name__, "must be a whole, plain linear layer")


def _take_over(module: Any) -> None:
    """Change a module's class, as torch's parametrizations do, so that its hooks and parameters stay."""
    config = module.config
    module.spec = LatentSpec(
        hidden_size=module.hidden_size,
        num_heads=module.num_heads,
        kv_lora_rank=module.kv_lora_rank,
        qk_nope_head_dim=module.qk_nope_head_dim,
        qk_rope_head_dim=module.qk_rope_head_dim,
        v_head_dim=module.v_head_dim,
        q_lora_rank=module.q_lora_rank,
        bias=tuple(name for name in _PROJECTIONS if getattr(getattr(module, name), "bias", None) is not None),
        softmax_scale=module.scaling,
    )
    for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"):
        if getattr(module, name, None) is None:
            setattr(module, name, None)
    # cos and sin come from the model; V2 always rotates neighbouring channels.
    module.rope = RotaryEmbedding(
        RopeSpec(dim=module.qk_rope_head_dim, interleaved=bool(getattr(config, "rope_interleave", True)))
    )
    module.dropout = float(module.attention_dropout or 0.0)
    module.backend, module.impl = "auto", "auto"
    module.window, module.output_dropout = None, 0.0
    stock: Any = type(module)
    module.__class__ = _optimized(stock)


@cache
def _optimized(stock: Any) -> type[Any]:
    """A class of headwise's attention that is also the stock class, by which transformers finds attention modules."""
    return type(f"Optimized{stock.__name__}", (OptimizedLatentAttention, stock), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """Look up a class of `_optimized` by its name, as pickle does, and with it a spawned worker."""
    for family, stock in FAMILIES.items():
        if name == f"Optimized{stock}":
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            return _optimized(getattr(modeling, stock))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
