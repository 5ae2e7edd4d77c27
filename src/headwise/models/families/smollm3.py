"""SmolLM3: Llama's layout. Some layers, usually every fourth, have no RoPE."""

from dataclasses import replace

from headwise.models.families import llama

FAMILY = replace(llama.FAMILY, model_type="smollm3", deepseek_blocks=False, gguf_tensors={})
