"""Families with latents: DeepSeek-V2 to V4, others with multi-head latent attention, and Step-3's latent of queries.

``num_key_value_heads`` and ``head_dim`` of families with MLA do not describe the cache, and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, RopeSpec
from headwise.models.specs.compressed import CompressedSpec
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.indexed_latent import IndexedLatentSpec
from headwise.models.specs.latent import LatentSpec, latent_bias
from headwise.models.specs.model import BodySpec
from headwise.models.specs.readers import body
from headwise.models.specs.readers.body import read_body
from headwise.models.specs.readers.fields import Config, MissingFieldError, Reader
from headwise.models.specs.readers.positions import read_rope, yarn_softmax_scale


def latent_layer(
    config: Config, *, interleaved: bool | None = None, rotated: bool = True, fraction: float | None = None
) -> LatentSpec:
    """Read one MLA layer.

    Args:
        config: the config.
        interleaved: whether rotary pairs are neighbours; None reads ``rope_interleave``, which is True by default.
        rotated: whether the rotary key is rotated.
        fraction: the family's default of the rotated part of a head, see `read_rope`.
    """
    rope_dim = config.integer("qk_rope_head_dim")
    unrotated = config.get("qk_nope_head_dim")  # 0 in a converted model that keeps every rotary channel
    nope_dim = 0 if type(unrotated) is int and unrotated == 0 else config.integer("qk_nope_head_dim")
    if "q_lora_rank" not in config:
        # One transformers class is for models with a query latent, which is its default, and without.
        rule = "is required in config.json, as null where queries have no latent"
        raise MissingFieldError("q_lora_rank", None, rule)
    q_lora_rank = config.optional_integer("q_lora_rank")
    if interleaved is None:
        interleaved = config.flag("rope_interleave", True)
    rope = read_rope(config, rope_dim, interleaved=interleaved, fraction=fraction) if rotated else None
    return LatentSpec(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=config.integer("v_head_dim"),
        q_lora_rank=q_lora_rank,
        bias=latent_bias("hf" if config.flag("attention_bias", False) else False, q_lora_rank),
        rope=rope,
        softmax_scale=yarn_softmax_scale(rope, nope_dim + rope_dim),
    )


def _layers(config: Config, fraction: float | None = None) -> tuple[AttentionSpec, ...]:
    return (latent_layer(config, fraction=fraction),) * config.num_layers()


def _minicpm3_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """MiniCPM3 rotates halves, and its published file leaves out the width of a value head, which is E/H."""
    if config.get("v_head_dim") is None:
        width = config.integer("hidden_size") // config.integer("num_attention_heads")
        config = Config(config, v_head_dim=width)
    return (latent_layer(config, interleaved=False),) * config.num_layers()


def _indexed_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Layers that attend to the tokens that an indexer selects; some may take the selection of the one before."""
    plain = latent_layer(config, interleaved=True)
    values: dict[str, Any] = {field.name: getattr(plain, field.name) for field in fields(plain)}
    values["index_topk"] = config.integer("index_topk")
    shared = IndexedLatentSpec(**values)
    heads, width = config.integer("index_n_heads"), config.integer("index_head_dim")
    full = replace(shared, index_n_heads=heads, index_head_dim=width)
    return tuple(full if is_full else shared for is_full in _indexers(config, config.num_layers()))


_PATTERN = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
"""The letters and words of ``index_topk_pattern``, and the type of layer that each means."""


def _indexers(config: Config, layers: int) -> list[bool]:
    """Whether each layer has an indexer, as transformers reads ``glm_moe_dsa``; all have one elsewhere."""
    if config["model_type"] != "glm_moe_dsa":
        return [True] * layers
    types = config.layer_types("indexer_types", layers, {"full": "full", "shared": "shared"})
    if types is None and (pattern := config.get("index_topk_pattern")) is not None:
        letters = list(pattern) if isinstance(pattern, str) else pattern
        types = Config(index_topk_pattern=letters).layer_types("index_topk_pattern", layers, _PATTERN)
    if types is not None:
        return [kind == "full" for kind in types]
    every = config.optional_integer("index_topk_freq") or 1
    offset = config.optional_integer("index_skip_topk_offset") or 2
    return [max(index - offset + 1, 0) % every == 0 for index in range(layers)]


