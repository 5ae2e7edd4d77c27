"""A worked example of a family, StarCoder2: Llama's layout with biases on every projection."""

from headwise.models.families import llama
from headwise.models.families.base import Family

FAMILY = Family(model_type="starcoder2", layer=llama.FAMILY.layer, attention=llama.FAMILY.attention)
