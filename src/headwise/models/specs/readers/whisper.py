"""Whisper's decoder: attention to its past tokens, and to the encoder's output."""

from __future__ import annotations

from dataclasses import replace

from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.readers.fields import Config, Reader, divided_head_dim, read_integer, read_num_layers


def _decoder_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """The self-attention of each decoder layer, in which every projection but the keys' has a bias."""
    hidden_size, num_heads = read_integer(config, "d_model"), read_integer(config, "decoder_attention_heads")
    spec = GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divided_head_dim(hidden_size, num_heads),
        bias=("q_proj", "v_proj", "o_proj"),
    )
    return (spec,) * read_num_layers(config, "decoder_layers")


def _cross_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """The attention of each decoder layer to the encoder's output, of the same sizes."""
    return tuple(replace(spec, is_causal=False) for spec in _decoder_layers(config))


READERS = {"whisper": Reader(_decoder_layers, cross=_cross_layers)}
