"""Stacks of attention with Mamba: Jamba, Bamba, Granite 4, Nemotron-H."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec
from headwise.models.specs.readers import body
from headwise.models.specs.readers.fields import (
    Config,
    MissingFieldError,
    Reader,
    check_number,
    divided_head_dim,
    read_count,
    read_flag,
    read_integer,
    read_layer_types,
    read_num_layers,
    read_optional_integer,
    refuse_value,
)
from headwise.models.specs.readers.mixed import RECURRENT, TYPES, attention_layer, layers_by_type, read_body
from headwise.models.specs.readers.positions import FULL, read_rope
from headwise.models.specs.recurrent import RecurrentSpec


def _jamba_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Jamba's attention has no positions: its Mamba layers encode the order of tokens."""
    hidden_size = read_integer(config, "hidden_size")
    period, offset = read_integer(config, "attn_layer_period"), read_count(config, "attn_layer_offset", 4)
    rank = config.get("mamba_dt_rank", "auto")
    recurrent = RecurrentSpec(
        form="mamba",
        hidden_size=hidden_size,
        num_heads=read_integer(config, "mamba_expand") * hidden_size,
        head_dim=1,
        state_size=read_integer(config, "mamba_d_state"),
        conv_kernel=read_integer(config, "mamba_d_conv"),
        dt_rank=math.ceil(hidden_size / 16) if rank == "auto" else read_integer(config, "mamba_dt_rank"),
        bias=_mamba_bias(config, "mamba_conv_bias", "mamba_proj_bias"),
    )
    attention = attention_layer(config, bias=())
    return tuple(attention if i % period == offset else recurrent for i in range(read_num_layers(config)))


def _jamba_body(config: Config, layers: int) -> BodySpec:
    period, offset = read_integer(config, "expert_layer_period"), read_count(config, "expert_layer_offset", 1)
    num_experts = read_integer(config, "num_experts", "num_local_experts")
    if num_experts == 1:
        return body.read_body(config, body.dense_rule()(config, layers))
    sparse = body.experts_rule(count="num_experts")(config, 1)[0]
    assert sparse is not None
    networks = body.experts_or_dense(config, sparse, [i % period == offset for i in range(layers)])
    return body.read_body(config, networks)


