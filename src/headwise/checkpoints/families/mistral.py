"""Mistral 7B: Llama's layout; where its first release has a sliding window, the window stays."""

from headwise.checkpoints.families import llama
from headwise.checkpoints.family import Family

FAMILY = Family(model_type="mistral", layer=llama.FAMILY.layer, attention=llama.FAMILY.attention)
