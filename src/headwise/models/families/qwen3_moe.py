"""Qwen3-MoE: Qwen3's attention beside experts, which are not converted."""

from dataclasses import replace

from headwise.models.families import qwen2_moe, qwen3

FAMILY = replace(qwen3.FAMILY, model_type="qwen3_moe", joined=qwen2_moe.FAMILY.joined, gguf_tensors={})
