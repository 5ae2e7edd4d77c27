"""Stacks of attention with delta nets or short convolutions: Qwen3-Next and Qwen3.5, Kimi Linear, LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from headwise.errors import SpecError
from headwise.models.specs.base import MAX_SIZE, AttentionSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec
from headwise.models.specs.readers import body
from headwise.models.specs.readers.deepseek import latent_layer
from headwise.models.specs.readers.fields import (
    Config,
    MissingFieldError,
    Reader,
    check_number,
    read_count,
    read_flag,
    read_head_dim,
    read_integer,
    read_layer_types,
    read_num_layers,
    read_optional_integer,
)
from headwise.models.specs.readers.mixed import RECURRENT, TYPES, attention_layer, layers_by_type, read_body
from headwise.models.specs.readers.positions import FULL, read_rope
from headwise.models.specs.recurrent import RecurrentSpec


def _qwen_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers = read_num_layers(config)
    types = read_layer_types(config, "layer_types", layers, TYPES)
    if types is None:
        nth = read_optional_integer(config, "full_attention_interval") or 4
        types = [RECURRENT if (i + 1) % nth else FULL for i in range(layers)]
    head_dim = read_head_dim(config, absent=256)
    rope = read_rope(config, head_dim, fraction=0.25)
    kv_heads = read_integer(config, "num_key_value_heads")
    attention = replace(
        attention_layer(config, rope, num_kv_heads=kv_heads, head_dim=head_dim), qk_norm="head", output_gate=True
    )
    recurrent = RecurrentSpec(
        form="gated_delta_net",
        hidden_size=read_integer(config, "hidden_size"),
        num_heads=read_integer(config, "linear_num_value_heads"),
        head_dim=read_integer(config, "linear_value_head_dim"),
        state_size=read_integer(config, "linear_key_head_dim"),
        num_groups=read_integer(config, "linear_num_key_heads"),
        conv_kernel=read_integer(config, "linear_conv_kernel_dim"),
    )
    return layers_by_type(types, attention, recurrent)


def _lfm2_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers, hidden_size = read_num_layers(config), read_integer(config, "hidden_size")
    types = read_layer_types(config, "layer_types", layers, {FULL: FULL, "conv": "conv"})
    if types is None:
        indices = config.get("full_attn_idxs")
        if not isinstance(indices, list):
            raise MissingFieldError("full_attn_idxs", indices, "is required in config.json")
        types = [FULL if i in indices else "conv" for i in range(layers)]
    head_dim = read_head_dim(config)
    kv_heads = read_integer(config, "num_key_value_heads")
    rope = read_rope(config, head_dim, theta=1e6)
    attention = replace(attention_layer(config, rope, num_kv_heads=kv_heads, bias=()), qk_norm="head")
    recurrent = RecurrentSpec(
        form="short_conv",
        hidden_size=hidden_size,
        num_heads=hidden_size,
        head_dim=1,
        conv_kernel=read_integer(config, "conv_L_cache"),
        bias=("in_proj", "conv1d", "out_proj") if read_flag(config, "conv_bias", False) else (),
    )
    return layers_by_type(types, attention, recurrent)


def _lfm2_body(config: Config, layers: int) -> BodySpec:
    width = read_integer(config, "block_ff_dim", "intermediate_size")
    if read_flag(config, "block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = read_optional_integer(config, "block_multiple_of") or 256
            factor = check_number("block_ffn_dim_multiplier", factor)
            if not 0 < factor <= MAX_SIZE:
                raise SpecError("block_ffn_dim_multiplier", factor, f"must be above 0 and at most {MAX_SIZE}")
            width = multiple * -(-int(factor * width) // multiple)
    return _lfm2_around(config, body.dense_rule()({**config, "intermediate_size": width}, layers))


def _lfm2_moe_body(config: Config, layers: int) -> BodySpec:
    sparse = FeedForwardSpec(
        hidden_size=read_integer(config, "hidden_size"),
        intermediate_size=read_integer(config, "moe_intermediate_size"),
        num_experts=read_integer(config, "num_experts"),
        experts_per_token=read_integer(config, "num_experts_per_tok"),
        score_correction=read_flag(config, "use_expert_bias", True),
    )
    dense = read_count(config, "num_dense_layers", 2)
    return _lfm2_around(config, body.experts_or_dense(config, sparse, [i >= dense for i in range(layers)]))


def _lfm2_around(config: Config, networks: body.FeedForward) -> BodySpec:
    tied = read_flag(config, "tie_embedding", read_flag(config, "tie_word_embeddings", True))
    return body.read_body({**config, "tie_word_embeddings": tied}, networks)


def _kimi_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers, sizes = read_num_layers(config), config.get("linear_attn_config")
    sizes = sizes if isinstance(sizes, Mapping) else {}
    for name in ("mla_use_output_gate", "routed_expert_hidden_size", "attn_res_block_size", "use_full_rank_gate"):
        if value := {**config, **sizes}.get(name):
            raise SpecError(name, value, "is not understood: of such models, only Kimi Linear is")
    config = {"q_lora_rank": None, **config}  # without the field it has no query latent
    types = read_layer_types(config, "layer_types", layers, TYPES)
    if (full := sizes.get("full_attn_layers")) is not None:  # counted from 1
        if not isinstance(full, list):
            raise SpecError("full_attn_layers", full, "must list layer numbers")
        types = [FULL if i + 1 in full else RECURRENT for i in range(layers)]
    if types is None:
        raise MissingFieldError("layer_types", None, "is required in config.json")
    num_heads = read_integer({**config, **sizes}, "num_heads", "linear_num_heads")
    head_dim = read_integer(sizes, "head_dim") if "head_dim" in sizes else read_integer(config, "linear_head_dim")
    recurrent = RecurrentSpec(
        form="kimi_delta",
        hidden_size=read_integer(config, "hidden_size"),
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=head_dim,
        num_groups=num_heads,
        conv_kernel=read_integer({**config, **sizes}, "short_conv_kernel_size", "linear_conv_kernel_dim"),
    )
    return layers_by_type(types, latent_layer(config, rotated=False), recurrent)


READERS = {
    "qwen3_next": Reader(_qwen_layers, partial(read_body, body.qwen_experts_rule(shared=True))),
    "qwen3_5_text": Reader(_qwen_layers, partial(read_body, body.dense_rule())),
    "qwen3_5_moe_text": Reader(
        _qwen_layers, partial(read_body, body.qwen_experts_rule(shared=True, dense_layers=False))
    ),
    "lfm2": Reader(_lfm2_layers, _lfm2_body),
    "lfm2_moe": Reader(_lfm2_layers, _lfm2_moe_body),
    "kimi_linear": Reader(_kimi_layers, partial(read_body, body.deepseek_experts_rule(first_dense=1, by_type=True))),
}
