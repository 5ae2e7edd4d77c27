from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headwise.costs.formulas import inspect
from headwise.errors import ArgumentError
from headwise.models.specs import read_spec, spec_from_dict


def test_one_kind_of_layer_has_one_of_every_number() -> None:
    inspection = inspect("llama-3-8b")
    assert (inspection.source, inspection.model_type, inspection.num_layers, inspection.hidden_size) == (
        "llama-3-8b",
        "llama",
        32,
        4096,
    )
    assert (
        inspection.mechanism,
        inspection.num_heads,
        inspection.num_kv_heads,
        inspection.head_dim,
        inspection.v_head_dim,
    ) == (
        "gqa",
        32,
        8,
        128,
        128,
    )
    assert (inspection.kv_lora_rank, inspection.q_lora_rank, inspection.qk_rope_head_dim) == (None, None, None)
    assert (inspection.kv_bytes_per_token, inspection.attention_parameters_per_layer) == (131072, 41943040)
    assert [group.layers for group in inspection.layers] == [tuple(range(32))]


def test_an_mla_head_is_as_wide_as_its_two_parts() -> None:
    inspection = inspect("deepseek-v3")
    assert (inspection.head_dim, inspection.v_head_dim, inspection.num_kv_heads) == (192, 128, None)
    assert (inspection.q_lora_rank, inspection.kv_lora_rank, inspection.qk_rope_head_dim) == (1536, 512, 64)


def test_layers_that_differ_are_told_apart() -> None:
    model = read_spec("gpt-oss-120b")
    inspection = inspect(model, dtype="torch.float32")
    assert [group.sliding_window for group in inspection.layers] == [128, None]
    assert [group.layers for group in inspection.layers] == [tuple(range(0, 36, 2)), tuple(range(1, 36, 2))]
    assert [spec_from_dict(json.loads(json.dumps(group.spec))) for group in inspection.layers] == list(
        model.layers[:2]
    )
    assert (
        sum(len(group.layers) * group.kv_bytes_per_token for group in inspection.layers)
        == inspection.kv_bytes_per_token
    )
    assert (inspection.kv_bytes_per_token, inspection.dtype) == (2 * 73728, "float32")


def test_an_unknown_dtype_is_refused_before_the_source_is_read() -> None:
    with pytest.raises(ArgumentError, match=r"^dtype = 'fp4': must be one of"):
        inspect("no-such-model", dtype="fp4")


def test_the_whole_model_by_part_and_what_a_token_goes_through() -> None:
    inspection = inspect("mixtral-8x7b")
    assert inspection.weights is not None
    assert inspection.active_weights is not None
    assert (inspection.weights["total"], inspection.active_weights["total"]) == (46_702_792_704, 12_879_925_248)
    assert sum(count for part, count in inspection.weights.items() if part != "total") == inspection.weights["total"]
    assert inspection.flops_of_first_token is not None
    assert inspection.flops_at_longest is not None
    # At the longest context only the pairs cost more: 4 for each head, channel and token before.
    grown = 32 * 4 * 32 * 128 * 32767
    assert inspection.flops_at_longest["total"] - inspection.flops_of_first_token["total"] == grown
    assert (
        inspection.flops_at_longest["attention_pairs"] - inspection.flops_of_first_token["attention_pairs"] == grown
    )


def test_states_and_windows_are_counted_where_they_are() -> None:
    inspection = inspect("granite-4.0-h-tiny", dtype="float32")
    assert [(len(group.layers), group.kv_bytes_per_token) for group in inspection.layers] == [(36, 0), (4, 4096)]
    assert (
        sum(len(group.layers) * group.state_bytes for group in inspection.layers)
        == inspection.state_bytes
        == 2 * 29270016
    )
    assert inspection.kv_bytes_at_longest == 131072 * inspection.kv_bytes_per_token + inspection.state_bytes
    assert inspection.kv_bytes_at_longest == sum(
        len(g.layers) * (g.kv_bytes_at_longest or 0) for g in inspection.layers
    )


def test_the_body_is_told_layer_by_layer() -> None:
    body = json.loads(json.dumps(inspect("deepseek-v3").to_dict()))["body"]
    dense, sparse = body["feed_forward"]
    assert (dense["layers"], dense["intermediate_size"], dense["num_experts"]) == ([0, 1, 2], 18432, None)
    assert (sparse["layers"], sparse["intermediate_size"], sparse["num_experts"]) == (list(range(3, 61)), 2048, 256)
    assert (body["vocab_size"], body["tied"], body["norms"]) == (129280, False, 2)


def test_a_config_that_says_its_attention_alone_is_inspected_without_the_rest() -> None:
    inspection = inspect(replace(read_spec("llama-3-8b"), body=None))
    assert (
        inspection.weights,
        inspection.active_weights,
        inspection.flops_of_first_token,
        inspection.flops_at_longest,
    ) == (None,) * 4
    assert (inspection.body, inspection.kv_bytes_per_token) == (None, 131072)
