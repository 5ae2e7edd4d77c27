"""Step-3: multi-matrix factorization attention, one key–value head of 256 dims whose queries come from a latent.

Source: configuration_step3.py and modeling_step3.py of huggingface.co/stepfun-ai/step3.
"""

from __future__ import annotations

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec
from headwise.models.specs.readers.body import are_in_list, experts_or_dense, read_body
from headwise.models.specs.readers.fields import Config, Reader, read_integer, read_num_layers, read_optional_integer
from headwise.models.specs.readers.positions import read_rope


def _layers(config: Config) -> tuple[AttentionSpec, ...]:
    head_dim, groups = read_integer(config, "head_dim"), read_optional_integer(config, "num_attention_groups") or 1
    if groups != 1:
        raise SpecError("num_attention_groups", groups, "must be 1: Step-3 has one key–value head")
    longest = read_optional_integer(config, "max_position_embeddings", "max_position_embedding")
    layer = GroupedSpec(
        hidden_size=read_integer(config, "hidden_size"),
        num_heads=read_integer(config, "num_attention_heads"),
        num_kv_heads=1,
        head_dim=head_dim,
        q_lora_rank=read_optional_integer(config, "share_q_dim") or head_dim,
        rope=read_rope({**config, "max_position_embeddings": longest}, head_dim, theta=5e5),
    )
    return (layer,) * read_num_layers(config)


def _body(config: Config, layers: int) -> BodySpec:
    sparse = FeedForwardSpec(
        hidden_size=read_integer(config, "hidden_size"),
        intermediate_size=read_integer(config, "moe_intermediate_size"),
        num_experts=read_integer(config, "moe_num_experts"),
        experts_per_token=read_integer(config, "moe_top_k"),
        shared_intermediate_size=read_integer(config, "share_expert_dim"),
    )
    found = config.get("moe_layers_enum")
    if isinstance(found, str):  # as published
        numbers = {str(index): index for index in range(layers)}
        found = [numbers.get(word.strip(), word) for word in found.split(",")]
    elif found is None:
        found = [*range(1, layers)]
    return read_body(config, experts_or_dense(config, sparse, are_in_list("moe_layers_enum", found, layers)))


READERS = {"step3_text": Reader(_layers, _body)}
