"""Mistral 7B: Llama's layout. The sliding window of its first release is kept."""

from headwise.models.families import llama
from headwise.models.families.base import Family

FAMILY = Family(
    model_type="mistral",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    deepseek_blocks=True,
    former_rope=True,
    gguf_tensors=llama.FAMILY.gguf_tensors,
    gguf_interleaved=True,
)
