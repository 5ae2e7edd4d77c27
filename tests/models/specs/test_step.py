"""Step-3's multi-matrix factorization attention: weights, cache and FLOPs by hand and as published."""

from __future__ import annotations

from typing import Any

import pytest

from headwise import cost
from headwise.errors import SpecError
from headwise.models.specs import GroupedSpec, read_config, spec_from_dict
from headwise.runtime.attention import build

STEP3: dict[str, Any] = {
    "model_type": "step3_vl",
    "text_config": {
        "model_type": "step3_text",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "num_attention_groups": 1,
        "num_hidden_layers": 61,
        "vocab_size": 128815,
        "moe_intermediate_size": 5120,
        "moe_num_experts": 48,
        "moe_top_k": 3,
        "share_expert_dim": 5120,
        "share_q_dim": 2048,
        "head_dim": 256,
        "max_position_embedding": 65536,
        "moe_layers_enum": ",".join(map(str, range(4, 60))),
        "rope_theta": 500000,
    },
}


def with_text(**fields: Any) -> dict[str, Any]:
    return {**STEP3, "text_config": {**STEP3["text_config"], **fields}}


def test_it_is_as_large_as_published() -> None:
    """316 billion weights in the language model; a token uses 38 billion, beside the embedding."""
    model = read_config(STEP3)
    assert round(cost.model.weights(model).total / 1e9) == 316
    active = cost.model.weights(model, active=True)
    assert round((active.total - active.embedding) / 1e9) == 38
    assert cost.model.cache_bytes_per_token(model) == 61 * 2 * 256 * 2
    assert [bool(one.num_experts) for one in model.body.feed_forward] == [False] * 4 + [True] * 56 + [False]  # type: ignore[union-attr]
    assert model.max_position_embeddings == 65536


def test_a_layer_by_hand() -> None:
    (layer,) = {*read_config(STEP3).layers}
    assert isinstance(layer, GroupedSpec)
    E, Q, H, D = 7168, 2048, 64, 256
    assert cost.parameters(layer) == E * (Q + 2 * D) + Q + Q * H * D + H * D * E
    projections = E * (Q + 2 * D) + Q * H * D + H * D * E
    assert cost.forward_flops(layer, 3, 100) == 2 * (3 * projections + H * 2 * D * (98 + 99 + 100))
    assert cost.decode_intensity(layer) == H
    assert spec_from_dict(layer.to_dict()) == layer
    with pytest.raises(SpecError, match="q_lora_rank = 2048: is not supported"):
        build(layer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_groups": 8}, "num_attention_groups = 8: must be 1"),
        ({"moe_layers_enum": "4,five"}, "moe_layers_enum = .*: must list"),
        ({"moe_layers_enum": "4,²"}, "must list"),
        ({"moe_layers_enum": "9" * 5000}, "must list"),
        ({"moe_layers_enum": [61]}, "must list"),
        ({"share_q_dim": -1}, "share_q_dim = -1"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_config(with_text(**fields))


def test_a_query_latent_has_no_bias() -> None:
    with pytest.raises(SpecError, match="goes without"):
        GroupedSpec(hidden_size=64, num_heads=4, num_kv_heads=1, head_dim=16, q_lora_rank=8, bias="qkv")  # type: ignore[arg-type]