_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_COMPRESSED_TYPES = {name: name for name in (_SLIDING, _SPARSE, _HEAVY)}
_RATES = {_SPARSE: 4, _HEAVY: 128}


def _compressed_layers(config: Config) -> tuple[AttentionSpec, ...]:
    config.refuse("num_key_value_heads", unless=(None, 1), rule="must be 1: all heads share one key")
    for name in ("attention_bias", "mlp_bias"):
        config.refuse(name, unless=(None, False), rule="is not understood in a deepseek_v4 model")
    config.refuse("n_shared_experts", unless=(None, 1), rule="is understood only as 1")
    plain = CompressedSpec(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        head_dim=config.integer("head_dim"),
        q_lora_rank=config.integer("q_lora_rank"),
        output_groups=config.integer("o_groups"),
        o_lora_rank=config.integer("o_lora_rank"),
        window=config.integer("sliding_window"),
    )
    rates = _rates(config)
    rope = {kind: _compressed_rope(config, plain.head_dim, kind) for kind in ("main", "compress")}
    heavy = replace(plain, rope=rope["compress"], rate=rates[_HEAVY])
    specs = {
        _SLIDING: replace(plain, rope=rope["main"]),
        _HEAVY: heavy,
        _SPARSE: replace(
            heavy,
            rate=rates[_SPARSE],
            index_topk=config.integer("index_topk"),
            index_n_heads=config.integer("index_n_heads"),
            index_head_dim=config.integer("index_head_dim"),
        ),
    }
    return tuple(specs[name] for name in _compressed_types(config, rates))


