"""OLMo 2: norms over all query heads and over all key heads, and norms behind attention and MLP instead of before."""

from dataclasses import replace

from headwise.models.families import llama

FAMILY = replace(
    llama.FAMILY,
    model_type="olmo2",
    deepseek_blocks=False,
    adds=False,
    gguf_interleaved=False,
    gguf_tensors={},
)
