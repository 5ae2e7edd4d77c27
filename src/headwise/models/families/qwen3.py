"""Qwen3: Llama's layout with norms on each query and key head."""

from dataclasses import replace

from headwise.models.families import llama

FAMILY = replace(
    llama.FAMILY,
    model_type="qwen3",
    deepseek_blocks=False,
    gguf_interleaved=False,
    gguf_tensors={
        **llama.FAMILY.gguf_tensors,
        "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
        "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
    },
)
