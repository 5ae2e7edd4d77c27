from __future__ import annotations

import json

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
