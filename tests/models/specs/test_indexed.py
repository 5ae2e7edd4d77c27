"""MLA with an indexer: its config, its weights and its cache beside transformers', its FLOPs by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto import AutoConfig, AutoModelForCausalLM

from headwise.costs.formulas import (
    attended_pairs,
    backward_flops,
    cache_bytes_per_token,
    decode_intensity,
    forward_flops,
    parameters,
)
from headwise.costs.formulas.model import weights
from headwise.costs.prediction import Pass, operators
from headwise.errors import SpecError
from headwise.models.specs import read_config, spec_from_dict

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 6,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def transformers_model(config: dict[str, Any]) -> Any:
    values = {key: value for key, value in config.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values)).eval()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model_type": "glm_moe_dsa"},
        {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full", "shared"]},
        {"model_type": "glm_moe_dsa", "index_topk_pattern": "FSSF"},
        {"model_type": "glm_moe_dsa", "index_topk_freq": 2, "index_skip_topk_offset": 1},
    ],
)
@torch.no_grad()
def test_weights_and_cache_are_those_of_transformers(more: dict[str, Any]) -> None:
    config = {**CONFIG, **more}
    spec, model = read_config(config), transformers_model(config)
    assert weights(spec).total == sum(tensor.numel() for tensor in model.state_dict().values())
    for layer, module in zip(spec.layers, model.model.layers, strict=True):
        assert parameters(layer) == sum(parameter.numel() for parameter in module.self_attn.parameters())
    cache = DynamicCache(config=model.config)
    model(torch.randint(2, 60, (2, 9)), past_key_values=cache)
    held = 0
    for layer in cache.layers:
        held += sum(value.nbytes for value in vars(layer).values() if isinstance(value, torch.Tensor))
    assert held == 2 * 9 * sum(cache_bytes_per_token(layer, "float32") for layer in spec.layers)


def test_flops_by_hand() -> None:
    (layer, *_) = read_config(CONFIG).layers
    E, H, R, N, P, V, Q, heads, width, most = 48, 4, 16, 12, 8, 10, 20, 3, 16, 6
    for new, total in ((1, 40), (5, 40), (9, 9), (1, 6), (4, 8)):
        pairs = attended_pairs(new, total, causal=True)
        selected = attended_pairs(new, total, causal=True, window=most)
        projections = new * (E * Q + Q * H * (N + P) + E * (R + P) + H * V * E)
        index = new * (Q * heads * width + E * width + E * heads) + pairs * heads * (width + 1)
        expanded = total * R * H * (N + V) + selected * H * (N + P + V)
        absorbed = new * H * R * (N + V) + selected * H * (2 * R + P)
        assert forward_flops(layer, new, total, impl="expanded") == 2 * (projections + index + expanded)
        assert forward_flops(layer, new, total, impl="absorbed") == 2 * (projections + index + absorbed)
        assert forward_flops(layer, new, total) == 2 * (projections + index + min(expanded, absorbed))
        if new == total:  # nothing flows back through a selection
            trained = forward_flops(layer, new, impl="expanded") - 2 * index
            assert backward_flops(layer, new, impl="expanded", kernel="unfused") == 2 * trained
    # In the limit only the indexer reads what is added.
    assert decode_intensity(layer) == 2 * heads * (width + 1) / (2 * (R + P + width))


def test_the_core_reads_what_is_selected() -> None:
    spec = read_config(CONFIG)
    work = {operator.name: operator for operator in operators(spec, Pass(batch=3, new=1, total=40, dtype="float32"))}
    assert work["attention"].cache_bytes == 3 * 6 * (16 + 8) * 4
    assert work["index scores"].cache_bytes == 3 * 40 * 16 * 4


def test_it_is_written_and_read_again() -> None:
    for layer in read_config({**CONFIG, "model_type": "glm_moe_dsa", "index_topk_pattern": "FSSF"}).layers:
        assert spec_from_dict(layer.to_dict()) == layer
        assert layer.label == "MLA 16 + 8, top 6"


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"index_topk": 0}, "index_topk = 0"),
        ({"index_topk": None}, "index_topk"),
        ({"index_head_dim": None}, "index_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank = None: is required"),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "FXSF"}, "index_topk_pattern = 'X': is not understood"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"]}, "must list one type for each of 4 layers"),
    ],
)
def test_impossible_configs(more: dict[str, Any], rule: str) -> None:
    with pytest.raises(SpecError, match=rule):
        read_config({**CONFIG, **more})
