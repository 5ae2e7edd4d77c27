"""One small file for each model family, named after transformers' ``model_type``; each defines ``FAMILY``."""

from headwise.models.families.base import Family, Layout, family_names, family_of, has_family
