"""Mistral 7B: Llama's layout. The sliding window of its first release is kept."""

from headwise.models.checkpoints.families import llama
from headwise.models.checkpoints.family import Family

FAMILY = Family(
    model_type="mistral",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    gguf_tensors=llama.FAMILY.gguf_tensors,
    gguf_interleaved=True,
)
