"""Multi-head latent attention: DeepSeek-V2 and V3, and families like them.

Their ``num_key_value_heads`` and ``head_dim`` do not describe the cache, and are not read.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.indexed_latent import IndexedLatentSpec
from headwise.models.specs.latent import LatentSpec, latent_bias
from headwise.models.specs.readers import body
from headwise.models.specs.readers.fields import (
    Config,
    MissingFieldError,
    Reader,
    read_flag,
    read_integer,
    read_layer_types,
    read_num_layers,
    read_optional_integer,
)
from headwise.models.specs.readers.mixed import read_body
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
    rope_dim = read_integer(config, "qk_rope_head_dim")
    nope_dim = _nope_dim(config)
    if "q_lora_rank" not in config:
        # One transformers class is for models with a query latent, which is its default, and without.
        raise MissingFieldError(
            "q_lora_rank", None, "is required in config.json, as null where queries have no latent"
        )
    q_lora_rank = read_optional_integer(config, "q_lora_rank")
    if interleaved is None:
        interleaved = read_flag(config, "rope_interleave", True)
    rope = read_rope(config, rope_dim, interleaved=interleaved, fraction=fraction) if rotated else None
    return LatentSpec(
        hidden_size=read_integer(config, "hidden_size"),
        num_heads=read_integer(config, "num_attention_heads"),
        kv_lora_rank=read_integer(config, "kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=read_integer(config, "v_head_dim"),
        q_lora_rank=q_lora_rank,
        bias=latent_bias("hf" if read_flag(config, "attention_bias", False) else False, q_lora_rank),
        rope=rope,
        softmax_scale=yarn_softmax_scale(rope, nope_dim + rope_dim),
    )


def _nope_dim(config: Config) -> int:
    """Read ``qk_nope_head_dim``, which is 0 in a converted model that keeps every rotary channel."""
    value = config.get("qk_nope_head_dim")
    return 0 if type(value) is int and value == 0 else read_integer(config, "qk_nope_head_dim")


def _layers(config: Config, fraction: float | None = None) -> tuple[AttentionSpec, ...]:
    return (latent_layer(config, fraction=fraction),) * read_num_layers(config)


def _minicpm3_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """MiniCPM3 rotates halves, and its published file leaves out the width of a value head, which is E/H."""
    if config.get("v_head_dim") is None:
        config = {
            **config,
            "v_head_dim": read_integer(config, "hidden_size") // read_integer(config, "num_attention_heads"),
        }
    return (latent_layer(config, interleaved=False),) * read_num_layers(config)


def _indexed_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """Layers that attend to the tokens that an indexer selects; some may take the selection of the one before."""
    plain = latent_layer(config, interleaved=True)
    values: dict[str, Any] = {field.name: getattr(plain, field.name) for field in fields(plain)}
    values["index_topk"] = read_integer(config, "index_topk")
    shared = IndexedLatentSpec(**values)
    heads, width = read_integer(config, "index_n_heads"), read_integer(config, "index_head_dim")
    full = replace(shared, index_n_heads=heads, index_head_dim=width)
    return tuple(full if is_full else shared for is_full in _indexers(config, read_num_layers(config)))


_PATTERN = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
"""The letters and words of ``index_topk_pattern``, and the type of layer that each means."""


def _indexers(config: Config, layers: int) -> list[bool]:
    """Whether each layer has an indexer, as transformers reads ``glm_moe_dsa``; all have one elsewhere."""
    if config["model_type"] != "glm_moe_dsa":
        return [True] * layers
    types = read_layer_types(config, "indexer_types", layers, {"full": "full", "shared": "shared"})
    if types is None and (pattern := config.get("index_topk_pattern")) is not None:
        letters = list(pattern) if isinstance(pattern, str) else pattern
        types = read_layer_types({"index_topk_pattern": letters}, "index_topk_pattern", layers, _PATTERN)
    if types is not None:
        return [kind == "full" for kind in types]
    every = read_optional_integer(config, "index_topk_freq") or 1
    offset = read_optional_integer(config, "index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return [max(index - offset + 1, 0) % every == 0 for index in range(layers)]


def _reader(feed_forward: body.Rule) -> Reader:
    return Reader(_layers, partial(read_body, feed_forward))


READERS = {
    "deepseek_v2": _reader(body.deepseek_experts_rule(score_correction=False)),
    "deepseek_v3": _reader(body.deepseek_experts_rule()),
    "deepseek_v32": Reader(_indexed_layers, partial(read_body, body.deepseek_experts_rule(by_type=True))),
    "glm_moe_dsa": Reader(
        _indexed_layers, partial(read_body, body.deepseek_experts_rule(first_dense=3, by_type=True))
    ),
    "kimi_k2": _reader(body.deepseek_experts_rule()),
    "glm4_moe_lite": Reader(
        partial(_layers, fraction=1.0), partial(read_body, body.deepseek_experts_rule(first_dense=1, by_type=True))
    ),
    "minicpm3": Reader(_minicpm3_layers, partial(read_body, body.dense_rule(bias="mlp_bias"), tied=True)),
}
