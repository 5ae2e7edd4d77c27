"""Phi-3 and Phi-4: query, key and value rows in one projection."""

from headwise.checkpoints.families import llama
from headwise.checkpoints.family import Family
from headwise.checkpoints.layout import fused

FAMILY = Family(
    model_type="phi3",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    layout=fused("qkv_proj", "o_proj"),
)
