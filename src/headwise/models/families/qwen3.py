"""Qwen3: Llama's layout with norms on each query and key head."""

from headwise.models.families import llama
from headwise.models.families.base import Family

FAMILY = Family(
    model_type="qwen3",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    former_rope=True,
    gguf_tensors={
        **llama.FAMILY.gguf_tensors,
        "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
        "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
    },
)
