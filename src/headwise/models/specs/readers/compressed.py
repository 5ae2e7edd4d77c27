"""DeepSeek-V4: a window of tokens and compressed entries, and residual streams side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, RopeSpec
from headwise.models.specs.compressed import CompressedSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec
from headwise.models.specs.readers.body import read_body
from headwise.models.specs.readers.fields import (
    Config,
    Reader,
    read_count,
    read_integer,
    read_layer_types,
    read_num_layers,
    read_optional_integer,
    refuse_value,
)
from headwise.models.specs.readers.positions import read_rope

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_TYPES = {name: name for name in (_SLIDING, _SPARSE, _HEAVY)}
_RATES = {_SPARSE: 4, _HEAVY: 128}


def _layers(config: Config) -> tuple[AttentionSpec, ...]:
    refuse_value(config, "num_key_value_heads", unless=(None, 1), rule="must be 1: all heads share one key")
    for name in ("attention_bias", "mlp_bias"):
        refuse_value(config, name, unless=(None, False), rule="is not understood in a deepseek_v4 model")
    refuse_value(config, "n_shared_experts", unless=(None, 1), rule="is understood only as 1")
    plain = CompressedSpec(
        hidden_size=read_integer(config, "hidden_size"),
        num_heads=read_integer(config, "num_attention_heads"),
        head_dim=read_integer(config, "head_dim"),
        q_lora_rank=read_integer(config, "q_lora_rank"),
        output_groups=read_integer(config, "o_groups"),
        o_lora_rank=read_integer(config, "o_lora_rank"),
        window=read_integer(config, "sliding_window"),
    )
    rates = _rates(config)
    rope = {kind: _rope(config, plain.head_dim, kind) for kind in ("main", "compress")}
    heavy = replace(plain, rope=rope["compress"], rate=rates[_HEAVY])
    specs = {
        _SLIDING: replace(plain, rope=rope["main"]),
        _HEAVY: heavy,
        _SPARSE: replace(
            heavy,
            rate=rates[_SPARSE],
            index_topk=read_integer(config, "index_topk"),
            index_n_heads=read_integer(config, "index_n_heads"),
            index_head_dim=read_integer(config, "index_head_dim"),
        ),
    }
    return tuple(specs[name] for name in _layer_types(config, rates))


def _rates(config: Config) -> dict[str, int]:
    """The number of tokens of an entry in each type of layer."""
    found = config.get("compress_rates") or {}
    if not isinstance(found, dict):
        raise SpecError("compress_rates", found, "must be a JSON object")
    older = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
    rates = {
        name: read_optional_integer(config, older[name]) or read_optional_integer(found, name) or usual
        for name, usual in _RATES.items()
    }
    if rates[_SPARSE] == rates[_HEAVY]:
        raise SpecError("compress_rates", found, "must differ: a layer's type is told by its rate")
    return rates


def _is_rate(ratio: object, by_rate: Mapping[int, str]) -> bool:
    return type(ratio) is int and ratio in by_rate


def _layer_types(config: Config, rates: dict[str, int]) -> list[str]:
    """Each layer's type: as listed, or by its number of tokens in an entry, or those of DeepSeek-V4-Pro."""
    layers = read_num_layers(config)
    if (types := read_layer_types(config, "layer_types", layers, _TYPES)) is not None:
        return types
    by_rate = {0: _SLIDING, **{rate: name for name, rate in rates.items()}}
    ratios = config.get("compress_ratios")
    if ratios is None:
        return [_HEAVY if index < 2 or index % 2 == 0 else _SPARSE for index in range(layers)]
    # The file lists a layer more for each that predicts further tokens.
    if not isinstance(ratios, list) or len(ratios) < layers or any(not _is_rate(ratio, by_rate) for ratio in ratios):
        raise SpecError("compress_ratios", ratios, f"must list one of {sorted(by_rate)} for each of {layers} layers")
    return [by_rate[ratio] for ratio in ratios[:layers]]


def _rope(config: Config, head_dim: int, kind: str) -> RopeSpec:
    """The embedding of layers with entries (``compress``) or without (``main``), which the file may have in two
    objects of these names; otherwise it has one, for layers with entries."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise SpecError("rope_parameters", given, "must be a JSON object")
    rotated = read_optional_integer(config, "qk_rope_head_dim")
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
    return read_rope({**beside, "rope_scaling": own}, head_dim, fraction=1.0, interleaved=True)


def _body(config: Config, layers: int) -> BodySpec:
    width = read_integer(config, "moe_intermediate_size")
    chosen = FeedForwardSpec(
        hidden_size=read_integer(config, "hidden_size"),
        intermediate_size=width,
        num_experts=read_integer(config, "n_routed_experts", "num_local_experts"),
        experts_per_token=read_integer(config, "num_experts_per_tok"),
        shared_intermediate_size=width,
        score_correction=True,
    )
    # A token's id chooses its experts in the first layers, and nothing balances them.
    hashed = replace(chosen, score_correction=False)
    types = read_layer_types(config, "mlp_layer_types", layers, {"hash_moe": "hash_moe", "moe": "moe"})
    if types is None:
        first = read_count(config, "num_hash_layers", 3)
        types = ["hash_moe" if index < first else "moe" for index in range(layers)]
    networks = tuple(hashed if name == "hash_moe" else chosen for name in types)
    return replace(read_body(config, networks), streams=read_optional_integer(config, "hc_mult") or 4)


READERS = {"deepseek_v4": Reader(_layers, _body)}
