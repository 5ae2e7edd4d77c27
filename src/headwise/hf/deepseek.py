"""DeepSeek's attention modules made headwise's in place: stock decodes every cached latent before it attends."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from torch import Tensor, nn

from headwise.attention.rope import RotaryEmbedding
from headwise.errors import ArgumentError, SpecError
from headwise.hf.attention import HostedLatentAttention
from headwise.hf.linear import FewTokensLinear
from headwise.specs import LatentSpec, RopeSpec

FAMILIES = {"deepseek_v2": "DeepseekV2Attention", "deepseek_v3": "DeepseekV3Attention"}
"""transformers' attention class of each family."""

_PROJECTIONS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def take_over_attention(model: Any) -> None:
    """Let the attention modules of a ``deepseek_v2`` or ``deepseek_v3`` model attend to the cached latents.

    Outputs are the same to rounding, and parameters, their names and hooks are the same objects.

    Raises:
        SpecError: there are no attention modules of the family's own class.
        ArgumentError: a module cannot be taken over: its weights are not plain, its forward was replaced, or its
            masks are made for flash or flex attention. Then no module has been changed.
    """
    if (masks := model.config._attn_implementation) not in ("sdpa", "eager", "headwise"):
        rule = "does not say in tensors who attends to whom; load the model with sdpa or eager"
        raise ArgumentError("attn_implementation", masks, rule)
    stock = FAMILIES[model.config.model_type]
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == stock or isinstance(module, OptimizedLatentAttention)
    }
    if not modules:
        raise SpecError("model", type(model).__name__, f"has no {stock}")
    changed = {name: m for name, m in modules.items() if not isinstance(m, OptimizedLatentAttention)}
    for name, module in changed.items():  # all of them, before the first is changed
        _check(name, module)
    for module in changed.values():
        _take_over(module)


class OptimizedLatentAttention(HostedLatentAttention):
    """DeepSeek's attention module after `take_over_attention`, which changes a module's class and never makes one."""

    def _rotation(self, tables: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tables, Tensor):  # V2: cos + i·sin
            return tables.real, tables.imag
        cos, sin = tables  # V3: each pair's angle twice, in halves
        half = self.spec.qk_rope_head_dim // 2
        return cos[..., :half], sin[..., :half]


def _check(name: str, module: Any) -> None:
    """Refuse what headwise's forward would compute otherwise, or not at all."""
    if "forward" in vars(module):  # such as accelerate's hooks, which call the old one
        raise ArgumentError(name, type(module).__name__, "has a forward of its own, which optimize would not replace")
    # The other projections are called; this one's weight is read, and a quantised or adapted one's is not all of it.
    decoder = module.kv_b_proj
    rows = module.num_heads * (module.qk_nope_head_dim + module.v_head_dim)
    if type(decoder) not in (nn.Linear, FewTokensLinear) or tuple(decoder.weight.shape) != (
        rows,
        module.kv_lora_rank,
    ):
        raise ArgumentError(f"{name}.kv_b_proj", type(decoder).__name__, "must be a whole, plain linear layer")


def _take_over(module: Any) -> None:
    """Make a module headwise's in place, as torch's own parametrizations do: hooks and parameters stay."""
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
    # cos and sin come from the model; V2 always rotates neighbours.
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
    """The class of a family's modules; still one of its own, by which transformers knows whose weights to return."""
    return type(f"Optimized{stock.__name__}", (OptimizedLatentAttention, stock), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """The made classes by name, which is how pickle asks for them, and so a spawned worker."""
    for family, stock in FAMILIES.items():
        if name == f"Optimized{stock}":
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            return _optimized(getattr(modeling, stock))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