def _mamba2(config: Config) -> RecurrentSpec:
    """Read a Mamba-2 layer from Bamba's field names."""
    hidden_size, num_heads = read_integer(config, "hidden_size"), read_integer(config, "mamba_n_heads")
    width = (read_optional_integer(config, "mamba_expand") or 2) * hidden_size
    if width % num_heads or config.get("mamba_d_head", "auto") not in ("auto", width // num_heads):
        rule = f"times mamba_n_heads = {num_heads} must be mamba_expand · hidden_size = {width}"
        raise SpecError("mamba_d_head", config.get("mamba_d_head"), rule)
    return RecurrentSpec(
        form="mamba2",
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=width // num_heads,
        state_size=read_integer(config, "mamba_d_state"),
        num_groups=read_integer(config, "mamba_n_groups"),
        conv_kernel=read_integer(config, "mamba_d_conv"),
        bias=_mamba_bias(config, "mamba_conv_bias", "mamba_proj_bias"),
    )


def _mamba_bias(config: Config, conv: str, projections: str) -> tuple[str, ...]:
    both = ("in_proj", "out_proj") if read_flag(config, projections, False) else ()
    return (*both, "conv1d") if read_flag(config, conv, True) else both


def _bamba_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers, indices = read_num_layers(config), config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or any(type(i) is not int or not 0 <= i < layers for i in indices):
        raise SpecError("attn_layer_indices", indices, f"must list layers of 0 to {layers - 1}")
    head_dim = divided_head_dim(read_integer(config, "hidden_size"), read_integer(config, "num_attention_heads"))
    # Half of a head is rotated, whatever the file has.
    plain = {key: value for key, value in config.items() if key != "partial_rotary_factor"}
    attention = attention_layer(config, read_rope(plain, head_dim, fraction=0.5))
    return layers_by_type([FULL if i in indices else RECURRENT for i in range(layers)], attention, _mamba2(config))


def _granite_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Granite 4 has RoPE only where ``position_embedding_type`` is rope."""
    layers = read_num_layers(config)
    types = read_layer_types(config, "layer_types", layers, TYPES) or read_layer_types(
        config, "layers_block_type", layers, TYPES
    )
    if types is None:
        raise MissingFieldError("layer_types", None, "is required in config.json")
    refuse_value(config, "position_embedding_type", unless=("rope", "nope"), rule="must be rope, nope or null")
    head_dim = divided_head_dim(read_integer(config, "hidden_size"), read_integer(config, "num_attention_heads"))
    rotated = config.get("position_embedding_type") == "rope"
    scale = check_number("attention_multiplier", config.get("attention_multiplier", 1.0))
    attention = replace(
        attention_layer(config, read_rope(config, head_dim) if rotated else None), softmax_scale=scale
    )
    # A stack may be all attention, and then has no fields of Mamba.
    return layers_by_type(types, attention, _mamba2(config) if RECURRENT in types else attention)


def _granite_body(config: Config, layers: int) -> BodySpec:
    hidden_size, shared = read_integer(config, "hidden_size"), read_integer(config, "shared_intermediate_size")
    num_experts = read_count(config, "num_local_experts", 8)
    if num_experts == 0:
        network = FeedForwardSpec(hidden_size=hidden_size, intermediate_size=shared)
    else:
        network = FeedForwardSpec(
            hidden_size=hidden_size,
            intermediate_size=read_integer(config, "intermediate_size"),
            num_experts=num_experts,
            experts_per_token=read_integer(config, "num_experts_per_tok"),
            shared_intermediate_size=shared,
        )
    return body.read_body(config, (network,) * layers)


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_TYPES = {name: name for name in _NEMOTRON_LETTERS.values()} | {RECURRENT: "mamba", FULL: "attention"}


def _nemotron_types(config: Config) -> list[str]:
    """Nemotron-H's layers hold either a mixer or a feed-forward network; the name of each layer's part."""
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        types = config.get("layers_block_type", config.get("layer_types"))
        if not isinstance(types, list) or any(name not in _NEMOTRON_TYPES for name in map(str, types)):
            raise MissingFieldError("hybrid_override_pattern", types, "is required in config.json")
        return [_NEMOTRON_TYPES[name] for name in types]
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_NEMOTRON_LETTERS):
        raise SpecError("hybrid_override_pattern", pattern, f"must be of {' '.join(_NEMOTRON_LETTERS)}")
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _nemotron_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Nemotron-H's attention has no positions."""
    refuse_value(config, "sliding_window", unless=(), rule="must be null: a nemotron_h model has none")
    hidden_size, types = read_integer(config, "hidden_size"), _nemotron_types(config)
    specs: dict[str, AttentionSpec] = {"mlp": RecurrentSpec(form="none", hidden_size=hidden_size)}
    specs["moe"] = specs["mlp"]
    if "attention" in types:
        head_dim = read_integer(config, "head_dim", "attention_head_dim")
        specs["attention"] = attention_layer(config, head_dim=head_dim)
    if "mamba" in types:
        specs["mamba"] = RecurrentSpec(
            form="mamba2",
            hidden_size=hidden_size,
            num_heads=read_integer(config, "mamba_num_heads"),
            head_dim=read_integer(config, "mamba_head_dim"),
            state_size=read_integer(config, "ssm_state_size"),
            num_groups=read_integer(config, "n_groups", "mamba_n_groups"),
            conv_kernel=read_integer(config, "conv_kernel", "mamba_d_conv"),
            bias=_mamba_bias(config, "use_conv_bias", "use_bias"),
        )
    return tuple(specs[name] for name in types)


def _nemotron_body(config: Config, layers: int) -> BodySpec:
    if config.get("moe_latent_size") is not None:
        raise MissingFieldError("moe_latent_size", config["moe_latent_size"], "is not supported in a body")
    hidden_size, has_bias = read_integer(config, "hidden_size"), read_flag(config, "mlp_bias", False)
    types = _nemotron_types(config)
    networks: dict[str, FeedForwardSpec | None] = {"mamba": None, "attention": None}
    if "mlp" in types:
        networks["mlp"] = FeedForwardSpec(
            hidden_size=hidden_size,
            intermediate_size=read_integer(config, "intermediate_size"),
            gated=False,
            bias=has_bias,
        )
    if "moe" in types:
        if has_bias:
            raise MissingFieldError("mlp_bias", True, "is not supported beside experts")
        networks["moe"] = FeedForwardSpec(
            hidden_size=hidden_size,
            intermediate_size=read_integer(config, "moe_intermediate_size"),
            gated=False,
            num_experts=read_integer(config, "n_routed_experts", "num_local_experts"),
            experts_per_token=read_integer(config, "num_experts_per_tok"),
            shared_intermediate_size=read_integer(config, "moe_shared_expert_intermediate_size"),
            score_correction=True,
        )
    return body.read_body(config, tuple(networks[name] for name in types), norms=1)


READERS = {
    "jamba": Reader(_jamba_layers, _jamba_body),
    "bamba": Reader(_bamba_layers, partial(read_body, body.dense_rule(bias="mlp_bias"))),
    "granitemoehybrid": Reader(_granite_layers, _granite_body),
    "nemotron_h": Reader(_nemotron_layers, _nemotron_body),
}
