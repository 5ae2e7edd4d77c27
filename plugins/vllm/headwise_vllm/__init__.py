"""headwise's MLA folders in vLLM: each layer has a rank and rotary channels of its own, and may have biases."""

from __future__ import annotations

FAMILIES = ("llama", "mistral", "qwen2")
"""Families whose folders are served, by the ``model_type`` of their sources."""


def register() -> None:
    """Tell vLLM and transformers of headwise's folders; vLLM calls it in each of its processes."""
    from vllm import ModelRegistry

    from headwise_vllm.config import register_configs

    register_configs(FAMILIES)
    for name in ("HeadwiseLlamaForCausalLM", "HeadwiseMistralForCausalLM", "HeadwiseQwen2ForCausalLM"):
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"headwise_vllm.model:{name}")
