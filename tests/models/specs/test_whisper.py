"""Whisper: the two attentions of a decoder, each with its own cache."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import headwise
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec, as_latent, hosted_attention, read_config

TINY: dict[str, Any] = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 384,
    "encoder_layers": 3,
    "num_hidden_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "max_target_positions": 448,
    "vocab_size": 51865,
}


def test_the_decoders_attentions_are_read() -> None:
    model = read_config(TINY)
    attention = GroupedSpec(
        hidden_size=384, num_heads=6, num_kv_heads=6, head_dim=64, bias=("q_proj", "v_proj", "o_proj")
    )
    assert model.layers == (attention,) * 4
    assert model.cross_layers == (replace(attention, is_causal=False),) * 4
    assert model.max_position_embeddings == 448
    assert model.is_causal


def test_the_cache_of_the_source_is_counted_apart() -> None:
    inspection = headwise.inspect(read_config(TINY), dtype="float32")
    assert inspection.kv_bytes_per_token == inspection.source_kv_bytes_per_token == 4 * 2 * 384 * 4
    assert inspection.attention_parameters_per_layer == 4 * 384 * 384 + 3 * 384
    assert headwise.inspect("llama-3-8b").source_kv_bytes_per_token == 0


def test_a_converted_decoder_is_read_back() -> None:
    model = read_config(TINY)
    after = replace(
        model,
        layers=tuple(as_latent(layer, 100 + i, 0) for i, layer in enumerate(model.layers)),
        cross_layers=tuple(as_latent(layer, 50, 0) for layer in model.cross_layers),
    )
    block = {"attention": hosted_attention(after), "cross_attention": hosted_attention(after, cross=True)}
    config = json.loads(json.dumps({**TINY, "model_type": f"{HOSTED_PREFIX}whisper", "headwise": block}))
    spec = read_config(config)
    assert (spec.layers, spec.cross_layers) == (after.layers, after.cross_layers)
    assert headwise.inspect(spec).source_kv_bytes_per_token == 4 * 50 * 2
    del config["headwise"]["cross_attention"]
    with pytest.raises(headwise.SpecError, match=r"^headwise = .*: must hold"):
        read_config(config)


@pytest.mark.parametrize("field", ["d_model", "decoder_attention_heads", "decoder_layers"])
def test_what_a_file_must_say(field: str) -> None:
    config = {key: value for key, value in TINY.items() if key != field}
    with pytest.raises(headwise.SpecError, match=rf"^{field} = None: is required"):
        read_config(config)


def test_other_encoder_decoders_are_still_refused() -> None:
    with pytest.raises(headwise.SpecError, match=r"^is_encoder_decoder = True: is not understood"):
        read_config({**TINY, "model_type": "llama"})
