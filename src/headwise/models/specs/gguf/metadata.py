"""The metadata of the GGUF file that a ``config.json`` is equivalent to: what llama.cpp needs to know of a model.

The other direction is `gguf_config`. Sources: the GGUF specification (ggml) and what llama.cpp's loaders read
(src/models/llama.cpp, qwen2.cpp, qwen3.cpp, deepseek2.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, RopeSpec
from headwise.models.specs.gguf.config import llama3_factors
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.huggingface import read_config
from headwise.models.specs.latent import LatentSpec
from headwise.models.specs.model import ModelSpec

GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "deepseek_v3": "deepseek2",
}
"""What llama.cpp calls each model type that headwise writes for it."""

_SMALLEST, _LARGEST = 1.1754944e-38, 3.4028234e38
"""The normal numbers of float32."""

_SIGMOID = 2
"""The number of the function by which DeepSeek-V3 scores experts; it tells V3 from V2."""


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file says of a model beside its weights and its tokenizer.

    Attributes:
        architecture: llama.cpp's name.
        metadata: the values by their keys, the architecture's name included.
        rope_factors: the numbers that the frequencies of rotary pairs are divided by; none where empty.
    """

    architecture: str
    metadata: Mapping[str, Any]
    rope_factors: tuple[float, ...] = ()


def gguf_model(config: Mapping[str, Any]) -> GgufModel:
    """The metadata that a ``config.json`` is equivalent to.

    For example ``gguf_model(json.loads(Path("model/config.json").read_text())).architecture``.

    Args:
        config: the content of the file, with every field that its class has a default for.

    Raises:
        SpecError: llama.cpp has no such architecture, or not all that the config asks for.
    """
    model_type = config.get("model_type")
    if model_type not in GGUF_ARCHITECTURES:
        rule = f"is not written as GGUF; can: {', '.join(GGUF_ARCHITECTURES)}"
        raise SpecError("model_type", model_type, rule)
    spec = read_config(dict(config))
    first, *_ = spec.layers
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise SpecError("hidden_act", activation, "must be silu, which llama.cpp's model always computes")
    if config.get("mlp_bias"):
        raise SpecError("mlp_bias", True, "has no place in llama.cpp's model")
    if model_type == "qwen3" and config.get("attention_bias"):
        raise SpecError("attention_bias", True, "has no place in llama.cpp's qwen3")
    _refuse_windows(spec)
    architecture = GGUF_ARCHITECTURES[str(model_type)]
    rope, factors = _rope(first.rope)
    own = {
        "block_count": len(spec.layers),
        "context_length": config["max_position_embeddings"],
        "embedding_length": spec.hidden_size,
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        **rope,
        **(_latent(config, first) if isinstance(first, LatentSpec) else _grouped(first)),
    }
    for key, value in own.items():
        _refuse_large(key, value)
    return GgufModel(architecture, {f"{architecture}.{key}": value for key, value in own.items()}, factors)


def _refuse_large(key: str, value: Any) -> None:
    """Refuse a number that a field of GGUF cannot hold.

    Raises:
        SpecError: it needs more than 32 bits.
    """
    fits = True
    if isinstance(value, float):
        fits = value == 0 or _SMALLEST <= abs(value) <= _LARGEST
    elif isinstance(value, int):
        fits = 0 <= value < 2**32
    if not fits:
        raise SpecError(key, value, "must fit in the 32 bits that GGUF has for it")


def _refuse_windows(spec: ModelSpec) -> None:
    """Refuse sliding windows: llama.cpp's classes of these families have none.

    Raises:
        SpecError: a layer has one.
    """
    for layer in spec.layers:
        if layer.sliding_window is not None:
            rule = f"has no place in llama.cpp's {spec.model_type}; it attends to all tokens"
            raise SpecError("sliding_window", layer.sliding_window, rule)


def _grouped(layer: AttentionSpec) -> dict[str, Any]:
    assert isinstance(layer, GroupedSpec)
    if layer.rope is not None and layer.rope.dim != layer.head_dim:
        raise SpecError("rope dim", layer.rope.dim, f"must be the head dim, {layer.head_dim}, in llama.cpp's model")
    return {
        "attention.head_count_kv": layer.num_kv_heads,
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
        "rope.dimension_count": layer.head_dim,
    }


def _latent(config: Mapping[str, Any], layer: LatentSpec) -> dict[str, Any]:
    """MLA: to llama.cpp one key head of R + P dims, whose first R are the values.

    Raises:
        SpecError: its layers have biases, or a norm llama.cpp does not compute.
    """
    if layer.bias:
        rule = "have no place in llama.cpp's deepseek2; convert with --bias-free"
        raise SpecError("biases", ", ".join(layer.bias), rule)
    if not config.get("rope_interleave", True):
        rule = "must be true for llama.cpp's deepseek2, which rotates neighbouring pairs"
        raise SpecError("rope_interleave", False, rule)
    if layer.qk_nope_head_dim < 1:
        raise SpecError("qk_nope_head_dim", layer.qk_nope_head_dim, "must be at least 1 in llama.cpp's deepseek2")
    if config["first_k_dense_replace"] < config["num_hidden_layers"]:
        raise SpecError("first_k_dense_replace", config["first_k_dense_replace"], "experts are not written as GGUF")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": layer.kv_lora_rank + layer.qk_rope_head_dim,
        "attention.value_length": layer.kv_lora_rank,
        "attention.key_length_mla": layer.qk_nope_head_dim + layer.qk_rope_head_dim,
        "attention.value_length_mla": layer.v_head_dim,
        "attention.kv_lora_rank": layer.kv_lora_rank,
        "attention.q_lora_rank": layer.q_lora_rank or 0,
        "rope.dimension_count": layer.qk_rope_head_dim,
        "leading_dense_block_count": config["num_hidden_layers"],
        # There are no experts, but the loader asks for these.
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 0,
        "expert_gating_func": _SIGMOID,
    }


def _rope(rope: RopeSpec | None) -> tuple[dict[str, Any], tuple[float, ...]]:
    """The metadata of RoPE, and the factors of its frequencies.

    Raises:
        SpecError: llama.cpp's model cannot compute it.
    """
    if rope is None:
        raise SpecError("rope", None, "must be there: llama.cpp's model always rotates")
    base = {"rope.freq_base": float(rope.theta)}
    given = dict(rope.parameters)
    if rope.rope_type == "default":
        return base, ()
    if rope.rope_type == "linear":
        return base | {"rope.scaling.type": "linear", "rope.scaling.factor": float(given["factor"])}, ()
    if rope.rope_type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if given["high_freq_factor"] <= given["low_freq_factor"]:
            rule = f"must be above low_freq_factor, {given['low_freq_factor']}"
            raise SpecError("high_freq_factor", given["high_freq_factor"], rule)
        return base, llama3_factors(rope.theta, rope.dim, *(given[name] for name in names))
    raise SpecError("rope_type", rope.rope_type, "is not written as GGUF; can: default, linear, llama3")
