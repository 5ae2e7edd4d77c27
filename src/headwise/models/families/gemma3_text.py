"""Gemma 3's text model: Llama's layout with norms on each query and key head; windowed and full layers."""

from headwise.models.families import llama, qwen3
from headwise.models.families.base import Family, offset_norms

FAMILY = Family(
    model_type="gemma3_text",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    layout=offset_norms(1.0),
    adds=False,
    gguf_tensors={
        **qwen3.FAMILY.gguf_tensors,
        "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
        "blk.{layer}.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
        "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
    },
    gguf_norm_offset=1.0,
)
