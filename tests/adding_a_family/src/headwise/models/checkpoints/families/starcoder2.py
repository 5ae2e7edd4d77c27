"""A worked example of a family, StarCoder2: Llama's layout with biases on every projection."""

from headwise.models.checkpoints.families import llama
from headwise.models.checkpoints.family import Family

FAMILY = Family(model_type="starcoder2", layer=llama.FAMILY.layer, attention=llama.FAMILY.attention)
