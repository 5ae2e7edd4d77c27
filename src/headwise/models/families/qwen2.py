"""Qwen2 and Qwen2.5: Llama's layout with biases on the query, key and value projections."""

from headwise.models.families import llama
from headwise.models.families.base import Family

FAMILY = Family(
    model_type="qwen2",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    deepseek_blocks=True,
    former_rope=True,
    gguf_tensors=llama.FAMILY.gguf_tensors,
)
