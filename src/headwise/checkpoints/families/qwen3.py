"""Qwen3: Llama's layout with norms on each query and key head."""

from headwise.checkpoints.families import llama
from headwise.checkpoints.family import Family

FAMILY = Family(model_type="qwen3", layer=llama.FAMILY.layer, attention=llama.FAMILY.attention)
