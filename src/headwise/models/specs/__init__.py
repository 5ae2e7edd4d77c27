"""Descriptions of a model's architecture: frozen dataclasses, and the readers that fill them. No torch here."""

from headwise.base.hub import fetch_hub
from headwise.models.specs.base import AttentionSpec, RopeSpec, hides_tokens, mechanism_module, spec_from_dict
from headwise.models.specs.compressed import CompressedSpec
from headwise.models.specs.expert_latent import ExpertLatentSpec
from headwise.models.specs.gguf_config import GGUF_ARCHITECTURES, GgufModel, gguf_config, gguf_model
from headwise.models.specs.gguf_header import read_gguf_header
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.huggingface import HOSTED_PREFIX, hosted_attention, read_config, text_part
from headwise.models.specs.indexed_latent import IndexedLatentSpec
from headwise.models.specs.latent import LatentSpec
from headwise.models.specs.latent_space import LatentSpaceSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec, ModelSpec
from headwise.models.specs.recurrent import RecurrentSpec
from headwise.models.specs.sources import (
    LARGEST_CONFIG,
    LARGEST_INDEX,
    Source,
    catalog,
    layer_spec,
    locate,
    read_json,
    read_spec,
)
from headwise.models.specs.target_sizes import (
    as_grouped,
    as_latent,
    as_normed,
    refuse_as_latent,
    rotary_width,
    rotated_dims,
    split_budget,
    split_in_blocks,
)
