from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headwise.cost import inspect
from headwise.errors import ArgumentError
from headwise.specs import read_spec, spec_from_dict


def test_one_kind_of_layer_has_one_of_every_number() -> None:
    seen = inspect("llama-3-8b")
    assert (seen.source, seen.model_type, seen.num_layers, seen.hidden_size) == ("llama-3-8b", "llama", 32, 4096)
    assert (seen.mechanism, seen.num_heads, seen.num_kv_heads, seen.head_dim, seen.v_head_dim) == (
        "gqa",
        32,
        8,
        128,
        128,
    )
    assert (seen.kv_lora_rank, seen.q_lora_rank, seen.qk_rope_head_dim) == (None, None, None)
    assert (seen.kv_bytes_per_token, seen.attention_parameters_per_layer) == (131072, 41943040)
    assert [group.layers for group in seen.layers] == [tuple(range(32))]


def test_an_mla_head_is_as_wide_as_its_two_parts() -> None:
    seen = inspect("deepseek-v3")
    assert (seen.head_dim, seen.v_head_dim, seen.num_kv_heads) == (192, 128, None)
    assert (seen.q_lora_rank, seen.kv_lora_rank, seen.qk_rope_head_dim) == (1536, 512, 64)


def test_layers_that_differ_are_told_apart() -> None:
    model = read_spec("gpt-oss-120b")
    seen = inspect(model, dtype="torch.float32")
    assert [group.sliding_window for group in seen.layers] == [128, None]
    assert [group.layers for group in seen.layers] == [tuple(range(0, 36, 2)), tuple(range(1, 36, 2))]
    assert [spec_from_dict(json.loads(json.dumps(group.spec))) for group in seen.layers] == list(model.layers[:2])
    assert sum(len(group.layers) * group.kv_bytes_per_token for group in seen.layers) == seen.kv_bytes_per_token
    assert (seen.kv_bytes_per_token, seen.dtype) == (2 * 73728, "float32")


def test_an_unknown_dtype_is_refused_before_the_source_is_read() -> None:
    with pytest.raises(ArgumentError, match=r"^dtype = 'fp4': must be one of float64"):
        inspect("no-such-model", dtype="fp4")


def test_the_whole_model_by_part_and_what_a_token_goes_through() -> None:
    seen = inspect("mixtral-8x7b")
    assert seen.weights is not None
    assert seen.active_weights is not None
    assert (seen.weights["total"], seen.active_weights["total"]) == (46_702_792_704, 12_879_925_248)
    assert sum(count for part, count in seen.weights.items() if part != "total") == seen.weights["total"]
    assert seen.flops_of_first_token is not None
    assert seen.flops_at_longest is not None
    # At the longest context only the pairs cost more: 4 for each head, channel and token before.
    grown = 32 * 4 * 32 * 128 * 32767
    assert seen.flops_at_longest["total"] - seen.flops_of_first_token["total"] == grown
    assert seen.flops_at_longest["attention_pairs"] - seen.flops_of_first_token["attention_pairs"] == grown


def test_states_and_windows_are_counted_where_they_are() -> None:
    seen = inspect("granite-4.0-h-tiny", dtype="float32")
    assert [(len(group.layers), group.kv_bytes_per_token) for group in seen.layers] == [(36, 0), (4, 4096)]
    assert sum(len(group.layers) * group.state_bytes for group in seen.layers) == seen.state_bytes == 2 * 29270016
    assert seen.kv_bytes_at_longest == 131072 * seen.kv_bytes_per_token + seen.state_bytes
    assert seen.kv_bytes_at_longest == sum(len(g.layers) * (g.kv_bytes_at_longest or 0) for g in seen.layers)


def test_the_body_is_told_layer_by_layer() -> None:
    body = json.loads(json.dumps(inspect("deepseek-v3").to_dict()))["body"]
    dense, sparse = body["feed_forward"]
    assert (dense["layers"], dense["intermediate_size"], dense["num_experts"]) == ([0, 1, 2], 18432, None)
    assert (sparse["layers"], sparse["intermediate_size"], sparse["num_experts"]) == (list(range(3, 61)), 2048, 256)
    assert (body["vocab_size"], body["tied"], body["norms"]) == (129280, False, 2)


def test_a_config_that_says_its_attention_alone_is_inspected_without_the_rest() -> None:
    seen = inspect(replace(read_spec("llama-3-8b"), body=None))
    assert (seen.weights, seen.active_weights, seen.flops_of_first_token, seen.flops_at_longest) == (None,) * 4
    assert (seen.body, seen.kv_bytes_per_token) == (None, 131072)
