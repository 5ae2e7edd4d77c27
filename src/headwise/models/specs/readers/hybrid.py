"""Stacks of attention with Mamba, delta nets or short convolutions.

Jamba, Bamba, Granite 4, Nemotron-H; Qwen3-Next and Qwen3.5, Kimi Linear, LFM2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from headwise.errors import SpecError
from headwise.models.specs.base import MAX_SIZE, AttentionSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec
from headwise.models.specs.readers import body
from headwise.models.specs.readers.body import read_body
from headwise.models.specs.readers.deepseek import latent_layer
from headwise.models.specs.readers.fields import Config, MissingFieldError, Reader, check_number, divided_head_dim
from headwise.models.specs.readers.llama import attention_layer
from headwise.models.specs.readers.positions import FULL, read_rope
from headwise.models.specs.recurrent import RecurrentSpec

_RECURRENT = "linear_attention"
_TYPES = {FULL: FULL, "attention": FULL, _RECURRENT: _RECURRENT, "mamba": _RECURRENT}
"""Names in ``layer_types`` of current and of older files."""


def _layers_by_type(
    types: list[str], attention: AttentionSpec, recurrent: AttentionSpec
) -> tuple[AttentionSpec, ...]:
    """A stack with ``attention`` in the layers of full attention, and ``recurrent`` in all others."""
    return tuple(attention if name == FULL else recurrent for name in types)


def _jamba_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Jamba's attention has no positions: its Mamba layers encode the order of tokens."""
    hidden_size = config.integer("hidden_size")
    period, offset = config.integer("attn_layer_period"), config.count("attn_layer_offset", 4)
    rank = config.get("mamba_dt_rank", "auto")
    recurrent = RecurrentSpec(
        form="mamba",
        hidden_size=hidden_size,
        num_heads=config.integer("mamba_expand") * hidden_size,
        head_dim=1,
        state_size=config.integer("mamba_d_state"),
        conv_kernel=config.integer("mamba_d_conv"),
        dt_rank=math.ceil(hidden_size / 16) if rank == "auto" else config.integer("mamba_dt_rank"),
        bias=_mamba_bias(config, "mamba_conv_bias", "mamba_proj_bias"),
    )
    attention = attention_layer(config, bias=())
    return tuple(attention if i % period == offset else recurrent for i in range(config.num_layers()))


def _jamba_networks(config: Config, layers: int) -> body.FeedForward:
    period, offset = config.integer("expert_layer_period"), config.count("expert_layer_offset", 1)
    if config.integer("num_experts", "num_local_experts") == 1:
        return body.dense_rule()(config, layers)
    sparse = body.read_experts(config, width="intermediate_size")
    return body.experts_or_dense(config, sparse, [i % period == offset for i in range(layers)])


