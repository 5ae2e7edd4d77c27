"""Where GGUF files keep a model's tensors, and what llama.cpp's converters do to them.

Shapes: n experts, I width of an expert, H query heads, R latent rank, N unrotated dims of a head, V value dim,
E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.models.families import llama
from headwise.models.families.base import family_of

Join = Callable[[Mapping[str, Tensor]], Tensor]
"""A tensor of transformers out of several of GGUF, by their names within a layer."""


@dataclass(frozen=True)
class GgufLayout:
    """The names and the form of a model's tensors in GGUF files.

    Attributes:
        names: GGUF name → transformers name, both with ``{layer}`` for the number of a layer; without ``.weight`` or
            ``.bias`` at the end, or with it where the two names end differently.
        is_interleaved: rows of queries and keys are stored as neighbouring pairs, transformers' as halves.
        norm_offset: the weights of norms are stored with this added.
        joined: endings of the transformers names that several tensors make up, and how.
    """

    names: Mapping[str, str]
    is_interleaved: bool = False
    norm_offset: float = 0.0
    joined: Mapping[str, Join] = field(default_factory=dict)


def gguf_layout(model_type: str) -> GgufLayout:
    """The layout of a model's tensors.

    For example ``gguf_layout("gemma3_text").norm_offset`` is 1.0.

    Args:
        model_type: transformers' name of the architecture.

    Raises:
        SpecError: `families` has no file for the model type.
    """
    if model_type in ("deepseek_v2", "deepseek_v3"):
        return _DEEPSEEK
    family = family_of(model_type)
    return GgufLayout(family.gguf_tensors, family.gguf_interleaved, family.gguf_norm_offset)


def _decoder(parts: Mapping[str, Tensor]) -> Tensor:
    """``kv_b_proj`` ``[H · (N + V), R]`` of its two parts, ``[H, R, N]`` and ``[H, V, R]``."""
    return torch.cat((parts["attn_k_b"].transpose(1, 2), parts["attn_v_b"]), 1).flatten(0, 1)


def _experts(parts: Mapping[str, Tensor]) -> Tensor:
    """``[n, 2 · I, E]`` of the gates and the others, ``[n, I, E]`` each."""
    return torch.cat((parts["ffn_gate_exps"], parts["ffn_up_exps"]), 1)


_OF_LLAMA = {
    name: target
    for name, target in llama.FAMILY.gguf_tensors.items()
    if name.rpartition(".")[2] not in ("attn_k", "attn_v")
}
_DEEPSEEK = GgufLayout(
    {
        **_OF_LLAMA,
        **{
            f"blk.{{layer}}.{name}": f"model.layers.{{layer}}.{target}"
            for name, target in {
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
                "attn_k_b": "self_attn.kv_b_proj",
                "attn_v_b": "self_attn.kv_b_proj",
                "ffn_gate_inp": "mlp.gate",
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
                "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_down_exps.weight": "mlp.experts.down_proj",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
            }.items()
        },
    },
    joined={"self_attn.kv_b_proj.weight": _decoder, "mlp.experts.gate_up_proj": _experts},
)
"""DeepSeek-V2 and V3. Older files have ``attn_kv_b`` as a whole, newer ones in two parts, or both."""