def _rates(config: Config) -> dict[str, int]:
    """The number of tokens of an entry in each type of layer."""
    found = config.get("compress_rates") or {}
    if not isinstance(found, dict):
        raise SpecError("compress_rates", found, "must be a JSON object")
    given, older = Config(found), {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
    rates = {
        name: config.optional_integer(older[name]) or given.optional_integer(name) or usual
        for name, usual in _RATES.items()
    }
    if rates[_SPARSE] == rates[_HEAVY]:
        raise SpecError("compress_rates", found, "must differ: a layer's type is told by its rate")
    return rates


def _compressed_types(config: Config, rates: dict[str, int]) -> list[str]:
    """Each layer's type: as listed, or by its number of tokens in an entry, or those of DeepSeek-V4-Pro."""
    layers = config.num_layers()
    if (types := config.layer_types("layer_types", layers, _COMPRESSED_TYPES)) is not None:
        return types
    by_rate = {0: _SLIDING, **{rate: name for name, rate in rates.items()}}
    ratios = config.get("compress_ratios")
    if ratios is None:
        return [_HEAVY if index < 2 or index % 2 == 0 else _SPARSE for index in range(layers)]
    # The file lists a layer more for each that predicts further tokens.
    known = isinstance(ratios, list) and all(type(ratio) is int and ratio in by_rate for ratio in ratios)
    if not known or len(ratios) < layers:
        raise SpecError("compress_ratios", ratios, f"must list one of {sorted(by_rate)} for each of {layers} layers")
    return [by_rate[ratio] for ratio in ratios[:layers]]


def _compressed_rope(config: Config, head_dim: int, kind: str) -> RopeSpec:
    """The embedding of layers with entries (``compress``) or without (``main``), which the file may have in two
    objects of these names; otherwise it has one, for layers with entries."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise SpecError("rope_parameters", given, "must be a JSON object")
    rotated = config.optional_integer("qk_rope_head_dim")
    part = config.get("partial_rotary_factor") or (1 / 8 if rotated is None else rotated / head_dim)
    if isinstance(given.get("main"), Mapping) and isinstance(given.get("compress"), Mapping):
        own = {**given[kind]}
        if own.get("partial_rotary_factor") is None:
            raise SpecError(f"rope_parameters.{kind}.partial_rotary_factor", None, "is required in config.json")
    elif kind == "main":
        own = {"rope_theta": config.get("rope_theta", 10000.0), "partial_rotary_factor": part}
    else:
        theta = config.get("compress_rope_theta", 160000.0)
        own = {**given, "rope_theta": theta, "partial_rotary_factor": part}
        own = {key: value for key, value in own.items() if key not in ("main", "compress")}
        if own.get("rope_type", own.get("type")) == "yarn":
            own.setdefault("attention_factor", 1.0)
    own.pop("truncate", None)  # which transformers does not read in such an object
    beside = {key: value for key, value in config.items() if key != "original_max_position_embeddings"}
    return read_rope(Config(beside, rope_scaling=own), head_dim, fraction=1.0, interleaved=True)


def _compressed_networks(config: Config, layers: int) -> body.FeedForward:
    width = config.integer("moe_intermediate_size")
    names = ("n_routed_experts", "num_local_experts")
    chosen = body.read_experts(config, count=names, shared=width, score_correction=True)
    # A token's id chooses its experts in the first layers, and nothing balances them.
    hashed = replace(chosen, score_correction=False)
    types = config.layer_types("mlp_layer_types", layers, {"hash_moe": "hash_moe", "moe": "moe"})
    if types is None:
        first = config.count("num_hash_layers", 3)
        types = ["hash_moe" if index < first else "moe" for index in range(layers)]
    return tuple(hashed if name == "hash_moe" else chosen for name in types)


def _compressed_body(config: Config, layers: int) -> BodySpec:
    """DeepSeek-V4 has residual streams side by side."""
    streams = config.optional_integer("hc_mult") or 4
    return replace(read_body(_compressed_networks, config, layers), streams=streams)


def _step_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Multi-matrix factorization attention: one key–value head of 256 dims, and queries that come from a latent.

    Source: configuration_step3.py and modeling_step3.py of huggingface.co/stepfun-ai/step3.
    """
    head_dim, groups = config.integer("head_dim"), config.optional_integer("num_attention_groups") or 1
    if groups != 1:
        raise SpecError("num_attention_groups", groups, "must be 1: Step-3 has one key–value head")
    longest = config.optional_integer("max_position_embeddings", "max_position_embedding")
    layer = GroupedSpec(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=head_dim,
        q_lora_rank=config.optional_integer("share_q_dim") or head_dim,
        rope=read_rope(Config(config, max_position_embeddings=longest), head_dim, theta=5e5),
    )
    return (layer,) * config.num_layers()


def _step_networks(config: Config, layers: int) -> body.FeedForward:
    shared = config.integer("share_expert_dim")
    sparse = body.read_experts(config, count=("moe_num_experts",), used=("moe_top_k",), shared=shared)
    found = config.get("moe_layers_enum")
    if isinstance(found, str):  # as published
        numbers = {str(index): index for index in range(layers)}
        found = [numbers.get(word.strip(), word) for word in found.split(",")]
    elif found is None:
        found = [*range(1, layers)]
    return body.experts_or_dense(config, sparse, body.are_in_list("moe_layers_enum", found, layers))


LATENT_READERS = {
    "deepseek_v2": Reader(_layers, partial(read_body, body.deepseek_experts_rule(score_correction=False))),
    "deepseek_v3": Reader(_layers, partial(read_body, body.deepseek_experts_rule())),
    "deepseek_v32": Reader(_indexed_layers, partial(read_body, body.deepseek_experts_rule(by_type=True))),
    "glm_moe_dsa": Reader(
        _indexed_layers, partial(read_body, body.deepseek_experts_rule(first_dense=3, by_type=True))
    ),
    "kimi_k2": Reader(_layers, partial(read_body, body.deepseek_experts_rule())),
    "glm4_moe_lite": Reader(
        partial(_layers, fraction=1.0), partial(read_body, body.deepseek_experts_rule(first_dense=1, by_type=True))
    ),
    "minicpm3": Reader(_minicpm3_layers, partial(read_body, body.dense_rule(bias="mlp_bias"), tied=True)),
}
"""The families whose layers are MLA."""
READERS = {
    **LATENT_READERS,
    "deepseek_v4": Reader(_compressed_layers, _compressed_body),
    "step3_text": Reader(_step_layers, partial(read_body, _step_networks)),
}
