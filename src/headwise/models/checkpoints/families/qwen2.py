"""Qwen2 and Qwen2.5: Llama's layout with biases on the query, key and value projections."""

from headwise.models.checkpoints.families import llama
from headwise.models.checkpoints.family import Family

FAMILY = Family(
    model_type="qwen2",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    gguf_tensors=llama.FAMILY.gguf_tensors,
)
