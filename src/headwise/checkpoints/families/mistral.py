"""Mistral 7B: Llama's layout. The sliding window of its first release is kept."""

from headwise.checkpoints.families import llama
from headwise.checkpoints.family import Family

FAMILY = Family(model_type="mistral", layer=llama.FAMILY.layer, attention=llama.FAMILY.attention)
