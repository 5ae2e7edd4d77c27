"""Phi-3 and Phi-4: query, key and value rows in one projection."""

from headwise.models.families import llama
from headwise.models.families.base import Family, fused

_FUSED = (".attn_q", ".attn_k", ".attn_v", ".ffn_gate", ".ffn_up")
FAMILY = Family(
    model_type="phi3",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    layout=fused("qkv_proj", "o_proj"),
    gguf_tensors={
        **{name: own for name, own in llama.FAMILY.gguf_tensors.items() if not name.endswith(_FUSED)},
        "blk.{layer}.attn_qkv": "model.layers.{layer}.self_attn.qkv_proj",
        "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.gate_up_proj",
    },
)
