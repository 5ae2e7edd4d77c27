"""Gemma 3's text model: Llama's layout with norms on each query and key head; windowed and full layers."""

from headwise.checkpoints.families import llama
from headwise.checkpoints.family import Family
from headwise.checkpoints.layout import offset_norms

FAMILY = Family(
    model_type="gemma3_text",
    layer=llama.FAMILY.layer,
    attention=llama.FAMILY.attention,
    layout=offset_norms(1.0),
    adds=False,
)