def _mamba2(config: Config) -> RecurrentSpec:
    """Read a Mamba-2 layer from Bamba's field names."""
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("mamba_n_heads")
    width = (config.optional_integer("mamba_expand") or 2) * hidden_size
    if width % num_heads or config.get("mamba_d_head", "auto") not in ("auto", width // num_heads):
        rule = f"times mamba_n_heads = {num_heads} must be mamba_expand · hidden_size = {width}"
        raise SpecError("mamba_d_head", config.get("mamba_d_head"), rule)
    return RecurrentSpec(
        form="mamba2",
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=width // num_heads,
        state_size=config.integer("mamba_d_state"),
        num_groups=config.integer("mamba_n_groups"),
        conv_kernel=config.integer("mamba_d_conv"),
        bias=_mamba_bias(config, "mamba_conv_bias", "mamba_proj_bias"),
    )


def _mamba_bias(config: Config, conv: str, projections: str) -> tuple[str, ...]:
    both = ("in_proj", "out_proj") if config.flag(projections, False) else ()
    return (*both, "conv1d") if config.flag(conv, True) else both


def _bamba_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers, indices = config.num_layers(), config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or any(type(i) is not int or not 0 <= i < layers for i in indices):
        raise SpecError("attn_layer_indices", indices, f"must list layers of 0 to {layers - 1}")
    head_dim = divided_head_dim(config.integer("hidden_size"), config.integer("num_attention_heads"))
    # Half of a head is rotated, whatever the file has.
    plain = Config({key: value for key, value in config.items() if key != "partial_rotary_factor"})
    attention = attention_layer(config, read_rope(plain, head_dim, fraction=0.5))
    return _layers_by_type([FULL if i in indices else _RECURRENT for i in range(layers)], attention, _mamba2(config))


def _granite_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Granite 4 has RoPE only where ``position_embedding_type`` is rope."""
    layers = config.num_layers()
    names = ("layer_types", "layers_block_type")
    types = next((found for name in names if (found := config.layer_types(name, layers, _TYPES))), None)
    if types is None:
        raise MissingFieldError("layer_types", None, "is required in config.json")
    config.refuse("position_embedding_type", unless=("rope", "nope"), rule="must be rope, nope or null")
    head_dim = divided_head_dim(config.integer("hidden_size"), config.integer("num_attention_heads"))
    rotated = config.get("position_embedding_type") == "rope"
    scale = check_number("attention_multiplier", config.get("attention_multiplier", 1.0))
    rope = read_rope(config, head_dim) if rotated else None
    attention = replace(attention_layer(config, rope), softmax_scale=scale)
    # A stack may be all attention, and then has no fields of Mamba.
    return _layers_by_type(types, attention, _mamba2(config) if _RECURRENT in types else attention)


def _granite_networks(config: Config, layers: int) -> body.FeedForward:
    shared, count = config.integer("shared_intermediate_size"), config.count("num_local_experts", 8)
    if count == 0:
        return body.dense_rule("shared_intermediate_size")(config, layers)
    sizes, names = Config(config, num_local_experts=count), ("num_local_experts",)
    return (body.read_experts(sizes, width="intermediate_size", count=names, shared=shared),) * layers


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_TYPES = {name: name for name in _NEMOTRON_LETTERS.values()} | {_RECURRENT: "mamba", FULL: "attention"}


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
    config.refuse("sliding_window", unless=(), rule="must be null: a nemotron_h model has none")
    hidden_size, types = config.integer("hidden_size"), _nemotron_types(config)
    specs: dict[str, AttentionSpec] = {"mlp": RecurrentSpec(form="none", hidden_size=hidden_size)}
    specs["moe"] = specs["mlp"]
    if "attention" in types:
        head_dim = config.integer("head_dim", "attention_head_dim")
        specs["attention"] = attention_layer(config, head_dim=head_dim)
    if "mamba" in types:
        specs["mamba"] = RecurrentSpec(
            form="mamba2",
            hidden_size=hidden_size,
            num_heads=config.integer("mamba_num_heads"),
            head_dim=config.integer("mamba_head_dim"),
            state_size=config.integer("ssm_state_size"),
            num_groups=config.integer("n_groups", "mamba_n_groups"),
            conv_kernel=config.integer("conv_kernel", "mamba_d_conv"),
            bias=_mamba_bias(config, "use_conv_bias", "use_bias"),
        )
    return tuple(specs[name] for name in types)


def _nemotron_networks(config: Config, layers: int) -> body.FeedForward:
    if config.get("moe_latent_size") is not None:
        raise MissingFieldError("moe_latent_size", config["moe_latent_size"], "is not supported in a body")
    types = _nemotron_types(config)
    networks: dict[str, FeedForwardSpec | None] = {"mamba": None, "attention": None}
    if "mlp" in types:
        networks["mlp"] = body.dense_rule(gated=False, bias="mlp_bias")(config, 1)[0]
    if "moe" in types:
        if config.flag("mlp_bias", False):
            raise MissingFieldError("mlp_bias", True, "is not supported beside experts")
        shared = config.integer("moe_shared_expert_intermediate_size")
        names = ("n_routed_experts", "num_local_experts")
        networks["moe"] = body.read_experts(config, count=names, shared=shared, gated=False, score_correction=True)
    return tuple(networks[name] for name in types)


def _qwen_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers = config.num_layers()
    types = config.layer_types("layer_types", layers, _TYPES)
    if types is None:
        nth = config.optional_integer("full_attention_interval") or 4
        types = [_RECURRENT if (i + 1) % nth else FULL for i in range(layers)]
    head_dim, kv_heads = config.head_dim(absent=256), config.integer("num_key_value_heads")
    rope = read_rope(config, head_dim, fraction=0.25)
    attention = attention_layer(config, rope, num_kv_heads=kv_heads, head_dim=head_dim)
    attention = replace(attention, qk_norm="head", output_gate=True)
    recurrent = RecurrentSpec(
        form="gated_delta_net",
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("linear_num_value_heads"),
        head_dim=config.integer("linear_value_head_dim"),
        state_size=config.integer("linear_key_head_dim"),
        num_groups=config.integer("linear_num_key_heads"),
        conv_kernel=config.integer("linear_conv_kernel_dim"),
    )
    return _layers_by_type(types, attention, recurrent)


def _lfm2_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers, hidden_size = config.num_layers(), config.integer("hidden_size")
    types = config.layer_types("layer_types", layers, {FULL: FULL, "conv": "conv"})
    if types is None:
        indices = config.get("full_attn_idxs")
        if not isinstance(indices, list):
            raise MissingFieldError("full_attn_idxs", indices, "is required in config.json")
        types = [FULL if i in indices else "conv" for i in range(layers)]
    kv_heads, rope = config.integer("num_key_value_heads"), read_rope(config, config.head_dim(), theta=1e6)
    attention = replace(attention_layer(config, rope, num_kv_heads=kv_heads, bias=()), qk_norm="head")
    recurrent = RecurrentSpec(
        form="short_conv",
        hidden_size=hidden_size,
        num_heads=hidden_size,
        head_dim=1,
        conv_kernel=config.integer("conv_L_cache"),
        bias=("in_proj", "conv1d", "out_proj") if config.flag("conv_bias", False) else (),
    )
    return _layers_by_type(types, attention, recurrent)


def _lfm2_networks(config: Config, layers: int) -> body.FeedForward:
    width = config.integer("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = config.optional_integer("block_multiple_of") or 256
            factor = check_number("block_ffn_dim_multiplier", factor)
            if not 0 < factor <= MAX_SIZE:
                raise SpecError("block_ffn_dim_multiplier", factor, f"must be above 0 and at most {MAX_SIZE}")
            width = multiple * -(-int(factor * width) // multiple)
    return body.dense_rule()(Config(config, intermediate_size=width), layers)


def _lfm2_moe_networks(config: Config, layers: int) -> body.FeedForward:
    sparse = body.read_experts(config, score_correction=config.flag("use_expert_bias", True))
    dense = config.count("num_dense_layers", 2)
    return body.experts_or_dense(config, sparse, [i >= dense for i in range(layers)])


def _lfm2_body(feed_forward: body.Rule, config: Config, layers: int) -> BodySpec:
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    return read_body(feed_forward, Config(config, tie_word_embeddings=tied), layers)


def _kimi_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers, sizes = config.num_layers(), config.get("linear_attn_config")
    sizes = Config(sizes if isinstance(sizes, Mapping) else {})
    both = Config({**config, **sizes})
    for name in ("mla_use_output_gate", "routed_expert_hidden_size", "attn_res_block_size", "use_full_rank_gate"):
        if value := both.get(name):
            raise SpecError(name, value, "is not understood: of such models, only Kimi Linear is")
    config = Config({"q_lora_rank": None, **config})  # without the field it has no query latent
    types = config.layer_types("layer_types", layers, _TYPES)
    if (full := sizes.get("full_attn_layers")) is not None:  # counted from 1
        if not isinstance(full, list):
            raise SpecError("full_attn_layers", full, "must list layer numbers")
        types = [FULL if i + 1 in full else _RECURRENT for i in range(layers)]
    if types is None:
        raise MissingFieldError("layer_types", None, "is required in config.json")
    num_heads = both.integer("num_heads", "linear_num_heads")
    head_dim = sizes.integer("head_dim") if "head_dim" in sizes else config.integer("linear_head_dim")
    recurrent = RecurrentSpec(
        form="kimi_delta",
        hidden_size=config.integer("hidden_size"),
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=head_dim,
        num_groups=num_heads,
        conv_kernel=both.integer("short_conv_kernel_size", "linear_conv_kernel_dim"),
    )
    return _layers_by_type(types, latent_layer(config, rotated=False), recurrent)


READERS = {
    "jamba": Reader(_jamba_layers, partial(read_body, _jamba_networks)),
    "bamba": Reader(_bamba_layers, partial(read_body, body.dense_rule(bias="mlp_bias"))),
    "granitemoehybrid": Reader(_granite_layers, partial(read_body, _granite_networks)),
    "nemotron_h": Reader(_nemotron_layers, partial(read_body, _nemotron_networks, norms=1)),
    "qwen3_next": Reader(_qwen_layers, partial(read_body, body.qwen_experts_rule(shared=True))),
    "qwen3_5_text": Reader(_qwen_layers, partial(read_body, body.dense_rule())),
    "qwen3_5_moe_text": Reader(
        _qwen_layers, partial(read_body, body.qwen_experts_rule(shared=True, dense_layers=False))
    ),
    "lfm2": Reader(_lfm2_layers, partial(_lfm2_body, _lfm2_networks)),
    "lfm2_moe": Reader(_lfm2_layers, partial(_lfm2_body, _lfm2_moe_networks)),
    "kimi_linear": Reader(_kimi_layers, partial(read_body, body.deepseek_experts_rule(first_dense=1, by_type=True))),
}
